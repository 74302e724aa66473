"""Memory that can sleep and wake at the same address, so that pointers into it stay valid: the test engine's."""

from __future__ import annotations

from typing import Literal

import psutil
import torch
from torch import Tensor

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.region import Region

SleepPolicy = Literal["discard", "offload"]


class SleepingRegion(Region):
    """A region whose memory is released and returned together.

    It starts awake. Nothing can stop a tensor from being used while its region sleeps (it reads zeros), but such a use
    takes pages, which `wake` detects.

    capacity_bytes: None = the machine's memory.
    """

    def __init__(self, tag: str, *, capacity_bytes: int | None = None) -> None:
        total = psutil.virtual_memory().total if capacity_bytes is None else capacity_bytes
        super().__init__(tag, capacity_bytes=total)
        self._asleep = False
        self._saved: bytes | None = None

    @property
    def is_asleep(self) -> bool:
        """Whether its memory has been released."""
        return self._asleep

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As Region does, at an address that is kept across sleep and wake. Raises MemoryStateError while asleep."""
        self._require_open("allocated from")
        if self._asleep:
            raise MemoryStateError(f"region {self.tag!r} is asleep; wake it before allocating")
        return super().allocate(shape, dtype)

    def sleep(self, policy: SleepPolicy) -> None:
        """Release the memory. discard: the content is lost and reads zero after `wake`. offload: it returns with
        `wake`; on a CPU the copy takes as much memory as it frees, so there it exercises the code but saves nothing.

        Raises MemoryStateError while asleep, or if the system refuses; with offload everything is then unchanged.
        """
        self._require_open("put to sleep")
        if self._asleep:
            raise MemoryStateError(f"region {self.tag!r} is already asleep; wake it first")
        if policy not in ("discard", "offload"):
            raise ValueError(f"policy={policy!r} of region {self.tag!r} must be discard or offload")
        try:
            saved = self._mapping[: self._num_bytes] if policy == "offload" else None
        except MemoryError as error:
            raise MemoryStateError(
                f"region {self.tag!r}: no memory for a copy of its {self._num_bytes} bytes; it stays awake"
            ) from error
        try:
            self._release_pages()
        except OSError as error:
            if saved is None:
                raise MemoryStateError(
                    f"region {self.tag!r}: its pages could not be released ({error}); its content is undefined"
                ) from error
            self._mapping[: self._num_bytes] = saved
            raise MemoryStateError(
                f"region {self.tag!r}: its pages could not be released ({error}); it stays awake with its content"
            ) from error
        self._saved = saved
        self._asleep = True

    def wake(self) -> None:
        """Restore the memory at the same address: the saved content after offload, zeros after discard.

        Raises MemoryStateError while awake, and (once; it can then be woken) if it was used while asleep.
        """
        self._require_open("woken")
        if not self._asleep:
            raise MemoryStateError(f"region {self.tag!r} is already awake; put it to sleep first")
        if touched := self.occupied_bytes:
            self._release_pages()
            raise MemoryStateError(
                f"region {self.tag!r} was used while it slept and takes {touched} bytes: reads gave zeros, and writes "
                f"are lost; lease it wherever it is used"
            )
        if self._saved is not None:
            self._mapping[: self._num_bytes] = self._saved
            self._saved = None
        self._asleep = False

    def close(self) -> None:
        super().close()
        self._saved = None
