"""Checks over the sections of an algorithm, and the columns that a training step needs for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from hybrid_rl.algos import KLInLoss, KLInReward, Needs, PolicyObjective
from hybrid_rl.config.algorithm_keys import AdaptiveEntropyConfig, AlgorithmConfig
from hybrid_rl.config.lora_keys import LoraKeys
from hybrid_rl.config.schema import InPlaceRolloutConfig, RolloutConfig, TrainerConfig, ValueHeadConfig
from hybrid_rl.errors import ConfigError

# Columns that come from the learner's distribution before the update.
_LOGPROBS = frozenset({Needs.LOGPROBS, Needs.SUM_PI_SQUARED, Needs.OLD_LOGPROBS, Needs.OLD_TOP, Needs.ROUTER_SCORES})


def needs_reference(config: TrainerConfig) -> bool:
    """Return whether the run must compute the reference's logprobs."""
    return config.kl.in_loss or config.kl.in_reward or Needs.REF_LOGPROBS in config.advantage.needs


def reference_is_policy(config: TrainerConfig) -> bool:
    """Return whether the reference is the policy without its adapters, so that no second model is needed."""
    return needs_reference(config) and not reference_ranks(config) and config.lora.is_on


def has_reference_model(config: TrainerConfig) -> bool:
    """Return whether the ranks of the policy hold a reference model beside the policy."""
    return needs_reference(config) and not reference_ranks(config) and not config.lora.is_on


def needs_logprobs(config: TrainerConfig) -> bool:
    """Return whether the learner's logprobs are needed before the update, whatever the ratio compares with."""
    needs = config.advantage.needs | config.policy_loss.needs
    sees_mini_batch = type(config.policy_loss).prepare is not PolicyObjective.prepare  # WholeMiniBatch.old_logprobs
    return bool(config.kl.in_reward or _LOGPROBS & needs or sees_mini_batch)


def resolve_algorithm(config: TrainerConfig, *, updates: int) -> AlgorithmConfig:
    """Return the algorithm section with `auto` resolved. updates: optimizer steps that use one batch.

    Raises ConfigError for records that do not go together.
    """
    algorithm = config.algorithm
    if learns_from_demonstrations(config):  # a prompt has one
        algorithm = dataclasses.replace(algorithm, num_generations=1)
        config = dataclasses.replace(config, algorithm=algorithm)
    _check_group(config)
    _check_kl(config)
    _check_credit(config)
    _check_entropy(config)
    old = algorithm.old_logprobs
    if old == "detach" and updates > 1 and config.policy_loss.uses_old_logprobs:
        raise ConfigError(
            f"old_logprobs=detach is right only if one optimizer step uses a batch, but "
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
        wants = wants or needs_logprobs(config) or algorithm.routing_replay == "scoring"
        old = "recompute" if wants else "detach"
    if old == "rollout" and config.policy_loss.uses_proximal and not learns_from_demonstrations(config):
        raise ConfigError(
            f"policy_loss={config.policy_loss.objective} compares the engine's policy with that at the "
            f"start of the step, but old_logprobs=rollout takes both from the engine; use recompute, or another loss"
        )
    model, uses_dora = config.model, isinstance(config.lora, LoraKeys) and config.lora.peft.use_dora
    if uses_dora and model.torch_compile and model.gradient_checkpointing:
        raise ConfigError(
            "lora.peft.use_dora=true, torch_compile=true and gradient_checkpointing=true: compiled blocks of DoRA "
            "cannot be computed again in the backward pass; leave one of the three out"
        )
    if config.model.torch_compile and Needs.ROUTER_SCORES in config.policy_loss.needs:
        raise ConfigError(
            f"policy_loss={config.policy_loss.objective} reads the routers of the model as it runs, "
            f"which compiled blocks hide; set torch_compile=false"
        )
    _check_replay(config, old)
    _check_engine(config, old)
    return dataclasses.replace(algorithm, old_logprobs=old)


def _check_replay(config: TrainerConfig, old: str) -> None:
    """Check that what routing_replay names is recorded. old: old_logprobs without `auto`."""
    replay, engine = config.algorithm.routing_replay, config.rollout.engine
    if replay == "off":
        return
    if config.model.torch_compile:
        raise ConfigError(
            f"routing_replay={replay} replaces what the routers of the model choose, and compiled blocks hide them; "
            "set torch_compile=false"
        )
    if replay == "scoring" and old != "recompute":
        raise ConfigError(
            f"routing_replay=scoring repeats the experts of the pass that computes old_logprobs, and "
            f"old_logprobs={old} has no such pass; set old_logprobs=recompute, or routing_replay=rollout"
        )
    if replay == "rollout" and learns_from_demonstrations(config):
        raise ConfigError(
            "routing_replay=rollout repeats the experts of the engine, and demonstrations come from the dataset; leave "
            "it out, or set routing_replay=scoring"
        )
    if replay == "rollout" and engine == "hf" and config.mode != "train":
        raise ConfigError(
            "routing_replay=rollout repeats the experts of the engine, which rollout.engine=hf does not record; set "
            "routing_replay=scoring, or rollout.engine=inplace or vllm"
        )


def learns_from_demonstrations(config: TrainerConfig) -> bool:
    """Return whether samples are the dataset's completions, so that no engine samples and no reward distinguishes
    them."""
    return Needs.DEMONSTRATIONS in config.advantage.needs


def inert_keys(config: TrainerConfig, *, has_eval: bool) -> Iterator[tuple[str, str]]:
    """Yield keys of an algorithm that other keys leave without effect: the path and the reason. has_eval: whether there
    is data for evaluation, which has its own rewards."""
    for section in ("advantage", "policy_loss", "kl", "correction"):
        for option, reason in getattr(config, section).inert_options.items():
            yield f"{section}.{option}", reason
    estimator, has_demonstrations = config.advantage.estimator, learns_from_demonstrations(config)
    if has_demonstrations:
        why = f"advantage={estimator} learns from the dataset's completions"
        yield "algorithm.max_refills", f"{why}: there is nothing to replace"
        yield "algorithm.mask_truncated_completions", f"{why}, none of which is cut off"
        if config.algorithm.num_generations != 1:
            yield "algorithm.num_generations", f"{why}, one per prompt"
        if not has_eval:
            for name in ("reward_weights", "reward_processes", "reward_timeout_seconds", "score_by"):
                yield f"rewards.{name}", f"{why}, and nothing is evaluated: no reward is called"
            yield "rewards.max_reward_failure_share", f"{why}, and nothing is evaluated"
    if config.advantage.is_never_negative:
        why = f"advantage={estimator} makes no negative advantages, and others stay"
        yield "algorithm.off_policy_mask_threshold", why
    if not config.advantage.needs_rewards and (has_demonstrations or not config.algorithm.positive_nll_coef):
        yield "rewards.overlong_buffer", f"advantage={estimator} learns without rewards"


def _check_credit(config: TrainerConfig) -> None:
    """Check that a loss with one ratio per completion gets one advantage per completion: else each token gets their
    mean."""
    advantage, loss = config.advantage, config.policy_loss
    if not loss.is_per_completion:
        return
    why = ""
    if advantage.tells_tokens_apart:
        why = "tells the tokens of a completion apart"
    elif advantage.uses_step_rewards and config.kl.in_reward:
        why = "tells the tokens of a completion apart if kl=reward gives each a reward"
    if why:
        raise ConfigError(
            f"advantage={advantage.estimator} {why}, but policy_loss={_loss_name(config)} has one ratio "
            f"per completion, through which each token would get the mean of their advantages; "
            f"{one_advantage_remedy(config)}"
        )


def token_rewards_problem(config: TrainerConfig) -> str:
    """Return why rewards of single tokens or turns cannot be used, and what to do; "" if they can."""
    if not (config.advantage.uses_step_rewards and config.policy_loss.is_per_completion):
        return ""
    return (
        f"advantage={config.advantage.estimator} uses token by token, but policy_loss={config.policy_loss.objective} "  # type: ignore[attr-defined]
        f"has one ratio per completion, so each token would get the mean of their advantages; "
        f"{one_advantage_remedy(config)}"
    )


def one_advantage_remedy(config: TrainerConfig) -> str:
    """Return what to do if a loss with one ratio per completion meets advantages of single tokens."""
    if hasattr(config.policy_loss, "importance_sampling_level"):
        return "use importance_sampling_level=sequence_token, or an estimator with one advantage per completion"
    return "use another loss (policy_loss=clip), or an estimator with one advantage per completion"


def _loss_name(config: TrainerConfig) -> str:
    name: str = config.policy_loss.objective
    level = getattr(config.policy_loss, "importance_sampling_level", None)
    return name if level in (None, "token") else f"{name} with importance_sampling_level={level}"


def _check_engine(config: TrainerConfig, old: str) -> None:
    """Check that the engine's samples are weighted once, and against the policy that sampled. old: old_logprobs without
    `auto`."""
    estimator, objective = config.advantage.estimator, config.policy_loss.objective
    takers = {
        f"advantage={estimator}": Needs.ROLLOUT_LOGPROBS in config.advantage.needs,
        f"policy_loss={objective}": config.policy_loss.corrects_rollout,
        "old_logprobs=rollout": old == "rollout" and config.policy_loss.uses_old_logprobs,
        "correction": config.correction.is_active,
    }
    names = [name for name, takes in takers.items() if takes]
    if names and learns_from_demonstrations(config):
        raise ConfigError(
            f"{names[0]} compares with the engine that sampled, but advantage={estimator} learns from the dataset's "
            f"completions, which no engine sampled; leave it out, or choose another"
        )
    if len(names) > 1 and "old_logprobs=rollout" in names:
        names.remove("old_logprobs=rollout")
        raise ConfigError(
            f"{names[0]} compares trainer and engine, but with old_logprobs=rollout both are the engine, and the ratio "
            f"itself starts from it; use recompute, or leave {names[0].partition('=')[0]} out"
        )
    if len(names) > 1:
        remedy = "leave correction out" if names[-1] == "correction" else "use policy_loss=clip or reinforce"
        raise ConfigError(
            f"{names[0]} corrects for the engine's sampling itself, and {names[-1]} would do so a second time; {remedy}"
        )


def _who_needs_logprobs(config: TrainerConfig) -> str:
    if config.kl.in_reward:
        return "kl=reward"
    if _LOGPROBS & config.advantage.needs:
        return f"advantage={config.advantage.estimator}"
    return f"policy_loss={config.policy_loss.objective}"


def _check_group(config: TrainerConfig) -> None:
    size, least = config.algorithm.num_generations, config.advantage.min_generations
    if size < least:
        raise ConfigError(
            f"num_generations={size}: advantage={config.advantage.estimator} "
            f"compares the completions of a group; use at least {least}"
        )
    if size < config.policy_loss.min_generations:
        raise ConfigError(
            f"policy_loss={_loss_name(config)} compares the completions of a group, but each has one here "
            f"(num_generations={size}); use another loss"
        )
    if config.algorithm.max_refills and size < 2:
        raise ConfigError(
            f"max_refills={config.algorithm.max_refills} replaces groups whose rewards are all equal, but "
            f"num_generations={size}; use at least 2, or max_refills=0"
        )


def _check_entropy(config: TrainerConfig) -> None:
    entropy, coef = config.entropy, config.algorithm.entropy_coef
    if not isinstance(entropy, AdaptiveEntropyConfig):
        return
    if entropy.entropy_coef_min > entropy.entropy_coef_max:
        raise ConfigError(
            f"entropy_coef_min={entropy.entropy_coef_min:g} is above entropy_coef_max={entropy.entropy_coef_max:g}; "
            f"lower the one, or raise the other"
        )
    if not entropy.entropy_coef_min <= coef <= entropy.entropy_coef_max:
        raise ConfigError(
            f"entropy_coef={coef:g} is the first weight of the entropy, but entropy_coef_min="
            f"{entropy.entropy_coef_min:g} and entropy_coef_max={entropy.entropy_coef_max:g} bound it; give one between"
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
            f"advantage={config.advantage.estimator} cannot take a KL penalty as part of the reward; use kl=loss"
        )
    if isinstance(kl, KLInLoss) and kl.kl_estimator in ("k2", "exact") and kl.use_bias_correction_kl:
        raise ConfigError(
            f"kl_estimator={kl.kl_estimator} is a KL gradient only without the importance weight; set "
            "use_bias_correction_kl=false or kl_estimator=k3"
        )
    if config.lora.is_on and isinstance(kl, (KLInLoss, KLInReward)):
        _check_reference_of_adapters(kl, config)
    if isinstance(kl, (KLInLoss, KLInReward)) and kl.moves_reference and reference_ranks(config):
        raise ConfigError(
            f"{kl.moves_reference} copies the policy into a reference on the same ranks, "
            f"but reference_ranks={reference_ranks(config)}; leave one of them out"
        )
    if isinstance(kl, KLInLoss) and kl.kl_estimator == "exact" and reference_ranks(config):
        raise ConfigError(
            f"kl_estimator=exact compares whole distributions in the update, but "
            f"reference_ranks={reference_ranks(config)} puts the reference on other ranks; leave one of them out"
        )


def _check_reference_of_adapters(kl: KLInLoss | KLInReward, config: TrainerConfig) -> None:
    is_policy = "with lora.r the reference is the policy without its adapters"
    if kl.moves_reference:
        raise ConfigError(f"{kl.moves_reference} moves the reference, but {is_policy}, which stays; leave it out")
    if reference_ranks(config):
        raise ConfigError(f"reference_ranks={reference_ranks(config)}: {is_policy}, on the same ranks; leave it out")


def reference_ranks(config: TrainerConfig) -> int:
    """Return the number of ranks only for the reference; 0 if it shares the policy's, or the backend has no such
    choice."""
    return getattr(config.controller, "reference_ranks", 0)


def steps_ahead(config: TrainerConfig) -> int:
    """Return how many batches are generated ahead of the one that is trained on: rollout.async_level, resolved."""
    level = config.rollout.async_level
    return 0 if level == "auto" else level


def is_rounded(config: RolloutConfig) -> bool:
    """Return whether an embedded engine decodes from rounded weights of its own. config: the section `rollout`."""
    return isinstance(config, InPlaceRolloutConfig) and config.quantization == "int8"


def samples_rounded(config: RolloutConfig) -> bool:
    """Return whether an embedded engine samples with rounded weights, or over rounded keys and values."""
    return is_rounded(config) or config.kv_cache_dtype == "int8"


def teacher_path(config: TrainerConfig) -> str | None:
    """Return the name or folder of the model to distil, if the algorithm has one. Raises ConfigError if it is needed
    but not named."""
    path: str | None = getattr(config.advantage, "teacher_path", None)
    if path is None and Needs.TEACHER_LOGPROBS in config.advantage.needs:
        raise ConfigError("distillation has no teacher: set advantage.teacher_path to its name or folder")
    return path


def critic_path(config: TrainerConfig) -> str | None:
    """Return the name or folder of the model that the critic starts from, if that is not the policy."""
    critic = config.critic
    return critic.critic_path if isinstance(critic, ValueHeadConfig) else None


def rollout_ranks(config: TrainerConfig) -> int:
    """Return the number of ranks that only generate; 0 if those that train do, or the backend has no such choice."""
    return getattr(config.controller, "rollout_ranks", 0)


def ranks_apart(config: TrainerConfig) -> dict[str, int]:
    """Return how many ranks there are besides those that train, by the key that asks for them."""
    apart = {"reference_ranks": reference_ranks(config) if needs_reference(config) else 0}
    apart["rollout_ranks"] = rollout_ranks(config)
    return {name: number for name, number in apart.items() if number}
