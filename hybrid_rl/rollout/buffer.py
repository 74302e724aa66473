"""Between collector and learner."""

from __future__ import annotations

from collections import deque

from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.errors import NotYetSupportedError


class SampleBuffer:
    """Holds collected batches until the learner takes them.

    capacity: batches that may wait; 0 = none, the synchronous loop: a batch is collected when it is asked for and used
    at once. max_staleness: how many policy versions older than the learner's a token may be when its batch is taken.
    """

    def __init__(self, capacity: int = 0, max_staleness: int = 0) -> None:
        if capacity != 0:
            raise NotYetSupportedError(
                f"SampleBuffer(capacity={capacity}): asynchronous training does not work yet; use 0"
            )
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness} must be 0 or more")
        self.capacity = capacity
        self.max_staleness = max_staleness
        self._batches: deque[Batch | BatchRef] = deque()

    def put(self, batch: Batch | BatchRef) -> None:
        """Add a batch. Raises ValueError where one waits already that the learner has not taken."""
        if len(self._batches) > self.capacity:
            raise ValueError(f"the buffer of capacity {self.capacity} is full; take a batch first")
        self._batches.append(batch)

    def take(self, version: int) -> Batch | BatchRef:
        """The oldest batch, for a learner at this policy version. Raises ValueError for one that is too stale."""
        if not self._batches:
            raise ValueError("the buffer is empty; collect a batch first")
        batch = self._batches[0]
        versions = batch["oldest_version"]
        made = versions[versions >= 0]  # -1: not made by any policy
        staleness = version - int(made.min()) if made.numel() else 0
        if staleness > self.max_staleness:
            raise ValueError(
                f"a batch is {staleness} policy versions old, more than max_staleness={self.max_staleness}"
            )
        self._batches.popleft()
        return batch

    def clear(self) -> None:
        """Forget what waits."""
        self._batches.clear()

    def __len__(self) -> int:
        return len(self._batches)
