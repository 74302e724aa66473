"""The recorded GRPO batch with values and returns, and the value loss written out sample by sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hybrid_rl.batch import Batch
from hybrid_rl.config import TrainerConfig, load_config
from hybrid_rl.models.heads.value_head import value_model_of
from hybrid_rl.training.critic import Critic
from tests.reference import grpo_case
from tests.support.float64 import KeepFloat64
from tests.support.inside.training import named_gradients
from tests.unit.training.grpo_step import case_batch


def config_of(**keys: Any) -> TrainerConfig:
    """The defaults, with keys by leaf name; nothing of it is checked."""
    config = load_config({"dtype": "float32"})[0]
    for section in ("model", "optimizer", "algorithm", "fsdp"):
        names = {field.name for field in dataclasses.fields(getattr(config, section))}
        chosen = {name: keys.pop(name) for name in list(keys) if name in names}
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **chosen)})
    assert not keys, f"unknown keys {keys}"
    return config


def critic_batch() -> Batch:
    """16 samples. Returns are of a size that the model's values are now within the clip range of the old ones, now
    not."""
    batch = case_batch()
    completions = batch["completion_ids"]
    count = len(completions.values)
    return batch.with_columns(
        values=completions.with_values(torch.tensor([0.3 * math.sin(1.3 * i) for i in range(count)])),
        returns=completions.with_values(torch.tensor([0.5 + math.cos(0.7 * i) for i in range(count)])),
    )


def policy_with_head(dtype: torch.dtype) -> PreTrainedModel:
    """A critic of the recorded model whose head is not zero."""
    module = value_model_of(grpo_case.build_model(dtype))
    with torch.no_grad():
        size = module.score.weight.shape[1]
        module.score.weight.copy_(torch.tensor([[0.2 * math.sin(2.1 * i + 1) for i in range(size)]]))
        module.score.bias.fill_(0.05)
    return module


def plain_values(module: PreTrainedModel) -> list[Tensor]:
    """One unpadded forward of the class itself per sample: the number at the place before each completion token."""
    found = []
    for sample in grpo_case.build_samples():
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        with KeepFloat64():
            logits: Tensor = module(input_ids=ids, use_cache=False).logits[0, :, 0]
        found.append(logits[len(sample.prompt_ids) - 1 : -1])
    return found


def plain_loss(
    values: list[Tensor],
    batch: Batch,
    clip: float | None,
    rows: Sequence[int] | None = None,
    left_out: Tensor | None = None,
) -> tuple[Tensor, int, int]:
    """The value loss of these samples, token by token: its value, clipped tokens, and tokens. left_out: bool [M]."""
    offsets = batch["values"].offsets.tolist()
    terms, clipped = [], 0
    for row in range(len(values)) if rows is None else rows:
        for place, value in enumerate(values[row]):
            index = offsets[row] + place
            if left_out is not None and left_out[index]:
                continue
            old, target = float(batch["values"].values[index]), float(batch["returns"].values[index])
            error, now = (value - target) ** 2, float(value.detach())
            if clip is not None and not old - clip <= now <= old + clip:
                bound = old + clip if now > old else old - clip
                if (bound - target) ** 2 > float(error.detach()):
                    error = torch.tensor((bound - target) ** 2, dtype=value.dtype)
                    clipped += 1
            terms.append(0.5 * error)
    return torch.stack(terms).sum() / len(terms), clipped, len(terms)


def plain_gradient(module: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


class RecordedGradients:
    """What the optimizer of a critic gets to see, by step and name; of shards put together. Collective."""

    def __init__(self, critic: Critic) -> None:
        self.by_step: list[dict[str, Tensor]] = []
        step, optimizer = critic.optimizer.step, critic.optimizer

        def recording() -> tuple[float, bool]:
            wrapped = dict(named_gradients(optimizer))
            self.by_step.append({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in wrapped.items()})
            return step()

        optimizer.step = recording  # type: ignore[method-assign]
