"""Ranks that only generate: what the key sets besides itself, and rewards that it does not go with."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.algorithm import steps_ahead
from hybrid_rl.config.rollout_ranks import check_rollout_rewards
from hybrid_rl.errors import ConfigError


def resolved(**keys: Any) -> Any:
    return resolve(*load_config({"max_steps": 4, "rollout_ranks": 2, **keys}))


def test_it_is_one_step_off_on_ray() -> None:
    config = resolved()
    assert (config.controller.backend, config.num_ranks, config.rollout.async_level) == ("ray", 1, 1)
    assert (config.buffer.oversample, config.buffer.max_staleness) == (None, 1)
    partial = resolved(partial=True).buffer
    assert (partial.oversample, partial.max_staleness) == (16, 4)


def test_it_may_be_several_steps_off() -> None:
    """As many batches may be ahead as async_level says, with these ranks and without; tokens may be as old."""
    for config in (resolved(async_level=3), resolve(*load_config({"max_steps": 4, "async_level": 3}))):
        assert (steps_ahead(config), config.buffer.max_staleness) == (3, 3)
    assert resolved(async_level=3, partial=True).buffer.max_staleness == 6
    with pytest.raises(ConfigError, match="max_staleness=2 is too small for async_level=3 .* at least 3"):
        resolved(async_level=3, max_staleness=2)
    with pytest.raises(ConfigError, match="freshest would never train on what async_level=3 generates ahead"):
        resolved(async_level=3, partial=True, buffer_order="freshest")


@pytest.mark.parametrize("level", [-1, True, "two", 1.5])
def test_batches_ahead_are_counted_in_whole_numbers(level: object) -> None:
    with pytest.raises(ConfigError, match="rollout.async_level=.* must be (at least 0|of type int or auto)"):
        load_config({"rollout.async_level": level})


def test_they_are_divided_into_replicas_of_vllm() -> None:
    config = resolved(**{"rollout.engine": "vllm", "tensor_parallel_size": 2, "num_ranks": 1, "lora.r": 8})
    assert (config.rollout.ranks_per_engine, config.num_ranks, config.lora.r) == (2, 1, 8)


def test_a_config_that_was_loaded_is_what_it_was_made_of() -> None:
    """The command line loads a config and passes it on: keys that nobody gave are not given then either."""
    config, _ = load_config({"rollout_ranks": 2})
    again, given = load_config(config)
    assert "rollout.async_level" not in given and "controller.rollout_ranks" in given
    assert resolve(again, given).rollout.async_level == 1


def test_a_replay_needs_no_ranks_that_generate() -> None:
    config = resolved(mode="train", rollouts_path="there")
    assert (config.controller.rollout_ranks, config.rollout.async_level) == (0, 1)
    assert config.correction.correction_mode == "tis"


def test_models_that_score_on_these_ranks_are_refused() -> None:
    config = resolved()
    check_rollout_rewards(config, has_models=False, has_judges=False)
    with pytest.raises(ConfigError, match="rollout_ranks=2 cannot be combined with reward models"):
        check_rollout_rewards(config, has_models=True, has_judges=False)
    with pytest.raises(ConfigError, match="rollout_ranks=2 cannot be combined with judges on the policy's engine"):
        check_rollout_rewards(config, has_models=False, has_judges=True)


@pytest.mark.parametrize(
    ("keys", "correction"),
    [
        ({"rollout.partial": True}, "tis"),
        ({"rollout.partial": True, "oversample": None}, "tis"),
        ({"rollout.partial": True, "oversample": 0}, "none"),
        ({"rollout.partial": True, "oversample": 0, "rollout.async_level": 1}, "tis"),
        ({"rollout.async_level": 0}, "none"),
        ({"rollout.async_level": 2}, "tis"),
        ({"rollout_ranks": 2}, "tis"),
        ({"rollout_ranks": 2, "rollout.async_level": "auto"}, "tis"),
        ({"rollout_ranks": 2, "rollout.async_level": 0}, "none"),
    ],
)
def test_tokens_of_older_weights_are_corrected_for(keys: dict[str, Any], correction: str) -> None:
    """A correction is the default of runs that have such tokens, and of no others."""
    for given in (keys, {name.rpartition(".")[2]: value for name, value in keys.items()}):
        config, _ = load_config(None, given)
        assert config.correction.correction_mode == correction
