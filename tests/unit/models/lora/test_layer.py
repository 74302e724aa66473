"""The linear layer of adapters against peft's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear

from hybrid_rl.models.lora.inject import init_adapters, inject
from hybrid_rl.models.lora.layer import AdaptedLinear
from hybrid_rl.weights.plain import wrappers
from tests.support.tiny import build_model


def adapted(dtype: torch.dtype = torch.float64, **options):
    model = build_model(dtype=dtype)
    inject(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | options))
    init_adapters(model, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    return model


def layers(model) -> tuple[AdaptedLinear, Linear]:
    """A layer, and the same as peft made it."""
    ours = next(wrapper for _, _, wrapper in wrappers(model) if wrapper.lora_A["default"].in_features > 4)
    theirs = copy.deepcopy(ours)
    theirs.__class__ = Linear
    return ours, theirs


def outputs(layer, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("options", [{}, {"lora_alpha": 8}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_have_the_bits_of_pefts(options, dtype) -> None:
    """Also without gradients, where the change is added in place: scores of a batch are those of its update."""
    model = adapted(dtype, **options)
    assert all(type(wrapper) is AdaptedLinear for _, _, wrapper in wrappers(model))
    ours, theirs = layers(model)
    for num_rows in (1, 5, 64):
        x = torch.randn(2, num_rows, ours.in_features, dtype=dtype)
        found, expected = outputs(ours, x), outputs(theirs, x)
        assert len(found) == len(expected) == (5 if options.get("use_dora") else 4)
        assert all(map(torch.equal, found, expected))
        before = x.clone()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(ours(x), found[0]) and torch.equal(x, before)


def test_adapters_that_are_off_or_merged_are_pefts_business() -> None:
    ours, theirs = layers(adapted())
    x = torch.randn(2, ours.in_features, dtype=torch.float64)
    with torch.no_grad():
        on = ours(x)
        ours.enable_adapters(False)
        assert torch.equal(ours(x), theirs.base_layer(x)) and not torch.allclose(ours(x), on)
        ours.enable_adapters(True)
        ours.merge()
        torch.testing.assert_close(ours(x), on)


def test_a_module_is_copied_and_pickled_with_its_layers() -> None:
    ours, _ = layers(adapted())
    x = torch.randn(2, ours.in_features, dtype=torch.float64)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with torch.no_grad():
            assert type(other) is AdaptedLinear and torch.equal(other(x), ours(x))
