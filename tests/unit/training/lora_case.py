"""The recorded GRPO batch under a model with adapters: its loss and their gradients as the library computes them, and
as peft does on padded samples, written out in plain PyTorch."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.lora.inject import inject, is_adapter_name
from hybrid_rl.models.lora.peft_config import ENTRIES, peft_config_of
from hybrid_rl.models.packed.causal_lm import WithoutAdapters
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.sharding.fsdp import accumulating
from hybrid_rl.training.spec import Counts, LossSpec, SideModels
from hybrid_rl.weights.boxes import local_box, local_tensor
from tests.reference import grpo_case
from tests.support.float64 import KeepFloat64
from tests.unit.models.families import build
from tests.unit.training.grpo_step import case_batch, case_config, terms_of, with_advantages

TEMPERATURE, BETA, CLIP = 0.9, 0.3, 0.2
MICRO_BATCHES = [[0, 1, 2, 3, 9, 5], [4, 6, 7, 8], [], list(range(10, 16))]
Result = tuple[float, dict[str, Tensor]]


def config_of(keys: Mapping[str, Any], **more: Any) -> TrainerConfig:
    """keys: of the section lora, r among them."""
    lora = {f"{'peft' if name in ENTRIES else 'lora'}.{name}": value for name, value in keys.items()}
    settings = {
        "loss_type": "dapo",
        "beta": BETA,
        "temperature": TEMPERATURE,
        "epsilon": CLIP,
        "use_bias_correction_kl": False,
    }
    return case_config(**settings, **lora, **more)


@torch.no_grad()
def give_values(module: nn.Module) -> None:
    """Adapters that show: numbers of their own for each tensor, whatever part of it is here; what is multiplied (DoRA's
    magnitudes) and what is trained whole moves away from where it starts."""
    for name, parameter in module.named_parameters():
        name = name.removeprefix("base_model.model.")
        if not is_adapter_name(name):
            continue
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        drawn = torch.randn(parameter.shape, generator=generator)[local_box(parameter)]
        local = local_tensor(parameter)
        if ".lora_A." in name or ".lora_B." in name:
            local.copy_(0.3 * drawn)
        else:
            local.mul_(1 + 0.1 * drawn.to(local.dtype))


def adapted(family: str, keys: Mapping[str, Any], dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    module = build(family, dtype=dtype, **changes)
    inject(module, peft_config_of(keys))
    give_values(module)
    return module


def step(
    model: CausalLM, config: TrainerConfig, batch: Batch, micro_batches: Sequence[Sequence[int]] = MICRO_BATCHES
) -> float:
    """Score with the reference and take the backward passes of these micro-batches; this rank's part of the loss."""
    reference: Any = WithoutAdapters(model)
    spec = LossSpec.of(config)
    counts = Counts.of(batch, spec)
    total = 0.0
    with KeepFloat64():
        if not spec.reads_vocabulary:
            batch = batch.with_columns(ref_logprobs=scored(reference, batch, micro_batches))
        for index, rows in enumerate(micro_batches):
            with accumulating(model, is_last=index == len(micro_batches) - 1):
                loss, _, _ = micro_batch_loss(
                    model, micro_batch(batch, rows), *terms_of(config, counts), SideModels(reference)
                )
                loss.backward()
            total += float(loss.detach())
    return total


@torch.no_grad()
def scored(model: CausalLM, batch: Batch, micro_batches: Sequence[Sequence[int]]) -> Jagged:
    """What `batch_logprobs` computes, rounded to float32 at the end only."""
    completions = batch["completion_ids"]
    place = completions.with_values(torch.arange(len(completions.values)))
    column = torch.zeros(len(completions.values))
    for rows in micro_batches:
        micro = micro_batch(batch, rows)
        row = PackedRow.of(micro["prompt_ids"], micro["completion_ids"], model.device)
        logprobs = model.row_logprobs(row, TEMPERATURE)[0]
        if rows:
            column[place.select(torch.as_tensor(rows)).values] = logprobs.to(column)
    return completions.with_values(column)


def recorded(old: Sequence[Sequence[float]]) -> Batch:
    return with_advantages(case_batch(old=old, temperature=TEMPERATURE))


def padded_logs(model: nn.Module) -> list[Tensor]:
    """ln p of every token of the vocabulary at each completion token, N tensors [T_n, V], from padded samples."""
    samples = grpo_case.build_samples()
    sequences = [sample.prompt_ids + sample.completion_ids for sample in samples]
    width = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in sequences])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in sequences])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [
        (logits[n, len(sample.prompt_ids) - 1 : len(sequences[n]) - 1] / TEMPERATURE).log_softmax(-1)
        for n, sample in enumerate(samples)
    ]


def chosen(logs: Sequence[Tensor]) -> list[Tensor]:
    samples = grpo_case.build_samples()
    return [
        rows.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
        for rows, sample in zip(logs, samples, strict=True)
    ]


def by_peft(
    family: str, keys: Mapping[str, Any], dtype: torch.dtype, *, exact_kl: bool = False, **changes: Any
) -> tuple[Result, list[list[float]]]:
    """Loss and gradients of peft's own model, and the old logprobs that went into them."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what peft does by itself
        model = get_peft_model(build(family, dtype=dtype, **changes), LoraConfig(**keys), autocast_adapter_dtype=False)
    give_values(model)
    advantages = with_advantages(case_batch())["advantages"]
    with KeepFloat64():
        with torch.no_grad(), model.disable_adapter():
            reference = padded_logs(model)
        logs = padded_logs(model)
        now = chosen(logs)
        old = grpo_case.perturbed_logprobs([row.detach() for row in now], "old")
        total = torch.zeros((), dtype=dtype)
        num_tokens = sum(map(len, now))
        for n, row in enumerate(now):
            ratio = (row - torch.tensor(old[n]).to(dtype)).exp()
            advantage = advantages[n].to(dtype)
            total = total - torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()
            if exact_kl:
                kl = (logs[n].exp() * (logs[n] - reference[n])).sum()
            else:
                gap = chosen(reference)[n] - row
                kl = (gap.exp() - gap - 1).sum()
            total = total + BETA * kl
        loss = total / num_tokens
        loss.backward()
    return (loss.item(), gradients(model)), old


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of what is trained, whole, by the names in the module; nothing else has any."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("base_model.model.")
        assert parameter.requires_grad == is_adapter_name(name), name
        assert (parameter.grad is None) != parameter.requires_grad, name
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def check(mine: Result, theirs: Result, tolerance: float) -> None:
    """Loss and gradients, relative to the largest of them; each tensor must have one that is not lost in rounding."""
    assert mine[0] == pytest.approx(theirs[0], abs=tolerance * max(1, abs(theirs[0])))
    assert mine[1].keys() == theirs[1].keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs[1].values())
    for name, expected in theirs[1].items():
        gap = float((mine[1][name].double() - expected.double()).abs().max()) / scale
        assert gap <= tolerance, f"{name}: {gap:.1e}"
        assert float(expected.abs().max()) / scale > 10 * tolerance, name
