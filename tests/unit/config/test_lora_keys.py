"""The keys of adapters: texts and lists, what they need, and what they exclude."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.lora_keys import FullTrainingConfig, LoraKeys
from hybrid_rl.errors import ConfigError


def lora(*arguments: str) -> LoraKeys:
    found = load_config(None, arguments=("lora.r=8", *arguments))[0].lora
    assert isinstance(found, LoraKeys) and found.is_on
    return found


def test_without_a_rank_there_are_no_adapters() -> None:
    assert load_config()[0].lora == FullTrainingConfig() and not FullTrainingConfig().is_on
    with pytest.raises(ConfigError, match="lora_alpha.* would do nothing: all weights are trained; set lora.r"):
        load_config({"lora_alpha": 16})
    with pytest.raises(ConfigError, match="r=0 must be at least 1, or None .no adapters."):
        load_config({"lora": {"r": 0}})


def test_a_text_is_a_regular_expression_and_a_list_has_ends_of_names() -> None:
    assert lora().target_modules == "all-linear"
    assert lora("target_modules=.*q_proj").target_modules == ".*q_proj"
    assert lora("target_modules=[q_proj, v_proj]").target_modules == ["q_proj", "v_proj"]
    assert lora("target_modules=null").target_modules is None
    assert load_config({"lora": {"r": 2, "peft": {"exclude_modules": "a|b"}}})[0].lora.peft.exclude_modules == "a|b"
    with pytest.raises(ConfigError, match=r"write a list as lora.target_modules=\[q_proj,v_proj\]"):
        lora("target_modules=q_proj,v_proj")


def test_a_config_is_read_back_from_its_run_folder() -> None:
    config, _ = load_config({"lora.r": 8, "target_modules": ".*q_proj", "peft.rank_pattern": {"q_proj": 2}})
    assert load_config(config)[0] == config


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"kl": "loss", "ref_model_sync_steps": 4}, "moves the reference, but with lora.r the reference is the policy"),
        ({"algorithm": "prorl"}, "reference_reset_steps=.* moves the reference"),
        ({"kl": "loss", "controller": "ray", "num_ranks": 2, "reference_ranks": 1}, "reference_ranks=1: with lora.r"),
        (
            {"peft.use_dora": True, "torch_compile": True, "gradient_checkpointing": True},
            "compiled blocks of DoRA cannot be computed again",
        ),
        ({"lora_critic": True}, "lora_critic=True would do nothing: there is no critic"),
    ],
)
def test_what_adapters_exclude(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(*load_config({"lora.r": 8, **keys}))
