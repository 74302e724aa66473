"""The GRPO step whose loss and gradient were recorded from TRL: model, batch and perturbed logprobs, nothing random.

Everything comes from formulas evaluated in float64, so any process rebuilds it bit for bit. Nothing here knows TRL:
the recorder (`record_trl_grpo.py`) and our own tests both import this file. Shapes: N = 16 samples (4 prompts x G = 4),
T_n = completion length of sample n. The scales of the weights keep float32 rounding of the gradients below 1e-7.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

PAD_ID = 0
EOS_ID = 1
VOCAB_SIZE = 24
NUM_GENERATIONS = 4
# Longer than any completion of the batch: dr_grpo must divide by this number and not by the width of the batch.
MAX_COMPLETION_LENGTH = 12
PROMPT_LENGTHS = (3, 7, 5, 4)
COMPLETION_LENGTHS = (1, 5, 9, 3, 4, 2, 7, 6, 9, 1, 8, 5, 3, 9, 2, 6)
# These samples do not end in EOS: they were cut off. Sample 9 is a single token that is not EOS.
TRUNCATED = (2, 7, 8, 9, 13)
# Group 1 has equal rewards; group 2 is graded; groups 0 and 3 are pass or fail.
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.25, 1.5, -0.5, 0.75, 1.0, 1.0, 1.0, 0.0)
RECORDED_JSON = Path(__file__).with_name("trl_grpo.json")
RECORDED_GRADIENTS = Path(__file__).with_name("trl_grpo.safetensors")
RECORDED_LORA = Path(__file__).with_name("trl_lora.json")
RECORDED_LORA_GRADIENTS = Path(__file__).with_name("trl_lora.safetensors")


@dataclass(frozen=True)
class Sample:
    """One completion. Token ids are plain lists: `prompt_ids` [P], `completion_ids` [T], never padded."""

    prompt_ids: list[int]
    completion_ids: list[int]
    group: int
    reward: float
    truncated: bool  # True: no EOS at the end; finish reason "length" instead of "stop"


def _token(seed: int) -> int:
    """A token id that is neither padding nor EOS."""
    return 2 + (7 * seed + seed * seed // 3) % (VOCAB_SIZE - 2)


def build_samples() -> list[Sample]:
    """The N = 16 samples in order, the members of a group next to each other."""
    samples = []
    for index, length in enumerate(COMPLETION_LENGTHS):
        group = index // NUM_GENERATIONS
        truncated = index in TRUNCATED
        body = [_token(13 * index + 5 * position + 1) for position in range(length)]
        samples.append(
            Sample(
                prompt_ids=[_token(31 * group + 3 * position) for position in range(PROMPT_LENGTHS[group])],
                completion_ids=body if truncated else [*body[:-1], EOS_ID],
                group=group,
                reward=REWARDS[index],
                truncated=truncated,
            )
        )
    return samples


def model_config() -> Qwen2Config:
    """Qwen2 with 2 layers, 2 heads over 1 key-value head and a tied head: 3,600 parameters."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )


def _weights(name: str, shape: Sequence[int], offset: float) -> torch.Tensor:
    """float64 values of one parameter. The quadratic phase keeps matrices at full rank (a linear one has rank 2)."""
    numel = math.prod(shape)
    wave = torch.tensor([math.sin(1.7 * i + 0.37 * i * i + offset) for i in range(numel)], dtype=torch.float64)
    if "norm" in name:
        wave = 1.0 + 0.1 * wave
    elif name.endswith("bias"):
        wave = 0.1 * wave
    elif "embed" in name:
        wave = 0.3 * wave
    else:
        wave = wave / math.sqrt(shape[-1])
    return wave.reshape(tuple(shape))


def build_model(dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    """The model in `dtype`, in training mode, eager attention. In float64 the weights are the rounded float32 ones."""
    model = Qwen2ForCausalLM(model_config())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.copy_(_weights(name, parameter.shape, 0.61 * index))
    module: torch.nn.Module = model  # transformers' own `to` is not typed
    module.to(dtype).train()
    return model


def fill_adapters(model: torch.nn.Module) -> None:
    """Give what is trained of a model with adapters values by formula, in the order of their names, whatever library
    put them there: a product of low rank is about as large as the weight that it is added to."""
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(trained.items())):
            if "lora_magnitude" in name:  # where DoRA starts, and a little more or less
                parameter.mul_(1 + 0.1 * _weights("bias", parameter.shape, 0.43 * index).to(parameter.dtype))
            else:
                parameter.copy_(_weights(name, parameter.shape, 0.43 * index))


def sample_logprobs(model: torch.nn.Module, samples: Sequence[Sample], temperature: float = 1.0) -> list[torch.Tensor]:
    """Logprobs of the completion tokens, N tensors [T_n] in the model's dtype, one unpadded forward per sample."""
    result = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        chosen = torch.tensor(sample.completion_ids)
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        result.append(logprobs.gather(-1, chosen[:, None])[:, 0])
    return result


def perturbed_logprobs(current: Sequence[torch.Tensor], kind: str) -> list[list[float]]:
    """Logprobs of an older policy (`kind="old"`) or of the reference (`kind="ref"`), rounded to six decimals.

    For "old", exp(current - old) lies between 0.62 and 1.6: one wave over the samples moves whole sequences, so that
    sequence ratios are clipped too, and one over the tokens moves single tokens.
    """
    rows: list[list[float]] = []
    count = 0
    for index, row in enumerate(current):
        values = []
        for value in row.tolist():
            if kind == "old":
                shift = -(0.30 * math.sin(1.9 * index + 0.4) + 0.17 * math.sin(2.3 * count))
            elif kind == "ref":
                shift = 0.3 * math.sin(0.9 * count + 1.0)
            else:
                raise ValueError(f"kind={kind!r} is unknown; use 'old' or 'ref'")
            values.append(round(value + shift, 6))
            count += 1
        rows.append(values)
    return rows


def flatten_gradient(model: torch.nn.Module) -> torch.Tensor:
    """All gradients as one vector [num_parameters], parameters in sorted order of their names."""
    parts = []
    for name, parameter in sorted(model.named_parameters()):
        if parameter.grad is None:
            raise ValueError(f"parameter {name} has no gradient; call backward() on the loss first")
        parts.append(parameter.grad.detach().reshape(-1))
    return torch.cat(parts)


def as_json(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of a recorded file: each entry of a table is a line, however many numbers it has."""
    texts = []
    for name, table in tables.items():
        rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
        texts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


@dataclass(frozen=True)
class RecordedCase:
    """What TRL did with the batch under one configuration."""

    name: str
    options: Mapping[str, Any]  # GRPOConfig options, the common ones included
    old_logprobs: list[list[float]] | None  # N rows [T_n]; None: the current logprobs, detached
    ref_logprobs: list[list[float]] | None  # N rows [T_n]; None: beta is 0
    advantages: list[float]  # [N]
    loss: float
    metrics: Mapping[str, float]  # under TRL's names
    gradient: torch.Tensor  # float32 [num_parameters], as of `flatten_gradient`


def load_recorded() -> dict[str, RecordedCase]:
    """Every recorded case by its name."""
    recorded = json.loads(RECORDED_JSON.read_text())
    gradients = load_file(RECORDED_GRADIENTS)
    logprobs = recorded["logprobs"]
    return {
        name: RecordedCase(
            name=name,
            options={**recorded["common_options"], **case["options"]},
            old_logprobs=logprobs[case["old_logprobs"]] if case["old_logprobs"] else None,
            ref_logprobs=logprobs[case["ref_logprobs"]] if case["ref_logprobs"] else None,
            advantages=case["advantages"],
            loss=case["loss"],
            metrics=case["metrics"],
            gradient=gradients[name],
        )
        for name, case in recorded["cases"].items()
    }
