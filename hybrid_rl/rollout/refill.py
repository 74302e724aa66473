"""Dynamic sampling: groups that teach something, the number of further prompts, and the error if too few groups do.

DAPO (arXiv:2503.14476, eq. 11 and algorithm 1) trains on prompts that the policy solves sometimes: 0 < number of right
samples < group size. Prompts are sampled until a training step has its number of such groups. The paper's rewards are
right or wrong; in general, a group has signal if two of its samples got different rewards. The paper names
neither how many prompts a further round takes (here: as many as the share of groups with signal so far lets expect) nor
an end (here: max_refills).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.batch import AnyBatch, Trajectories
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.errors import NoSignalError
from hybrid_rl.metrics.metric_sums import mean_and_std


@dataclass(frozen=True)
class GroupRewards:
    """What the M trajectories of G groups got, in the order of the groups' ids. low, high: float64 [G] (inf and -inf if
    none was scored); num_scored: int64 [G]; group: int64 [M], the group of each trajectory."""

    low: Tensor
    high: Tensor
    num_scored: Tensor
    group: Tensor

    @staticmethod
    def of(rewards: Tensor, group_ids: Tensor) -> GroupRewards:
        """Find them. rewards: float64 [M], NaN = not scored; group_ids: int64 [M]."""
        _, group = group_ids.unique(return_inverse=True)
        unset = torch.full((int(group.max()) + 1 if group.numel() else 0,), math.inf, dtype=torch.float64)
        low = unset.scatter_reduce(0, group, rewards.nan_to_num(math.inf), "amin")
        high = (-unset).scatter_reduce(0, group, rewards.nan_to_num(-math.inf), "amax")
        scored = torch.zeros(len(unset), dtype=torch.int64).index_add(0, group, (~rewards.isnan()).long())
        return GroupRewards(low, high, scored, group)

    @property
    def has_signal(self) -> Tensor:
        """Whether two samples of each group got different rewards, bool [G]."""
        return self.high > self.low


def judged_rewards(batch: AnyBatch, weights: Sequence[float], shaping: Collection[int] = ()) -> Tensor:
    """Return the weighted rewards by which a group is judged, float64 [N], NaN = not scored: those of all functions but
    the shaping ones, as DAPO filters by accuracy; of all functions if there is no other.

    weights: of the reward functions. shaping: places of those that are marked as `shaping_reward`.
    """
    places = range(len(weights))
    values = torch.tensor(batch["function_rewards"], dtype=torch.float64).view(batch.num_samples, len(places))
    judges = [place for place in places if place not in shaping] or list(places)
    # Term by term: a matrix product may round equal rows differently.
    total = torch.zeros(batch.num_samples, dtype=torch.float64)
    for place in judges:
        total += weights[place] * values[:, place].nan_to_num(0.0)
    return total.masked_fill(batch["rewards"].isnan() | values[:, judges].isnan().all(1), math.nan)


class Refill:
    """Counts the groups of a training step until num_prompts of them have signal; at most 1 + max_refills rollouts.
    With max_refills=0 there is one rollout, all of whose groups are kept.

    weights, shaping: of the reward functions, as `judged_rewards` takes them.
    """

    def __init__(
        self, num_prompts: int, max_refills: int, weights: Sequence[float], shaping: Collection[int] = ()
    ) -> None:
        self.num_prompts = num_prompts
        self.max_refills = max_refills
        self._weights, self._shaping = tuple(weights), frozenset(shaping)
        self.num_rollouts = self.num_rolled = self.num_with_signal = 0
        self._groups: list[GroupRewards] = []
        self._rewards: list[Tensor] = []

    @property
    def num_missing(self) -> int:
        """Number of groups with signal that are still needed."""
        return max(self.num_prompts - self.num_with_signal, 0)

    @property
    def num_wanted(self) -> int:
        """Number of prompts of the next rollout: as many as should give the missing groups, at most num_prompts."""
        if not self.num_with_signal:
            return self.num_prompts
        expected = -(-self.num_missing * self.num_rolled // self.num_with_signal)  # rounded up
        return min(expected, self.num_prompts)

    def kept(self, rows: Sequence[PromptRow], batch: AnyBatch) -> list[tuple[list[PromptRow], AnyBatch]]:
        """Count a rollout, and return those of its groups that are trained on, with their prompts: the first with
        signal, as many as are missing. Empty if none has; all of them if max_refills is 0.

        rows: the prompts of the groups, in their order.
        """
        self.num_rollouts += 1
        if not self.max_refills:
            self.num_with_signal = self.num_prompts
            return [([*rows], batch)]
        judged = judged_rewards(batch, self._weights, self._shaping)
        trajectories = Trajectories.of(batch)
        groups = GroupRewards.of(judged[trajectories.first], batch["group"][trajectories.first])
        with_signal = groups.has_signal.nonzero()[:, 0]
        places = with_signal[: self.num_missing]
        self.num_rolled += len(groups.low)
        self.num_with_signal += len(with_signal)
        self._groups.append(groups)
        self._rewards.append(batch["rewards"][trajectories.first])
        if not len(places):
            return []
        samples = torch.isin(groups.group[trajectories.index], places).nonzero()[:, 0]
        return [([rows[place] for place in places.tolist()], batch.select(samples))]

    def check(self, step: int) -> None:
        """Raise NoSignalError if groups are missing after the last rollout."""
        if self.num_missing and self.num_rollouts > self.max_refills:
            raise NoSignalError(
                f"step {step}: {self.num_with_signal} of {self.num_rolled} prompts "
                f"({self.num_with_signal / self.num_rolled:.1%}) had a group with different rewards, but "
                f"prompts_per_step={self.num_prompts} are needed, and max_refills={self.max_refills} are used up. "
                f"{self._others()} Give prompts that the policy solves sometimes, raise num_generations or "
                "max_refills, lower prompts_per_step, or train on all groups with max_refills=0"
            )

    def _others(self) -> str:
        """Describe the groups without signal. Too easy: alike, in the upper half of all rewards seen."""
        low, high, scored = (
            torch.cat([getattr(groups, name) for groups in self._groups]) for name in ("low", "high", "num_scored")
        )
        alike, seen = low[(scored > 1) & (low == high)], scored > 0
        middle = (float(low[seen].min()) + float(high[seen].max())) / 2 if seen.any() else 0.0
        if bool((alike == middle).all()):  # one reward in all the data: nothing tells easy from hard
            parts = {f"had the reward {middle:g} throughout": alike}
        else:
            parts = {"are too easy": alike[alike > middle], "are too hard": alike[alike <= middle]}
            parts = {
                f"{words} (all alike, mean reward {float(p.mean()):.3g})": p for words, p in parts.items() if len(p)
            }
        phrases = [f"{len(part)} {words}" for words, part in parts.items() if len(part)]
        if (scored < 2).any():
            phrases.append(f"{int((scored < 2).sum())} had fewer than two scored samples")
        return f"Of the others, {', '.join(phrases)}." if phrases else ""

    def metrics(self) -> dict[str, float]:
        """Return metrics of all rollouts for the batch. reward_all: mean over all samples, dropped groups included."""
        dropped = self.num_rolled - min(self.num_with_signal, self.num_prompts)
        return {
            "collect/num_rollouts": float(self.num_rollouts),
            "collect/groups_dropped": float(dropped),
            "collect/groups_kept_share": 1 - dropped / self.num_rolled,
            "collect/reward_all": mean_and_std(torch.cat(self._rewards))[0],
        }
