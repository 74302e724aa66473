"""Work that ran out of memory is done again in smaller parts, a bounded number of times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")

Rows = Sequence[Sequence[int]]
Cut = list[tuple[int, Sequence[int]]]
Size = Callable[[Sequence[int]], int]

KEY = "optimizer.tokens_per_micro_batch"
# PyTorch's allocator of the host raises no class of its own.
_HOST_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

logger = logging.getLogger("hybrid_rl")


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that memory of a device or of the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _HOST_MESSAGES)


def release_cached() -> None:
    """Give the memory back that PyTorch keeps of a device; call it outside of the `except` block, whose error holds the
    tensors of the work that failed."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Halvings:
    """Micro-batches of one model that get smaller when memory runs out, and stay so.

    is_alone: False if other ranks take part in every pass: they would wait for this one, so an error is raised as it
    is. number: of times that micro-batches were halved so far.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        self.number = 0

    def together(self, compute: Callable[[Cut], Result], micro_batches: Rows, size: Size) -> Result:
        """Compute what micro-batches give together; all of it again, from smaller ones, if memory runs out.

        compute: takes parts of the micro-batches in their order, each with the number of its micro-batch.
        micro_batches: the samples of each; size: counts the tokens of a part. Raises the error, with what to set, if
        parts are single samples.
        """
        while True:
            cut = [(place, part) for place, rows in enumerate(micro_batches) for part in self._parts(rows)]
            try:
                return compute(cut)
            except Exception as error:
                self._admit(error, [part for _, part in cut], size)
            release_cached()

    def each(self, compute: Callable[[Sequence[int]], Result], rows: Sequence[int], size: Size) -> list[Result]:
        """Compute what each part of a micro-batch gives by itself: one part, or smaller ones from where memory ran out.
        Raises as `together` does."""
        results: list[Result] = []
        done = 0
        while not results or done < len(rows):
            part = self._parts(rows[done:], len(rows))[0]
            try:
                results.append(compute(part))
                done += len(part)
                continue
            except Exception as error:
                self._admit(error, [part], size)
            release_cached()
        return results

    def _parts(self, rows: Sequence[int], whole: int | None = None) -> list[Sequence[int]]:
        """Cut samples in parts of neighbours, as large as those of a micro-batch of `whole` of them; None = of all."""
        size = max(1, -(-(len(rows) if whole is None else whole) >> self.number))
        return [rows[start : start + size] for start in range(0, len(rows), size)] or [rows]

    def _admit(self, error: Exception, parts: Rows, size: Size) -> None:
        """Halve, if the error is a shortage and that may help; else raise it."""
        if not is_shortage(error):
            raise error
        tokens = max(map(size, parts))
        if not self._is_alone:
            error.add_note(f"{KEY} makes passes smaller on all ranks; the largest of this rank had {tokens} tokens")
            raise error
        if max(map(len, parts)) <= 1:
            error.add_note(
                f"not even a single sample of {tokens} tokens fits: make prompts or completions shorter, or let "
                "memory.offload, memory.on_host or model.gradient_checkpointing make room"
            )
            raise error
        self.number += 1
        largest = max(size([row]) for part in parts for row in part)
        logger.warning(
            "memory ran out in a pass of up to %d tokens (%s): it is done again in micro-batches of half as many "
            "samples, which give the same gradient, and they stay so. %s=%d would begin with them",
            *(tokens, str(error).split("\n")[0], KEY, max(tokens // 2, largest)),
        )
