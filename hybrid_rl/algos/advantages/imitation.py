"""Estimators for imitation: of demonstrations, of the best completions of the policy itself, and of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.advantages.group_rewards import GroupEstimator, Groups
from hybrid_rl.algos.advantages.grpo import group_relative_advantages
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages, Needs, register
from hybrid_rl.algos.options import key
from hybrid_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class SFT(AdvantageEstimator):
    """Supervised fine-tuning: 1 for every token. The dataset's column `completion` takes the place of a rollout, and
    rewards play no part."""

    estimator: Literal["sft"] = key("sft", "the advantage estimator")
    needs = frozenset({Needs.DEMONSTRATIONS})
    needs_rewards = takes_kl_rewards = False
    is_never_negative = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Return 1 at every token; samples without a reward count as well."""
        return Advantages(inputs.mask.double())


@register
@dataclass(frozen=True)
class Rejection(GroupEstimator):
    """Rejection sampling, best of n: 1 for the completions that are accepted, else 0.

    RAFT, arXiv:2304.06767, algorithm 1, takes the best one of each group. The paper leaves ties open: of equal rewards
    the first sample of its group is taken, so that `num_best` is never exceeded.
    """

    estimator: Literal["rejection"] = key("rejection", "the advantage estimator")
    reward_threshold: float | None = key(None, "least reward of an accepted completion; None = any")
    num_best: int | None = key(
        1, "accepted completions of a group, the best ones; None = all over the threshold", minimum=1
    )
    is_never_negative = True
    is_zero_if_alike = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_threshold is None and self.num_best is None:
            raise ConfigError(
                "reward_threshold=None and num_best=None accept every completion; give one, or use advantage=sft"
            )

    @property
    def min_generations(self) -> int:
        """One more than are accepted, unless a threshold decides."""
        return 1 if self.reward_threshold is not None or self.num_best is None else self.num_best + 1

    def of_samples(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return the accepted samples, bool [N]. One without a reward never is."""
        grouping = Groups.of(rewards, groups)
        accepted = grouping.scored
        if self.reward_threshold is not None:
            accepted = accepted & (grouping.rewards >= self.reward_threshold)
        if self.num_best is not None:
            order, starts = grouping.ranking(-grouping.rewards)
            place = torch.arange(len(order), device=rewards.device) - starts[grouping.index[order]]
            accepted = accepted & torch.zeros_like(accepted).index_copy(0, order, place < self.num_best)
        return accepted


@register
@dataclass(frozen=True)
class Distillation(AdvantageEstimator):
    """On-policy distillation: `ln p_teacher - ln p_old` of the sampled token, minus the one-sample estimate of KL(p,
    p_teacher) there, + coef * GRPO's advantage on request.

    arXiv:2306.13649 with reverse KL; as an advantage with discount 0, each token answering for its own divergence only:
    Thinking Machines, On-Policy Distillation, 2025. With REINFORCE's loss and samples of the policy the expected
    gradient is that of KL(policy, teacher) at the states that the policy visits. Samples without a reward also learn
    from the teacher. The teacher has the policy's vocabulary.
    """

    estimator: Literal["distillation"] = key("distillation", "the advantage estimator")
    teacher_path: str | None = key(None, "the teacher: Hugging Face name or local folder, of the policy's tokenizer")
    group_advantage_coef: float = key(
        0.0,
        "weight of the group-relative advantages of rewards (GRPO's), added to the teacher's; 0 = no rewards",
        minimum=0,
    )
    needs = frozenset({Needs.LOGPROBS, Needs.TEACHER_LOGPROBS})
    tells_tokens_apart = True

    @property
    def needs_rewards(self) -> bool:
        """True for the sum with GRPO's advantage."""
        return self.group_advantage_coef > 0

    @property
    def takes_kl_rewards(self) -> bool:
        """True for the sum with GRPO's advantage."""
        return self.needs_rewards

    @property
    def min_generations(self) -> int:
        """Two for the sum with GRPO's advantage."""
        return 2 if self.needs_rewards else 1

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute differences of logprobs, and on request GRPO's advantages."""
        logprobs, teacher = inputs.needed("logprobs"), inputs.needed("teacher_logprobs")
        advantages = torch.where(inputs.mask, teacher.double() - logprobs.double(), 0.0)
        if self.needs_rewards:
            relative = group_relative_advantages(inputs.rewards, inputs.groups)
            advantages = advantages + self.group_advantage_coef * inputs.per_token(relative)
        return Advantages(advantages)
