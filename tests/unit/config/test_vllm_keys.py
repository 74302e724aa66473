"""The keys of rollout.engine=vllm, and those that pass through to vLLM itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import TrainerConfig, load_config, resolve, to_yaml, visible_leaves
from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.config.vllm_arguments import reserved


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


def test_arguments_with_an_effect_pass() -> None:
    arguments = {"cudagraph_capture_sizes": [1, 2], "enforce_eager": False, "block_size": 64}
    config = resolve(*load_config({"engine": "vllm", "device": "cpu", "engine_args": arguments}))
    assert vllm(config).engine_args.others == {"cudagraph_capture_sizes": [1, 2], "block_size": 64}


def test_every_reason_is_that_of_a_name_of_its_own() -> None:
    assert all(name.isidentifier() and reason for name, reason in reserved().items())


def test_the_resolved_config_comes_back_from_its_file(tmp_path: Path) -> None:
    config = resolve(*load_config({"engine": "vllm", "num_ranks": 2, "rollout.engine_args.block_size": 32}))
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    again, given = load_config(file)
    assert again == config == resolve(again, given)
    assert given == set(visible_leaves({"rollout": "vllm", "controller": "ray"}))
