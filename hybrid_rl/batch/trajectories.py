"""Samples as turns of trajectories: the key of a sample, and the samples of a batch by trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_rl.batch.batch import Batch
from hybrid_rl.batch.ref import AnyBatch
from hybrid_rl.errors import DataError


class SampleKey(NamedTuple):
    """The name of a sample, the same from the rollout to the last report about it. trajectory: an id that no other
    trajectory of the run has; turn: of the sample within it, from 0."""

    trajectory: int
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.trajectory} turn {self.turn}" if self.turn else str(self.trajectory)


@dataclass(frozen=True)
class Trajectories:
    """The M trajectories of N samples, in order of first appearance.

    index: int64 [N], the trajectory of each sample. order: int64 [N], the samples trajectory after trajectory, each
    from its first turn to its last. first, last: int64 [M], the samples that are its first and its last turn.
    """

    index: Tensor
    order: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: AnyBatch) -> Trajectories:
        """Find them from the columns trajectory and turn; in a batch without them every sample is a trajectory of its
        own. Raises DataError for two samples of one key, and for a trajectory in two groups."""
        if "trajectory" not in batch:
            index = torch.arange(batch.num_samples)
            return cls(index, index, index, index)
        index = numbered(batch["trajectory"])
        order = key_order(batch, index)
        sizes = index.bincount()
        ends = sizes.cumsum(0)
        trajectories = cls(index, order, order[ends - sizes], order[ends - 1])
        trajectories._check(batch)
        return trajectories

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories, M."""
        return len(self.first)

    @property
    def are_in_order(self) -> bool:
        """Whether the turns of each trajectory are side by side in the batch, ascending."""
        return torch.equal(self.order, torch.arange(len(self.order)))

    def last_turns(self, batch: Batch) -> Batch:
        """Return the last turn of each trajectory, whose prompt holds the turns before it: [M] samples."""
        return batch if self.num_trajectories == batch.num_samples else batch.select(self.last)

    def _check(self, batch: AnyBatch) -> None:
        if self.num_trajectories == batch.num_samples:
            return
        ids = batch["trajectory"]
        turns = batch["turn"] if "turn" in batch else torch.zeros_like(ids)
        samples, next_samples = self.order[:-1], self.order[1:]
        twice = samples[(ids[samples] == ids[next_samples]) & (turns[samples] == turns[next_samples])].tolist()
        if twice:
            raise DataError(
                f"two samples are turn {int(turns[twice[0]])} of trajectory {int(ids[twice[0]])}; count the turns of a "
                f"trajectory, and give every trajectory its own id"
            )
        if "group" not in batch:
            return
        group = batch["group"]
        torn = (group != group[self.first][self.index]).nonzero()[:, 0].tolist()
        if torn:
            raise DataError(
                f"trajectory {int(ids[torn[0]])} is in the groups {int(group[self.first][self.index[torn[0]]])} and "
                f"{int(group[torn[0]])}; all turns of a trajectory answer one prompt: give them its group"
            )


def sample_keys(batch: Batch, samples: Tensor | None = None) -> list[SampleKey]:
    """Name the samples of a batch, or those at `samples` (int64 [M]), in order."""
    columns = (batch[name] if samples is None else batch[name][samples] for name in SampleKey.__annotations__)
    return [SampleKey(*key) for key in zip(*(column.tolist() for column in columns), strict=True)]


def key_order(batch: AnyBatch, trajectory: Tensor | None = None) -> Tensor:
    """Sort samples by trajectory and then by turn: int64 [N]. trajectory: int64 [N], another numbering than the ids."""
    ids = batch["trajectory"] if trajectory is None else trajectory
    order = batch["turn"].argsort(stable=True) if "turn" in batch else torch.arange(len(ids))
    return order[ids[order].argsort(stable=True)]


def numbered(ids: Tensor) -> Tensor:
    """Number ids 0, 1, .. in order of first appearance, int64 [N]. ids: int64 [N]."""
    number = ids.unique(return_inverse=True)[1]
    count = int(number.max()) + 1 if number.numel() else 0
    first = torch.full((count,), len(ids)).scatter_reduce(0, number, torch.arange(len(ids)), "amin")
    return first.argsort().argsort()[number]
