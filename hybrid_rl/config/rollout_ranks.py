"""Checks of ranks that only generate, beside those that train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybrid_rl.algos import GRPO, Clip, Needs
from hybrid_rl.algos.kl import NoKL
from hybrid_rl.config.algorithm import rollout_ranks
from hybrid_rl.config.rank_keys import FSDPConfig
from hybrid_rl.config.schema import CriticConfig, MemoryConfig, TrainerConfig
from hybrid_rl.errors import ConfigError


def with_rollout_ranks(config: TrainerConfig) -> TrainerConfig:
    """Return the config with its async_level, which is 1 with ranks that only generate if it's left to us, else 0; and
    without these ranks if it replays what they have generated.

    Raises ConfigError for what does not go with such ranks.
    """
    number, level = rollout_ranks(config), config.rollout.async_level
    if level == "auto":
        level = 1 if number else 0
    apart = replace(config, rollout=replace(config.rollout, async_level=level))
    if not number:
        return apart
    if config.mode == "train":
        controller: Any = config.controller
        return replace(apart, controller=replace(controller, rollout_ranks=0))
    handoff = config.rollout.handoff
    others = {
        f"mode={config.mode}: ranks that only generate are for runs that generate and train": config.mode != "full",
        f"rollout.engine={config.rollout.engine}: it decodes through the model's own forward, which those ranks would "
        "need beside it; use inplace or vllm": config.rollout.engine == "hf",
        f"handoff.transport={handoff.transport}: weights travel to those ranks through shared memory": (
            handoff.transport != "auto"
        ),
        "handoff.adopt_weights=true: trainer and engine are in different processes": handoff.adopt_weights,
        f"advantage={config.advantage.estimator}: its greedy samples would have to wait for the next step's": (
            Needs.BASELINE_REWARDS in config.advantage.needs
        ),
    }
    for conflict, is_so in others.items():
        if is_so:
            raise ConfigError(f"rollout_ranks={number} cannot be combined with {conflict}; leave one of them out")
    return apart


def rollout_config(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration of the ranks that only generate: the policy without what only training needs."""
    return replace(
        config,
        num_ranks=rollout_ranks(config),
        advantage=GRPO(),
        policy_loss=Clip(),
        kl=NoKL(),
        critic=CriticConfig(),
        fsdp=FSDPConfig(),
        memory=MemoryConfig(offload=[], on_host=[]),
    )


def check_rollout_rewards(config: TrainerConfig, *, has_models: bool, has_judges: bool) -> None:
    """Raise ConfigError for rewards that need a model on ranks that only generate. has_models: reward models are among
    the reward functions; has_judges: judges that the policy's engine runs."""
    number = rollout_ranks(config)
    if number and (has_models or has_judges):
        conflict = "reward models" if has_models else "judges on the policy's engine"
        raise ConfigError(
            f"rollout_ranks={number} cannot be combined with {conflict}, which would keep those ranks from generating; "
            "serve the model elsewhere and call it from a reward function, or leave rollout_ranks out"
        )
