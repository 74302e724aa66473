"""Notices: consequences of a valid configuration that its user may not expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from hybrid_rl.config.algorithm import learns_from_demonstrations
from hybrid_rl.config.schema import TrainerConfig
from hybrid_rl.config.validate import optimizer_steps_per_training_step

CLIP_KEYS = ("epsilon", "epsilon_high", "delta", "dual_clip")
# At a ratio of 1 their loss is -A ln p.
LIKELIHOODS = ("reinforce", "cispo")


def notices(config: TrainerConfig, given: Collection[str]) -> Iterator[str]:
    """Yield sentences about a resolved config. given: the paths that the user set."""
    if config.model.cast_lm_head_to_fp32 and config.rollout.placement != "embedded":
        yield (
            f"cast_lm_head_to_fp32=True applies only to the trainer's models: {config.rollout.engine} rounds its "
            "logits to bfloat16, so engine and trainer differ more than with an embedded engine (see mismatch/*); "
            "rollout.engine=inplace has the same head in both"
        )
    loss, old = config.policy_loss, config.algorithm.old_logprobs
    objective: str = loss.objective
    if learns_from_demonstrations(config) and objective not in LIKELIHOODS:
        yield (
            f"policy_loss={objective} holds ratios: the metric loss is not the negative log-likelihood of the "
            "demonstrations (of clip it is -1), though the first update of a batch learns from it; "
            "policy_loss=reinforce shows it"
        )
    has_ratio = loss.uses_old_logprobs and old != "rollout"
    if not has_ratio or optimizer_steps_per_training_step(config) > 1:
        return
    defaults = {item.name: item.default for item in dataclasses.fields(loss)}
    inert = [
        f"{name}={getattr(loss, name)}"
        for name in CLIP_KEYS
        if f"policy_loss.{name}" in given and getattr(loss, name) != defaults[name]
    ]
    if inert:
        yield (
            f"{', '.join(inert)}: nothing is clipped, because each batch is used by one optimizer step, at which every "
            "ratio is 1; set num_iterations above 1, or prompts_per_mini_batch below prompts_per_step"
        )
