"""Running sequences as columns, one slot each: a pass is put together by a few gathers, however many sequences run and
whichever came or went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.engines.inplace.host_to_device import Tables
from hybrid_rl.engines.sampling import COLUMNS, SamplingTensors, needs_of, uniform_numbers


class SlotTable:
    """One row per sequence that may run at a time.

    blocks: int32 [S, M], the blocks of its cache in order; last: int64 [S], its newest token, not in the cache yet;
    length: int64 [S], tokens of prompt and completion; generated: int64 [S], tokens of the completion.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.num_slots = num_slots
        self.blocks = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.last = np.zeros(num_slots, dtype=np.int64)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.generated = np.zeros(num_slots, dtype=np.int64)
        self._sampling = {name: np.zeros(num_slots, dtype=dtype) for name, dtype in COLUMNS.items()}
        self._free = list(range(num_slots - 1, -1, -1))

    def widen(self, max_blocks: int) -> bool:
        """Make room for sequences of this many blocks; whether the columns had to move."""
        missing = max_blocks - self.blocks.shape[1]
        if missing > 0:
            self.blocks = np.pad(self.blocks, ((0, 0), (0, missing)))
        return missing > 0

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def take(self, params: SamplingParams, *, length: int, generated: int, last: int) -> int:
        """Assign a slot. length: tokens so far; generated: tokens of the completion; last: id of the newest token."""
        slot = self._free.pop()
        self.length[slot], self.generated[slot], self.last[slot] = length, generated, last
        for name, column in self._sampling.items():
            column[slot] = getattr(params, name)
        return slot

    def release(self, slot: int) -> None:
        """Free a slot."""
        self._free.append(slot)

    def advance(self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Append one token to each of these sequences, of which one may be there several times, in order."""
        self.last[slots] = tokens
        np.add.at(self.length, slots, 1)
        np.add.at(self.generated, slots, 1)

    def sampling(self, slots: npt.NDArray[np.int64], ahead: npt.NDArray[np.int64] | int = 0) -> SlotSampling:
        """Sampling parameters of the next tokens of these sequences. ahead: how many tokens come before each that the
        sequence does not have yet."""
        columns = {name: column[slots] for name, column in self._sampling.items()}
        return SlotSampling(columns, self.generated[slots] + ahead, needs_of(columns))


@dataclass(frozen=True)
class SlotSampling:
    """The COLUMNS of SamplingTensors on the host, the place of each token within its completion, and `needs_of` the
    columns."""

    columns: dict[str, npt.NDArray[Any]]
    generated: npt.NDArray[np.int64]
    needs: Mapping[str, Any]

    @property
    def penalises(self) -> bool:
        """Whether a row has a repetition penalty."""
        return bool(self.needs["penalises"])

    @property
    def is_plain(self) -> bool:
        """Whether logits are used as they are, but for a temperature."""
        return not (self.needs["truncates"] or self.needs["penalises"])

    def uniform(self) -> npt.NDArray[np.float64]:
        """Return the number that picks each token, [B]."""
        uniform = uniform_numbers(torch.from_numpy(self.columns["seed"]), torch.from_numpy(self.generated))
        return uniform.numpy()

    def add_to(self, tables: Tables) -> None:
        """Add the columns to what is sent to a device."""
        for name, column in self.columns.items():
            tables.add(name, column, column.dtype)

    def tensors(self, tables: Tables) -> SamplingTensors:
        """Return the columns that were sent."""
        columns: dict[str, Any] = {name: tables[name] for name in self.columns}
        return SamplingTensors(**columns, **self.needs)
