"""Checks over the sections of an algorithm, and what they say about the columns that a training step needs."""

from __future__ import annotations

import dataclasses
import math

from hybrid_rl.algos.kl_terms import KLInLoss, KLInReward
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.config.schema import AlgorithmConfig, TrainerConfig
from hybrid_rl.errors import ConfigError

# Columns that come from the learner's distribution before the update.
_LOGPROBS = frozenset({"logprobs", "sum_pi_squared", "old_logprobs", "old_top", "router_scores"})


def needs_reference(config: TrainerConfig) -> bool:
    """Whether somebody must compute the reference's logprobs."""
    return config.kl.in_loss or config.kl.in_reward or "ref_logprobs" in config.advantage.needs


def needs_logprobs(config: TrainerConfig) -> bool:
    """Whether the learner's logprobs are wanted before the update, whatever the ratio compares with."""
    needs = config.advantage.needs | config.policy_loss.needs
    sees_mini_batch = type(config.policy_loss).prepare is not PolicyObjective.prepare  # WholeMiniBatch.old_logprobs
    return bool(config.kl.in_reward or _LOGPROBS & needs or sees_mini_batch)


def resolve_algorithm(config: TrainerConfig, *, updates: int) -> AlgorithmConfig:
    """The algorithm section with what `auto` stands for. updates: optimizer steps that use one batch.

    Raises ConfigError for records that do not go together.
    """
    algorithm = config.algorithm
    _check_group(config)
    _check_kl(config)
    old = algorithm.old_logprobs
    if old == "detach" and updates > 1 and config.policy_loss.uses_old_logprobs:
        raise ConfigError(
            f"old_logprobs=detach is right only where one optimizer step uses a batch, but "
            f"prompts_per_mini_batch={config.optimizer.prompts_per_mini_batch or config.data.prompts_per_step} and "
            f"num_iterations={algorithm.num_iterations} make {updates}; use recompute or rollout"
        )
    if old == "detach" and needs_logprobs(config):
        raise ConfigError(
            f"old_logprobs=detach computes no logprobs before the update, but {_who_needs_logprobs(config)} needs "
            f"them; use recompute, or leave it out"
        )
    if old == "auto":
        wants = config.policy_loss.uses_old_logprobs and updates > 1
        old = "recompute" if wants or needs_logprobs(config) else "detach"
    if old == "rollout" and config.policy_loss.uses_proximal:
        raise ConfigError(
            f"policy_loss={config.policy_loss.objective} compares the engine's policy with that at the "  # type: ignore[attr-defined]
            f"start of the step, but old_logprobs=rollout takes both from the engine; use recompute, or another loss"
        )
    if config.model.torch_compile and "router_scores" in config.policy_loss.needs:
        raise ConfigError(
            f"policy_loss={config.policy_loss.objective} reads the routers of the model as it runs, "  # type: ignore[attr-defined]
            f"which compiled blocks hide; set torch_compile=false"
        )
    if config.correction.is_active and config.policy_loss.corrects_rollout:
        raise ConfigError(
            f"policy_loss={config.policy_loss.objective} weighs what the engine sampled itself; "  # type: ignore[attr-defined]
            f"leave correction out"
        )
    if config.correction.is_active and "rollout_logprobs" in config.advantage.needs:
        raise ConfigError(
            f"advantage={config.advantage.estimator} weighs what the engine sampled itself; "  # type: ignore[attr-defined]
            f"leave correction out"
        )
    if config.correction.is_active and old == "rollout":
        raise ConfigError(
            "correction compares trainer and engine, but with old_logprobs=rollout the ratio itself starts from the "
            "engine's logprobs; use recompute, or correction=none"
        )
    return dataclasses.replace(algorithm, old_logprobs=old)


def _who_needs_logprobs(config: TrainerConfig) -> str:
    if config.kl.in_reward:
        return "kl=reward"
    if _LOGPROBS & config.advantage.needs:
        return f"advantage={config.advantage.estimator}"  # type: ignore[attr-defined]
    return f"policy_loss={config.policy_loss.objective}"  # type: ignore[attr-defined]


def _check_group(config: TrainerConfig) -> None:
    size, least = config.algorithm.num_generations, config.advantage.min_generations
    if size < least:
        raise ConfigError(
            f"num_generations={size}: advantage={config.advantage.estimator} "  # type: ignore[attr-defined]
            f"compares the completions of a group; use at least {least}"
        )
    if config.algorithm.max_refills and size < 2:
        raise ConfigError(
            f"max_refills={config.algorithm.max_refills} replaces groups whose rewards are all equal, but "
            f"num_generations={size}; use at least 2, or max_refills=0"
        )


def _check_kl(config: TrainerConfig) -> None:
    kl = config.kl
    num_samples = config.data.prompts_per_step * config.algorithm.num_generations
    if isinstance(kl, (KLInLoss, KLInReward)) and kl.kl_target is not None and 0.2 * num_samples >= kl.kl_horizon:
        raise ConfigError(
            f"kl_horizon={kl.kl_horizon} is too short for {num_samples} samples per step: beta could fall to 0 at "
            f"once; use more than {math.ceil(0.2 * num_samples)}"
        )
    if kl.in_reward and not config.advantage.takes_kl_rewards:
        raise ConfigError(
            f"advantage={config.advantage.estimator} "  # type: ignore[attr-defined]
            "cannot take a KL penalty as part of the reward; use kl=loss"
        )
    if isinstance(kl, KLInLoss) and kl.kl_estimator in ("k2", "exact") and kl.use_bias_correction_kl:
        raise ConfigError(
            f"kl_estimator={kl.kl_estimator} is a KL gradient only without the importance weight; set "
            "use_bias_correction_kl=false or kl_estimator=k3"
        )
    if isinstance(kl, (KLInLoss, KLInReward)) and kl.reference_reset_steps and reference_ranks(config):
        raise ConfigError(
            f"reference_reset_steps={kl.reference_reset_steps} copies the policy into a reference on the same ranks, "
            f"but reference_ranks={reference_ranks(config)}; leave one of them out"
        )
    if isinstance(kl, KLInLoss) and kl.kl_estimator == "exact" and reference_ranks(config):
        raise ConfigError(
            f"kl_estimator=exact compares whole distributions in the update, but "
            f"reference_ranks={reference_ranks(config)} puts the reference on other ranks; leave one of them out"
        )


def reference_ranks(config: TrainerConfig) -> int:
    """Ranks of their own for the reference; 0 where it shares the policy's, or there is no choice."""
    return getattr(config.controller, "reference_ranks", 0)
