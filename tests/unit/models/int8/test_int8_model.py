"""A model over weights of 8 bits: equal to the module over the same rounded weights, for dense models and experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hybrid_rl.compat import native
from hybrid_rl.errors import ConfigError, HandoffError, ModelError
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.int8.int8_model import Int8CausalLM, rounded_layers, rounded_places
from hybrid_rl.models.int8.rounding import Int8Weight
from hybrid_rl.models.row import Layout
from hybrid_rl.weights.sources import named_weights
from tests.support.inside.models import rounded_weights
from tests.support.tiny import build_model
from tests.unit.models.families import build

pytestmark = pytest.mark.skipif(native.operator("int8_linear") is None, reason="the compiled extension is not built")

DENSE, FUSED = "qwen2", "qwen3-moe"


def row_of(length: int = 9) -> PackedRow:
    ids = torch.arange(2, 2 + length)
    return PackedRow(ids, torch.arange(length), ids[1:], torch.arange(length - 1), Layout((length,)))


def int8_of(module: Any) -> Int8CausalLM:
    model = CausalLM(module)
    rounded = Int8CausalLM(module, model.attention.name, dtype=model.dtype)
    rounded.write(named_weights(module))
    return rounded


@torch.no_grad()
def with_rounded_weights(module: Any) -> Any:
    """An independent reference: a copy whose weights are what their integers stand for."""
    other = copy.deepcopy(module)
    for place in rounded_places(other):
        weight = other.get_parameter(place.name)
        scale = weight.abs().amax(-1, keepdim=True) / 127
        weight.copy_((weight / scale).round() * scale)
    return other


@pytest.mark.parametrize("family", [DENSE, FUSED, "deepseek-v3"])
def test_it_computes_what_the_module_does_with_rounded_weights(family: str) -> None:
    module = build(family)
    before = {name: tensor.clone() for name, tensor in named_weights(module).items()}
    with torch.no_grad():
        expected = CausalLM(with_rounded_weights(module)).row_distribution(row_of(), 1.0)
        whole = CausalLM(module).row_distribution(row_of(), 1.0)
        logprobs = int8_of(module).row_distribution(row_of(), 1.0)
        with rounded_layers(module):
            hooked = CausalLM(module).row_distribution(row_of(), 1.0)
    error = (whole - expected).abs().max()
    assert (logprobs - expected).abs().max() < 0.05 * error
    assert (hooked - expected).abs().max() < 1e-5
    after = named_weights(module)
    assert all(after[name] is not None and torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_is_rounded_and_what_is_not() -> None:
    names = {place.name for place in rounded_places(build(FUSED))}
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.self_attn.q_proj.weight"} <= names
    assert not any(part in name for name in names for part in ("gate.weight", "norm", "embed", "lm_head"))


def test_bytes_are_counted() -> None:
    module = build_model()
    rounded = int8_of(module)
    linear = [child.weight for name, child in module.named_modules() if type(child) is nn.Linear and name != "lm_head"]
    assert rounded.num_bytes == sum(weight.numel() + 4 * len(weight) for weight in linear)
    assert all(tensor is named_weights(module)[name] for name, tensor in rounded.shared.items())


@pytest.mark.parametrize("kind", ["values", "scales"])
def test_a_stale_integer_or_scale_is_found(kind: str) -> None:
    module = build_model()
    rounded = int8_of(module)
    rounded.check(named_weights(module), 3)
    name = "model.layers.1.mlp.up_proj.weight"
    weight: Int8Weight = rounded_weights(rounded)[name]
    held = weight.values if kind == "values" else weight.scales
    held[..., 0] += 1
    with pytest.raises(HandoffError, match=f"policy version 3: .* {name}; the handoff has not reached it"):
        rounded.check(named_weights(module), 3)


def test_an_update_that_was_not_handed_over_is_found_even_if_only_a_scale_moves() -> None:
    module = build_model()
    rounded = int8_of(module)
    with torch.no_grad():
        module.model.layers[0].self_attn.q_proj.weight.mul_(1 + 2.0**-20)
    with pytest.raises(HandoffError, match="1 tensors .* e.g. scales of model.layers.0.self_attn.q_proj.weight"):
        rounded.check(named_weights(module), 2)


def test_what_cannot_be_rounded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="rounds models in float32 and bfloat16, not in torch.float64"):
        Int8CausalLM(build_model(), "sdpa", dtype=torch.float64)
    with pytest.raises(ModelError, match="has no linear layers or experts"):
        Int8CausalLM(build("gpt2"), "sdpa", dtype=torch.float32)
    monkeypatch.setattr(native, "operator", lambda *_: None)
    with pytest.raises(ConfigError, match="needs the compiled extension"):
        Int8CausalLM(build_model(), "sdpa", dtype=torch.float32)
