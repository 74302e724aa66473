"""Advantages of 1: with REINFORCE's loss, -A ln p, they make supervised learning of what they are given to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.groups import Groups
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import key


@dataclass(frozen=True)
class SFT(AdvantageEstimator):
    """1 for every token: supervised fine-tuning on the completions. Rewards play no part."""

    estimator: Literal["sft"] = key("sft", "the advantage estimator")
    needs = frozenset({"demonstrations"})
    needs_rewards = takes_kl_rewards = False
    is_never_negative = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator. Samples without a reward count as well."""
        return Advantages(inputs.mask.double())


@dataclass(frozen=True)
class Rejection(AdvantageEstimator):
    """1 for the completions that are accepted, else 0: rejection sampling, best of n (RAFT, arXiv:2304.06767)."""

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
        if self.reward_threshold is None and self.num_best is not None:
            object.__setattr__(self, "min_generations", self.num_best + 1)

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        accepted = accepted_samples(
            inputs.rewards, inputs.groups, reward_threshold=self.reward_threshold, num_best=self.num_best
        )
        return Advantages(inputs.per_token(accepted))


def accepted_samples(
    rewards: Tensor, groups: Tensor, *, reward_threshold: float | None, num_best: int | None
) -> Tensor:
    """bool [N]: scored samples with at least this reward, and of each group only the `num_best` best.

    RAFT, arXiv:2304.06767, algorithm 1, takes the best one of each group. The paper leaves ties open: of equal rewards
    the sample that stands first in its group is taken, so that `num_best` is never exceeded.

    rewards: float [N], NaN where a sample could not be scored (never accepted); groups: int64 [N].
    """
    found = Groups.of(rewards, groups)
    accepted = found.scored
    if reward_threshold is not None:
        accepted = accepted & (found.rewards >= reward_threshold)
    if num_best is not None:
        order, starts = found.ranking(-found.rewards)
        place = torch.arange(len(order), device=rewards.device) - starts[found.index[order]]
        accepted = accepted & torch.zeros_like(accepted).index_copy(0, order, place < num_best)
    return accepted
