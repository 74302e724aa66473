"""Rewards by group, for the estimators that compare the completions of one prompt, and normalisation over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hybrid_rl.algos.columns import check_rewards
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages

if TYPE_CHECKING:
    from torch import Tensor

STD_FLOOR = 1e-4  # as in TRL, so that the same batch gives the same numbers; rewards are of the order of 1
MAD_TO_STD = 1.4826  # of a normal distribution: standard deviation / median absolute deviation
MEAN_DEVIATION_TO_STD = 1.253314  # and standard deviation / mean absolute deviation, sqrt(pi / 2)


@dataclass(frozen=True)
class Groups:
    """The rewards of N samples in G groups, in ascending order of their ids.

    rewards: float64 [N], 0 if there is none. scored: bool [N]. index: int64 [N], the group of each sample. counts:
    float64 [G], scored samples. low, high: float64 [G], of the scored rewards, inf and -inf if there are none.
    """

    rewards: Tensor
    scored: Tensor
    index: Tensor
    counts: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor) -> Groups:
        """Find the groups. rewards: float [N], NaN if a sample could not be scored; groups: int64 [N], any numbers.
        Raises ValueError for infinite rewards."""
        if groups.shape != rewards.shape:
            raise ValueError(f"rewards and groups must be [N], not {tuple(rewards.shape)} and {tuple(groups.shape)}")
        check_rewards(rewards=rewards)
        rewards, scored = rewards.to(torch.float64), ~rewards.isnan()
        _, index = groups.unique(return_inverse=True)
        zeros = rewards.new_zeros(int(index.max()) + 1 if index.numel() else 0)
        low, high = torch.full_like(zeros, torch.inf), torch.full_like(zeros, -torch.inf)
        return cls(
            rewards=torch.where(scored, rewards, torch.zeros_like(rewards)),
            scored=scored,
            index=index,
            counts=zeros.index_add(0, index, scored.to(torch.float64)),
            low=low.scatter_reduce(0, index, torch.where(scored, rewards, torch.inf), "amin"),
            high=high.scatter_reduce(0, index, torch.where(scored, rewards, -torch.inf), "amax"),
        )

    @property
    def has_signal(self) -> Tensor:
        """bool [G]: groups with at least two different rewards. If all are equal, a difference to their mean is
        rounding and must not become a signal."""
        return (self.counts > 1) & (self.high > self.low)

    @property
    def compared(self) -> Tensor:
        """bool [N]: scored samples of groups with signal."""
        return self.scored & self.has_signal[self.index]

    @property
    def centred(self) -> Tensor:
        """Rewards less the mean of their group, float64 [N]."""
        return self.rewards - self.mean(self.rewards)[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [N] over the scored samples of each group, float64 [G]."""
        kept = torch.where(self.scored, values.to(torch.float64), torch.zeros_like(self.rewards))
        return torch.zeros_like(self.counts).index_add_(0, self.index, kept)

    def mean(self, values: Tensor) -> Tensor:
        """Average `values` [N] over the scored samples of each group, float64 [G]; 0 if there are none."""
        return self.sum(values) / self.counts.clamp(min=1)

    def std(self) -> Tensor:
        """Compute the sample standard deviation (n - 1) of the rewards of each group, float64 [G]; 0 for fewer than
        two."""
        unit = power_of_two(torch.where(self.has_signal, self.high - self.low, torch.ones_like(self.low)))
        squares = self.sum((self.centred / unit[self.index]) ** 2)
        return unit * (squares / (self.counts - 1).clamp(min=1)).sqrt()

    def ranking(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scored samples, group after group, ascending in `values` [N] and in their order if values are
        equal: int64 [S], and the place of each group's first one: int64 [G]."""
        order = torch.nonzero(self.scored)[:, 0]
        order = order[values[order].argsort(stable=True)]
        order = order[self.index[order].argsort(stable=True)]
        counts = self.counts.long()
        return order, counts.cumsum(0) - counts

    def median(self, values: Tensor) -> Tensor:
        """Compute the median of `values` [N] over the scored samples of each group, float64 [G], the mean of the middle
        two if their number is even; 0 if there are none."""
        order, starts = self.ranking(values)
        if not len(order):
            return torch.zeros_like(self.counts)
        ranked, counts = values[order].to(torch.float64), self.counts.long()
        # An empty group's places are outside its own samples: clamped here, its result is left out below.
        lower = ranked[(starts + (counts - 1).div(2, rounding_mode="floor")).clamp(0, len(order) - 1)]
        upper = ranked[(starts + counts.div(2, rounding_mode="floor")).clamp(0, len(order) - 1)]
        return torch.where(counts > 0, (lower + upper) / 2, torch.zeros_like(lower))

    def robust_std(self) -> Tensor:
        """Return 1.4826 times the median absolute deviation from the median, float64 [G].

        If more than half of the rewards are equal, which is common for binary ones, that is 0: then 1.253314 times the
        mean absolute deviation from the median (Iglewicz and Hoaglin, How to detect and handle outliers, 1993).
        """
        deviation = (self.rewards - self.median(self.rewards)[self.index]).abs()
        mad = self.median(deviation)
        return torch.where(mad > 0, MAD_TO_STD * mad, MEAN_DEVIATION_TO_STD * self.mean(deviation))

    def scale(self, scale_rewards: str) -> Tensor:
        """Return what centred rewards are divided by, float64 [G]: 1 for "none"; else STD_FLOOR more than the sample
        standard deviation of the group ("group"), a robust estimate of it ("mad"), or that of all samples ("batch")."""
        if scale_rewards == "none":
            return torch.ones_like(self.counts)
        if scale_rewards == "group":
            return self.std() + STD_FLOOR
        if scale_rewards == "mad":
            return self.robust_std() + STD_FLOOR
        if scale_rewards == "batch":
            scored = self.rewards[self.scored]
            if len(scored) < 2:
                return torch.full_like(self.counts, STD_FLOOR)
            unit = power_of_two(scored.abs().max())
            return (unit * (scored / unit).std() + STD_FLOOR).expand_as(self.counts)
        raise ValueError(f"scale_rewards={scale_rewards!r} is unknown; use group, batch, mad or none")


def power_of_two(sizes: Tensor) -> Tensor:
    """Return the power of two at or below each size, at least 1: float64, of the shape of `sizes`, which are finite.

    Numbers up to that size are divided by it before they are squared: squares of rewards of 1e154 and more are not
    float64. Divided and multiplied by a power of two, other numbers keep every bit.
    """
    return torch.ldexp(torch.ones_like(sizes), (sizes.frexp().exponent - 1).clamp(min=0))


def group_has_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """Find the groups with at least two different rewards: bool [G], groups in ascending order of their id."""
    return Groups.of(rewards, groups).has_signal


@dataclass(frozen=True)
class GroupEstimator(AdvantageEstimator):
    """Base of the estimators that give a completion one number, which follows from the rewards of its group."""

    # Whether a number follows from the rewards of other groups too.
    sees_all_ranks: ClassVar[bool] = False

    @property
    def is_zero_if_alike(self) -> bool:
        """Whether a group whose samples all got the same reward has advantages of 0: it teaches nothing."""
        return True

    @property
    def min_generations(self) -> int:
        """Two: a reward has nothing to be compared with in a group of one."""
        return 2

    def of_samples(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Compute the advantage of each sample, [N], 0 for one without a reward and for the only scored one of its
        group. rewards: float [N], NaN for a sample that could not be scored; groups: int64 [N], any numbers."""
        raise NotImplementedError

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Give each token the number of its sample."""
        if not self.sees_all_ranks:
            return Advantages(inputs.per_token(self.of_samples(inputs.rewards, inputs.groups)))
        (rewards, groups), mine = inputs.everywhere(inputs.rewards, inputs.groups)
        return Advantages(inputs.per_token(self.of_samples(rewards, groups)[mine]))


VARIANCE_FLOOR = 1e-8  # TRL's, a standard deviation of 1e-4: rewards are of the order of 1


def whitened(values: Tensor, keep: Tensor, gather: Callable[[Any], list[Any]]) -> Tensor:
    """Compute (value - mean) / sqrt(variance + 1e-8) over the kept values of all ranks; exactly 0 elsewhere, and
    everywhere if they are all equal or only one is kept.

    values: float64 [K]; keep: bool [K]; gather: the same call on every rank gives the values of all ranks. The variance
    is that of a sample (n - 1), as in TRL; it is taken around the global mean, in a second pass, because a difference
    of sums of squares would lose the digits that matter.
    """
    if values.dim() != 1 or keep.shape != values.shape:
        raise ValueError(f"values and keep must be [K], not {tuple(values.shape)} and {tuple(keep.shape)}")
    kept = values[keep].to(torch.float64)
    low, high = (float(kept.min()), float(kept.max())) if len(kept) else (math.inf, -math.inf)
    counts, sums, lows, highs = zip(*gather((len(kept), float(kept.sum()), low, high)), strict=True)
    count = sum(counts)
    mean = math.fsum(sums) / max(count, 1)
    # The squared values are of the order of 1 (`power_of_two`): squares of 1e154 and more are not float64.
    unit = float(power_of_two(torch.tensor(max(highs) - min(lows) if count else 1.0, dtype=torch.float64)))
    squares = math.fsum(gather(float((((kept - mean) / unit) ** 2).sum())))
    if count < 2 or min(lows) == max(highs):
        return torch.zeros_like(values, dtype=torch.float64)
    deviation = unit * math.sqrt(squares / (count - 1) + VARIANCE_FLOOR / unit / unit)
    return torch.where(keep, (values.to(torch.float64) - mean) / deviation, 0.0)
