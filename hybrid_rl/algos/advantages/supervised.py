"""Advantages of 1: with REINFORCE's loss, -A ln p, they make supervised learning of what they are given to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.groups import GroupEstimator, Groups
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages, Needs, register
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import key


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
        """1 at every token; samples without a reward count as well."""
        return Advantages(inputs.mask.double())


@register
@dataclass(frozen=True)
class Rejection(GroupEstimator):
    """Rejection sampling, best of n: 1 for the completions that are accepted, else 0.

    RAFT, arXiv:2304.06767, algorithm 1, takes the best one of each group. The paper leaves ties open: of equal rewards
    the sample that stands first in its group is taken, so that `num_best` is never exceeded.
    """

    estimator: Literal["rejection"] = key("rejection", "the advantage estimator")
    reward_threshold: float | None = key(None, "least reward of an accepted completion; None = any")
    num_best: int | None = key(
        1, "accepted completions of a group, the best ones; None = all over the threshold", minimum=1
    )
    is_never_negative = True

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
        """bool [N]: accepted samples. One without a reward never is."""
        found = Groups.of(rewards, groups)
        accepted = found.scored
        if self.reward_threshold is not None:
            accepted = accepted & (found.rewards >= self.reward_threshold)
        if self.num_best is not None:
            order, starts = found.ranking(-found.rewards)
            place = torch.arange(len(order), device=rewards.device) - starts[found.index[order]]
            accepted = accepted & torch.zeros_like(accepted).index_copy(0, order, place < self.num_best)
        return accepted
