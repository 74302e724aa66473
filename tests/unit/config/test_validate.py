"""Checkpoints to resume from, derived values, what counts as given, and how long a run is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import (
    OptimizerConfig,
    TrainerConfig,
    load_config,
    num_training_steps,
    optimizer_steps_per_training_step,
    resolve,
    to_dict,
    to_yaml,
)
from hybrid_rl.config.hardware import NO_GPU, Hardware
from hybrid_rl.errors import CheckpointError, ConfigError
from hybrid_rl.training.batch_plan import PlanSpec


def resolved(hardware: Hardware = NO_GPU, **keys: Any) -> TrainerConfig:
    return resolve(*load_config(None, keys), hardware=hardware)


def test_a_run_folder_in_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    """The checkpoints are counted, not spelled: 9 comes before 10. What only looks like one is none."""
    run = tmp_path / "sr"
    with pytest.raises(CheckpointError, match="/sr' is not a checkpoint: there is no such folder; .* resume=auto"):
        resolved(resume=str(run))
    run.mkdir()
    resolved(resume=str(run))  # neither: whoever reads it says what it lacks
    (run / "config.yaml").touch()
    (run / "checkpoint-7").touch()
    (run / "checkpoint-old").mkdir()
    with pytest.raises(CheckpointError, match="/sr' is the folder of a run, not a checkpoint, and has none yet"):
        resolved(resume=str(run))
    for step in (8, 10, 9):
        (run / f"checkpoint-{step}").mkdir()
    with pytest.raises(CheckpointError, match="it has checkpoint-8, checkpoint-9, checkpoint-10: .* run_name=sr for"):
        resolved(resume=str(run))
    for step in range(100, 400, 100):
        (run / f"checkpoint-{step}").mkdir()
    with pytest.raises(CheckpointError, match=r"it has \.\.\., checkpoint-9, checkpoint-10, .*, checkpoint-300: give"):
        resolved(resume=f"{run}/")
    resolved(resume=str(run / "checkpoint-10"))


# ----------------------------------------------------------------------------------------------------- derived values


@pytest.mark.parametrize(
    ("keys", "mini_batch", "old_logprobs", "updates"),
    [
        ({}, 16, "detach", 1),
        ({"num_iterations": 2}, 16, "recompute", 2),
        ({"prompts_per_mini_batch": 4}, 4, "recompute", 4),
        ({"prompts_per_step": 6, "prompts_per_mini_batch": 2, "num_iterations": 3}, 2, "recompute", 9),
        ({"old_logprobs": "recompute"}, 16, "recompute", 1),
        ({"old_logprobs": "rollout", "prompts_per_mini_batch": 8}, 8, "rollout", 2),
    ],
)
def test_mini_batch_and_old_logprobs(keys: dict[str, Any], mini_batch: int, old_logprobs: str, updates: int) -> None:
    config = resolved(**keys)
    assert config.optimizer.prompts_per_mini_batch == mini_batch
    assert config.algorithm.old_logprobs == old_logprobs
    assert optimizer_steps_per_training_step(config) == updates


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, True),
        ({"engine": "vllm"}, True),
        ({"engine": "vllm", "attention": "sdpa"}, True),
        ({"engine": "vllm", "attention": "unpacked"}, False),
        ({"engine": "hf"}, False),
    ],
    ids=str,
)
def test_vllm_generates_for_a_trainer_that_packs_and_for_one_that_does_not(
    keys: dict[str, Any], expected: bool
) -> None:
    config = resolved(**keys)
    assert config.is_packed is PlanSpec.of(config).is_packed is expected


def test_nothing_else_is_changed() -> None:
    """prompts_per_mini_batch and old_logprobs alone, and what `auto` stands for on this hardware."""
    before, after = to_dict(TrainerConfig()), to_dict(resolve(TrainerConfig()))
    after["optimizer"]["prompts_per_mini_batch"] = None
    after["algorithm"].update(old_logprobs="auto")
    after["model"].update(device="auto", dtype="auto")
    after["rollout"].update(async_level="auto")
    assert after == before


def test_resolving_twice_is_resolving_once() -> None:
    once = resolved(num_iterations=2)
    assert resolve(once) == once


def test_what_lives_in_host_memory() -> None:
    one = resolved(Hardware(8, "H100"), on_host=["optimizer", "activations"])
    assert one.memory.keeps_on_host("optimizer") and one.memory.keeps_on_host("activations")
    assert not one.memory.keeps_on_host("shards") and not resolved().memory.keeps_on_host("optimizer")
    assert one.memory.with_optimizer(False).on_host == ["activations"]
    assert resolved().memory.with_optimizer(True).on_host == ["optimizer"]


def test_a_default_given_by_hand_is_no_mistake() -> None:
    """A config read back from a run folder gives every key."""
    everything = frozenset({"fsdp.reduce_dtype", "eval.eval_steps", "eval.eval_on_start"})
    resolve(TrainerConfig(), everything, has_eval=False)


def test_only_what_was_given_counts() -> None:
    config = TrainerConfig(fsdp=dataclasses.replace(TrainerConfig().fsdp, reduce_dtype="bfloat16"))
    resolve(config)
    with pytest.raises(ConfigError, match="reduce_dtype"):
        resolve(config, frozenset({"fsdp.reduce_dtype"}))


# ------------------------------------------------------------------------------------------------------ length of a run


@pytest.mark.parametrize(
    ("keys", "num_prompts", "steps"),
    [
        ({"max_steps": 7}, 3, 7),
        ({"max_steps": 7}, None, 7),
        ({"num_train_epochs": 1e9}, 16, 10**9),
        ({}, 16, 1),
        ({}, 31, 1),
        ({}, 32, 2),
        ({"num_train_epochs": 3, "prompts_per_step": 4}, 10, 7),  # 30 prompts in one sequence
        ({"num_train_epochs": 0.5, "prompts_per_step": 4}, 24, 3),
        ({"num_train_epochs": 0.1, "prompts_per_step": 3}, 30, 1),
        ({"num_train_epochs": 0.7, "prompts_per_step": 7}, 10, 1),  # 0.7 * 10 is just below 7 in floating point
    ],
)
def test_training_steps(keys: dict[str, Any], num_prompts: int | None, steps: int) -> None:
    assert num_training_steps(resolved(**keys), num_prompts) == steps


@pytest.mark.parametrize(
    ("num_prompts", "message"),
    [
        (None, "a streaming train_dataset has no length: set max_steps"),
        (15, "15 prompts times num_train_epochs=1.0 do not fill one step of prompts_per_step=16"),
    ],
)
def test_no_step_at_all(num_prompts: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        num_training_steps(resolved(), num_prompts)


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    config = resolve(TrainerConfig(optimizer=OptimizerConfig(lr_scheduler_type="linear", warmup_steps=4)))
    assert num_training_steps(config, 80) == 5
    with pytest.raises(ConfigError, match="warmup_steps=4 is not below the 4 optimizer steps"):
        num_training_steps(config, 64)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("1e3", 1000.0), ("13800.5", 13800.5), ("900", 900.0), ("'1e3'", 1000.0), ("03:50:00", "03:50:00")],
)
def test_save_before_takes_what_is_a_number_or_a_duration(given: str, kept: Any, tmp_path: Path) -> None:
    """From YAML, which has numbers of its own; the file that the run writes is read back as the same."""
    (tmp_path / "run.yaml").write_text(f"save_before: {given}\n")
    config = load_config(tmp_path / "run.yaml")[0]
    assert config.save_before == kept
    assert load_config(None, arguments=[f"save_before={given}"])[0].save_before == kept
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml")[0].save_before == kept
