"""What the engine knows of each running sequence, as columns: a pass is put together by a few gathers, however many
sequences run and whichever came or went."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.rollout.base import SamplingParams
from hybrid_rl.rollout.inplace.upload import upload
from hybrid_rl.rollout.sampling import SamplingTensors

_SAMPLING = {
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "seed": np.int64,
}


class SeatTable:
    """One row per sequence that may run at a time.

    blocks: int32 [S, M], the blocks of its cache in order; last: int64 [S], its newest token, not in the cache yet;
    length: int64 [S], tokens of prompt and completion; generated: int64 [S], tokens of the completion.
    """

    def __init__(self, num_seats: int, max_blocks: int) -> None:
        self.num_seats = num_seats
        self.blocks = np.zeros((num_seats, max_blocks), dtype=np.int32)
        self.last = np.zeros(num_seats, dtype=np.int64)
        self.length = np.zeros(num_seats, dtype=np.int64)
        self.generated = np.zeros(num_seats, dtype=np.int64)
        self._sampling = {name: np.zeros(num_seats, dtype=dtype) for name, dtype in _SAMPLING.items()}
        self._free = list(range(num_seats - 1, -1, -1))

    def widen(self, max_blocks: int) -> None:
        """Make room for sequences of this many blocks."""
        missing = max_blocks - self.blocks.shape[1]
        if missing > 0:
            self.blocks = np.pad(self.blocks, ((0, 0), (0, missing)))

    @property
    def num_free(self) -> int:
        """Seats that nobody has."""
        return len(self._free)

    def take(self, params: SamplingParams, *, length: int, generated: int, last: int) -> int:
        """A seat for a sequence of `length` tokens, `generated` of them its own, the newest of them `last`."""
        seat = self._free.pop()
        self.length[seat], self.generated[seat], self.last[seat] = length, generated, last
        for name, column in self._sampling.items():
            column[seat] = getattr(params, name)
        return seat

    def release(self, seat: int) -> None:
        """The seat is free again."""
        self._free.append(seat)

    def advance(self, seats: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Each of these sequences has one more token."""
        self.last[seats] = tokens
        self.length[seats] += 1
        self.generated[seats] += 1

    def sampling(self, seats: npt.NDArray[np.int64], device: torch.device) -> SamplingTensors:
        """How the next tokens of these sequences are chosen."""
        rows = {name: column[seats] for name, column in self._sampling.items()}
        truncates = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
        tensors: dict[str, Tensor] = {name: upload(row, device, row.dtype) for name, row in rows.items()}
        return SamplingTensors(
            **tensors,
            truncates=bool(truncates.any()),
            greedy=bool((rows["temperature"] == 0).any()),
            penalises=bool((rows["repetition_penalty"] != 1).any()),
        )
