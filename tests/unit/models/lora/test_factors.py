"""What adapters add to each weight, against peft's own merging."""

import copy
from dataclasses import replace

import pytest
import torch

from hybrid_rl.models.lora.factors import low_rank_changes
from hybrid_rl.models.lora.inject import inject, is_adapter_name
from hybrid_rl.models.lora.peft_config import peft_config_of
from hybrid_rl.weights.plain import plain, wrappers
from hybrid_rl.weights.sources import named_weights
from tests.unit.models.families import build

ATTENTION = ["q_proj", "v_proj"]
CASES = {
    "all linear": ("qwen2", {}),
    "rsLoRA, ranks and scales of layers": (
        "llama",
        {"use_rslora": True, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"up_proj": 2}},
    ),
    "DoRA": ("qwen2", {"use_dora": True, "target_modules": ATTENTION}),
    "weights that are stored as [in, out]": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "DoRA of those": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "experts as [experts, out, in]": (
        "qwen3-moe",
        {
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        },
    ),
    "experts as [experts, in, out]": (
        "attention sinks",  # gpt-oss, which cannot be trained here yet; what peft does with such experts is the same
        {"target_modules": ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "modules trained whole": ("qwen2", {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
}


def adapted(family, keys):
    """A module with adapters that change something."""
    torch.manual_seed(0)
    module = build(family)
    inject(module, peft_config_of({"r": 3, "lora_alpha": 6, "target_modules": "all-linear", **keys}))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_adapter_name(name):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def whole(change):
    return tuple(slice(0, extent) for extent in change.shape)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("case", CASES)
def test_a_weight_with_its_change_is_what_peft_merges(case):
    module = adapted(*CASES[case])
    peers = copy.deepcopy(module)
    for _, _, wrapper in wrappers(peers):
        while hasattr(wrapper, "merge"):
            wrapper.merge()
            wrapper = wrapper.base_layer
    changes = low_rank_changes(module, torch.float32)
    with plain(module), plain(peers):
        weights, wanted = named_weights(module), named_weights(peers)
        assert weights.keys() == wanted.keys() and changes.keys() <= weights.keys()
        for name, weight in weights.items():
            merged = changes[name].merged(weight, whole(changes[name])) if name in changes else weight
            assert merged.shape == weight.shape
            torch.testing.assert_close(merged, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
            assert (name in changes) == (not torch.equal(weight, wanted[name])), name


def test_in_bfloat16_factors_and_base_are_rounded_as_the_trainer_rounds_them():
    module = adapted("qwen2", {"use_dora": True})
    changes = low_rank_changes(module, torch.bfloat16)
    peers = copy.deepcopy(module).bfloat16()
    with plain(module), plain(peers):
        weights, rounded = named_weights(module), named_weights(peers)
        for name, change in changes.items():
            assert torch.equal(change.a, change.a.bfloat16().float())
            merged = change.merged(weights[name], whole(change))
            assert torch.equal(merged, change.merged(rounded[name], whole(change)))
            factor = change.row_factor
            assert factor is not None and torch.equal(factor, factor.bfloat16().float())
            unscaled = replace(change, row_factor=None).merged(weights[name], whole(change))
            torch.testing.assert_close(merged, unscaled * factor[:, None], rtol=0, atol=0)
