"""Sizes that must work together, keys that would do nothing, derived values, and how long a run is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

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

GPUS = Hardware(8, "H100")


def resolved(has_eval: bool = True, hardware: Hardware = NO_GPU, **keys: Any) -> TrainerConfig:
    return resolve(*load_config(None, keys), has_eval=has_eval, hardware=hardware)


# ------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"prompts_per_step": 12, "prompts_per_mini_batch": 5},
            "prompts_per_mini_batch=5 does not divide prompts_per_step=12; use 1, 2, 3, 4, 6, 12$",
        ),
        ({"prompts_per_step": 4, "prompts_per_mini_batch": 8}, "prompts_per_mini_batch=8 does not divide"),
        ({"num_generations": 1}, "num_generations=1: advantage=grpo compares .* use at least 2"),
        (
            {"algorithm": "rejection_sampling", "num_generations": 4, "num_best": 4},
            "num_generations=4: advantage=rejection compares .* use at least 5",
        ),
        (
            {"tokens_per_micro_batch": 511},
            "tokens_per_micro_batch=511 cannot hold one completion of max_completion_length=512",
        ),
        (
            {"old_logprobs": "detach", "num_iterations": 2},
            "prompts_per_mini_batch=16 and num_iterations=2 make 2; use recompute or rollout",
        ),
        ({"old_logprobs": "detach", "prompts_per_mini_batch": 4}, "num_iterations=1 make 4"),
        ({"beta": 0.1, "kl_estimator": "k2"}, "set use_bias_correction_kl=false or kl_estimator=k3"),
        ({"resume": "auto"}, "set run_name"),
        ({"run_name": "a/b"}, "run_name='a/b' names a folder"),
        ({"run_name": ""}, "run_name='' names a folder"),
        ({"run_name": "a\n"}, "names a folder"),
        ({"run_name": ".."}, "names a folder"),
        ({"run_name": "."}, "names a folder"),
    ],
)
def test_what_cannot_work_together(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**keys)


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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rate": 0}, r"^learning_rate=0.0 trains nothing; set it above 0, or mode=rollout"),
        ({"reward_weights": [0]}, r"^reward_weights=\[0.0\] makes every reward 0.*; give one function another weight"),
        ({"reward_weights": [0, -0.0]}, r"^reward_weights=\[0.0, -0.0\] makes every reward 0"),
        ({"algorithm": "ppo", "learning_rate": 0, "critic_learning_rate": 0}, "^learning_rate=0.0 trains nothing"),
    ],
)
def test_settings_from_which_nothing_can_be_learned(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"learning_rate": 0, "mode": "rollout"},
        {"algorithm": "ppo", "learning_rate": 0},  # the critic learns
        {"reward_weights": [0, 0.1]},
        {"reward_weights": [0], "overlong_buffer": 64},  # which has a weight of its own
        {"reward_weights": [0], "beta": 0.1, "kl": "reward", "advantage": "rloo"},  # the penalty is a reward
        {"mask_truncated_completions": True, "max_completion_length": 1},  # the EOS alone is a completion that ended
    ],
)
def test_settings_from_which_something_can(keys: dict[str, Any]) -> None:
    resolved(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"tokens_per_micro_batch": 512},
        {"old_logprobs": "detach"},
        {"old_logprobs": "rollout", "num_iterations": 3},
        {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False},
        {"resume": "auto", "run_name": "mine"},
        {"run_name": "grpo_lr=1e-6+warm.2"},
    ],
)
def test_what_can(keys: dict[str, Any]) -> None:
    resolved(**keys)


# ------------------------------------------------------------------------------------------------------ ranks and modes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_ranks": 2, "backend": "local"},
            "controller.backend=local runs one rank, but num_ranks=2; leave backend out, or set ray",
        ),
        ({"num_ranks": 6, "dp_replicate": 4}, "fsdp.dp_replicate=4 does not divide num_ranks=6; use 1, 2, 3, 6$"),
        ({"num_ranks": 2, "dp_replicate": 4}, "fsdp.dp_replicate=4 does not divide num_ranks=2; use 1, 2$"),
        ({"dp_replicate": 2}, "fsdp.dp_replicate=2 does not divide num_ranks=1; use 1$"),
        ({"mode": "train"}, "mode=train trains on saved rollouts: set rollouts_path to their folder"),
        ({"mode": "rollout", "save_steps": 2}, "save_steps=2 would save a model that mode=rollout does not train"),
    ],
)
def test_ranks_and_modes_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"num_ranks": 6, "dp_replicate": 3},
        {"num_ranks": 2, "dp_replicate": 2},
        {"backend": "ray"},
        {"mode": "rollout"},
        {"mode": "rollout", "save_rollouts": True},
        {"mode": "train", "rollouts_path": "rollouts", "save_steps": 2},
    ],
)
def test_ranks_and_modes_that_can(keys: dict[str, Any]) -> None:
    config = resolved(**keys)
    assert config.controller.backend == ("ray" if {"num_ranks", "backend"} & set(keys) else "local")


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


# --------------------------------------------------------------------------------------------------------- inert keys

INERT = [
    ({"kl_estimator": "k2"}, {"beta": 0.1, "use_bias_correction_kl": False}),
    ({"use_bias_correction_kl": False}, {"beta": 0.1}),
    ({"num_train_epochs": 2.0, "max_steps": 5}, None),
    ({"warmup_steps": 5}, {"lr_scheduler_type": "constant_with_warmup"}),
    ({"handoff.probe_tolerance": 0.1, "handoff.probe_steps": 0}, {"handoff.probe_steps": 2}),
    ({"eval_top_p": 0.9}, {"eval_temperature": 0.7}),
    ({"eval_top_k": 5}, {"eval_temperature": 0.7}),
    ({"eval_min_p": 0.1}, {"eval_temperature": 0.7}),
    ({"num_generations_eval": 4}, {"eval_temperature": 0.7}),
    ({"cast_lm_head_to_fp32": True}, {"dtype": "bfloat16"}),
    ({"cast_lm_head_to_fp32": True, "dtype": "float32"}, {"dtype": torch.bfloat16}),
    ({"reduce_dtype": "bfloat16"}, {"num_ranks": 2}),
    ({"reshard_after_forward": False}, {"num_ranks": 2}),
    ({"sync_every_micro_batch": True}, {"num_ranks": 2}),
    ({"rollouts_path": "there"}, {"mode": "train"}),
    ({"rollouts_path": "there", "mode": "rollout"}, {"mode": "train"}),
    ({"save_rollouts": True, "mode": "train", "rollouts_path": "there"}, {"mode": "rollout", "rollouts_path": None}),
    ({"reference_ranks": 1, "num_ranks": 2}, {"beta": 0.1}),
]


@pytest.mark.parametrize(("keys", "remedy"), INERT)
def test_keys_that_would_do_nothing(keys: dict[str, Any], remedy: dict[str, Any] | None) -> None:
    name = next(iter(keys))
    with pytest.raises(ConfigError, match=rf"\b{name}(={re.escape(repr(keys[name]))}|') would do nothing: "):
        resolved(**keys)
    if remedy is not None:
        resolved(**{**keys, **remedy})


@pytest.mark.parametrize(
    ("on_host", "keys", "message"),
    [
        (
            ["shards"],
            {"hardware": GPUS},
            "cannot name shards with num_ranks=1; one rank shards nothing: take optimizer",
        ),
        (["optimizer"], {"hardware": GPUS, "num_ranks": 2}, "cannot name optimizer with num_ranks=2; take shards"),
        (["shards"], {"num_ranks": 2}, "shards does nothing on a CPU"),
        (["optimizer"], {}, "optimizer does nothing on a CPU"),
        (["activations", "activations"], {}, "names something twice"),
        (["optimizer"], {"hardware": GPUS, "offload": ["optimizer"]}, "it never leaves host memory"),
        (["shards"], {"hardware": GPUS, "num_ranks": 2, "offload": ["optimizer"]}, "would move nothing"),
        (["weights"], {}, "one of optimizer, shards, activations"),
    ],
)
def test_what_cannot_live_in_host_memory_is_refused(on_host: list[str], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(on_host=on_host, **keys)


def test_what_lives_in_host_memory() -> None:
    one, several = resolved(on_host=["optimizer", "activations"], hardware=GPUS), {"hardware": GPUS, "num_ranks": 2}
    assert one.memory.keeps_on_host("optimizer") and one.memory.keeps_on_host("activations")
    assert not one.memory.keeps_on_host("shards") and not resolved().memory.keeps_on_host("optimizer")
    assert resolved(on_host=["shards", "activations"], **several).memory.keeps_on_host("shards")
    assert one.memory.with_optimizer(False).on_host == ["activations"]
    assert resolved().memory.with_optimizer(True).on_host == ["optimizer"]


@pytest.mark.parametrize("keys", [{}, {"dtype": "float32"}, {"dtype": "auto"}], ids=str)
def test_a_float32_head_is_a_matter_of_bfloat16(keys: dict[str, Any]) -> None:
    """On a GPU dtype=auto becomes bfloat16, but only when the machine is looked at: the key wants it said."""
    with pytest.raises(ConfigError, match=r"'cast_lm_head_to_fp32' would do nothing: it exists with dtype=bfloat16"):
        resolved(cast_lm_head_to_fp32=True, hardware=GPUS, **keys)
    config = resolved(cast_lm_head_to_fp32=True, dtype="bfloat16")
    assert config.model.cast_lm_head_to_fp32 and load_config(to_dict(config))[0] == config
    assert not resolved(dtype="bfloat16").model.cast_lm_head_to_fp32
    assert not resolved(hardware=GPUS).model.cast_lm_head_to_fp32


@pytest.mark.parametrize(
    "keys", [{"eval_steps": 3}, {"eval_on_start": False}, {"eval_temperature": 0.5}, {"success_reward": 0.5}]
)
def test_evaluation_keys_need_evaluation_data(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"eval.{next(iter(keys))}=.* there is no eval_dataset"):
        resolved(has_eval=False, **keys)
    resolved(has_eval=True, **keys)


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


@pytest.mark.parametrize("epochs", [1e10, 1e300, 1.7e308])
def test_more_epochs_than_anybody_means_are_refused(epochs: float) -> None:
    with pytest.raises(ConfigError, match="num_train_epochs=.* must be at most 1000000000"):
        resolved(num_train_epochs=epochs)
    assert num_training_steps(resolved(num_train_epochs=1e9), 16) == 10**9


@pytest.mark.parametrize(("temperature", "bound"), [(1e-300, "least 0.01"), (0.001, "least 0.01"), (1e300, "most 100")])
def test_temperatures_at_which_nothing_can_be_learned_are_refused(temperature: float, bound: str) -> None:
    """Colder, one token has all the probability and gradients are 0; hotter, all have the same."""
    with pytest.raises(ConfigError, match=f"rollout.temperature=.* must be at {bound}"):
        resolved(temperature=temperature)


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


@pytest.mark.parametrize("given", ["soon", "3h", -5, 0, "nan", "inf", "03:50"])
def test_save_before_says_what_is_no_time(given: Any) -> None:
    with pytest.raises(ConfigError, match=f"save_before={re.escape(repr(given))} must be (above 0|the age of the)"):
        resolved(save_before=given)
