"""What the engine knows of each running sequence, as columns: a pass is put together by a few gathers, however many
sequences run and whichever came or went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.engines.inplace.upload import Tables
from hybrid_rl.engines.sampling import SamplingTensors, uniform_numbers

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

    def sampling(self, seats: npt.NDArray[np.int64]) -> SeatSampling:
        """How the next tokens of these sequences are chosen."""
        columns = {name: column[seats] for name, column in self._sampling.items()}
        truncates = (columns["top_k"] > 0) | (columns["top_p"] < 1) | (columns["min_p"] > 0)
        return SeatSampling(
            columns,
            self.generated[seats],
            truncates=bool(truncates.any()),
            greedy=bool((columns["temperature"] == 0).any()),
            penalises=bool((columns["repetition_penalty"] != 1).any()),
        )


@dataclass(frozen=True)
class SeatSampling:
    """The columns of SamplingTensors on the host, by name, and the place of each token within its completion."""

    columns: dict[str, npt.NDArray[Any]]
    generated: npt.NDArray[np.int64]
    truncates: bool
    greedy: bool
    penalises: bool

    @property
    def is_plain(self) -> bool:
        """Whether logits are used as they are, but for a temperature."""
        return not self.truncates and not self.penalises

    def uniform(self) -> npt.NDArray[np.float64]:
        """The number that picks each token, [B]."""
        uniform = uniform_numbers(torch.from_numpy(self.columns["seed"]), torch.from_numpy(self.generated))
        return uniform.numpy()

    def add_to(self, tables: Tables) -> None:
        """Add the columns to what is sent to a device."""
        for name, column in self.columns.items():
            tables.add(name, column, column.dtype)

    def tensors(self, tables: Tables) -> SamplingTensors:
        """The columns that were sent."""
        columns: dict[str, Any] = {name: tables[name] for name in self.columns}
        return SamplingTensors(**columns, truncates=self.truncates, greedy=self.greedy, penalises=self.penalises)
