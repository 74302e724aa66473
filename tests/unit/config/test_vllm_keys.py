"""The keys of rollout.engine=vllm, and those that pass through to vLLM itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import TrainerConfig, load_config, resolve, to_yaml, visible_leaves
from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.errors import ConfigError


def vllm(config: TrainerConfig) -> VLLMRolloutConfig:
    assert isinstance(config.rollout, VLLMRolloutConfig)
    return config.rollout


def test_one_key_chooses_the_engine() -> None:
    assert vllm(load_config({"engine": "vllm"})[0]) == VLLMRolloutConfig()
    assert vllm(load_config(None, {"rollout.engine": "vllm"})[0]) == VLLMRolloutConfig()


@pytest.mark.parametrize(
    "keys",
    [
        {"rollout.engine_args.block_size": 32, "rollout.max_num_seqs": 8},
        {"rollout": {"engine_args": {"block_size": 32}, "max_num_seqs": 8}},
        {"engine_args": {"block_size": 32}, "max_num_seqs": 8},
        {"engine_args.block_size": 32, "max_num_seqs": 8},
        {"rollout.engine_args.others": {"block_size": 32}, "rollout.max_num_seqs": 8},
    ],
    ids=str,
)
def test_keys_of_ours_are_typed_and_all_others_pass_through(keys: dict[str, Any]) -> None:
    config = vllm(load_config({"engine": "vllm"}, keys)[0])
    assert (config.max_num_seqs, config.engine_args.others) == (8, {"block_size": 32})


def test_keys_that_pass_through_are_overridden_one_by_one() -> None:
    base = {"engine": "vllm", "engine_args.block_size": 32, "engine_args.compilation_config": {"mode": 3}}
    arguments = ["rollout.engine_args.block_size=64", "rollout.engine_args.seed_offset=2"]
    config, given = load_config(base, {}, arguments)
    assert vllm(config).engine_args.others == {"block_size": 64, "compilation_config": {"mode": 3}, "seed_offset": 2}
    assert "rollout.engine_args.others" in given


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout.engine_args.no_such": 32}, "belongs to rollout.engine=vllm, not inplace"),
        ({"tensor_parallel_size": 2}, "set rollout.engine=vllm"),
        ({"engine": "vllm", "rollout.engine_args.block.size": 1}, "unknown key 'rollout.engine_args.block.size'"),
        ({"engine": "vllm", "rollout.tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        ({"engine": "vllm", "cuda_graphs": False}, "belongs to rollout.engine=inplace, not vllm"),
        ({"engine": "vllm", "rollout.vllm.max_num_seqs": 8}, "did you mean 'rollout.max_num_seqs'"),
        ({"rollout.inplace.block_size": 8}, "did you mean 'rollout.engine_args.block_size'"),
        ({"max_num_batched_tokens": 64}, "set engine_args.max_num_batched_tokens"),
        ({"engine": "vllm", "blok_size": 1}, "unknown key 'blok_size'"),
    ],
    ids=str,
)
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, keys)


def test_ranks_that_share_an_engine_divide_all_ranks() -> None:
    keys = {"engine": "vllm", "num_ranks": 8}
    assert vllm(resolve(*load_config(None, {**keys, "tensor_parallel_size": 4}))).tensor_parallel_size == 4
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide num_ranks=8; use 1, 2, 4, 8"):
        resolve(*load_config(None, {**keys, "tensor_parallel_size": 3}))


def test_the_resolved_config_comes_back_from_its_file(tmp_path: Path) -> None:
    config = resolve(*load_config({"engine": "vllm", "num_ranks": 2, "rollout.engine_args.block_size": 32}))
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    again, given = load_config(file)
    assert again == config == resolve(again, given)
    assert given == set(visible_leaves({"rollout": "vllm", "controller": "ray"}))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({}, "handoff.lora=adapter, but no adapters are trained; set lora.r, or leave it out"),
        (
            {"lora.r": 4, "peft.use_dora": True},
            "use_dora=True: .* DoRA changes the length .*handoff.lora=merged",
        ),
        ({"lora.r": 4, "peft.modules_to_save": ["lm_head"]}, "modules that are trained whole are no adapters"),
        ({"lora.r": 4, "peft.target_parameters": ["mlp.experts.down_proj"]}, "fused into one parameter have no slot"),
        (
            {"lora.r": 4, "handoff.transport": "disk", "handoff.weights_path": "x"},
            "transport=disk writes all weights at every handoff",
        ),
    ],
    ids=["no adapters", "DoRA", "modules trained whole", "experts", "files"],
)
def test_what_vllms_own_slot_does_not_hold_is_refused(keys: dict[str, Any], match: str) -> None:
    keys = {"engine": "vllm", "rollout.handoff.lora": "adapter", **keys}
    with pytest.raises(ConfigError, match=match):
        resolve(*load_config(keys))


def test_memory_is_shared_with_an_engine_that_adds_the_adapter_by_itself() -> None:
    """Merged, base and adapter are one tensor: the base would be lost."""
    keys = {"engine": "vllm", "handoff.adopt_weights": True, "lora.r": 4}
    with pytest.raises(ConfigError, match="the base would be lost; .*handoff.lora=adapter"):
        resolve(*load_config(keys))
    resolve(*load_config(keys | {"rollout.handoff.lora": "adapter"}))
