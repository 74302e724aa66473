"""Work that ran out of memory is done again in smaller parts, a bounded number of times."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

Result = TypeVar("Result")

Rows = Sequence[Sequence[int]]
Cut = list[tuple[int, Sequence[int]]]
Size = Callable[[Sequence[int]], int]

KEY = "optimizer.tokens_per_micro_batch"
# The attribute of a shortage that smaller micro-batches of all ranks may help. It is pickled with the error.
_PASS_TOKENS = "_pass_tokens"
# PyTorch's allocator of the host raises no class of its own.
_HOST_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

logger = logging.getLogger("hybrid_rl")


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that memory of a device or of the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _HOST_MESSAGES)


def pass_tokens(error: BaseException | None) -> int | None:
    """Return the tokens of the largest pass of a rank among others that ran out of memory with this error, or with one
    that it comes from; None for other errors, and for passes of single samples, which cannot be smaller."""
    while error is not None:
        if _PASS_TOKENS in vars(error):
            return int(vars(error)[_PASS_TOKENS])
        error = error.__cause__
    return None


def release_cached() -> None:
    """Give the memory back that PyTorch keeps of a device; call it outside of the `except` block, whose error holds the
    tensors of the work that failed."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Halvings:
    """Micro-batches of one model that get smaller when memory runs out, and stay so.

    is_alone: False if other ranks take part in every pass: they would wait for this one, so an error is raised as it
    is, with what `pass_tokens` reads. number: of times that micro-batches were halved so far.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        self.number = 0

    def attempts(self, micro_batches: Rows, size: Size) -> Iterator[Attempt]:
        """Yield blocks for the work that micro-batches give together: one, and another with smaller parts, from the
        start, whenever memory runs out in the one before. Blocks, not calls, of which a debugger would show frames.

        micro_batches: the samples of each; size: counts the tokens of a part. A block raises the error, with what to
        set, if parts are single samples.
        """
        while True:
            cut = [(place, part) for place, rows in enumerate(micro_batches) for part in self._parts(rows)]
            attempt = Attempt(cut, partial(self._halves, parts=[part for _, part in cut], size=size))
            yield attempt
            if not attempt.is_broken_off:
                return
            release_cached()

    def each(self, compute: Callable[[Sequence[int]], Result], rows: Sequence[int], size: Size) -> list[Result]:
        """Compute what each part of a micro-batch gives by itself: one part, or smaller ones from where memory ran out.
        Raises as blocks of `attempts` do."""
        results: list[Result] = []
        done = 0
        while not results or done < len(rows):
            part = self._parts(rows[done:], len(rows))[0]
            try:
                results.append(compute(part))
                done += len(part)
                continue
            except Exception as error:
                if not self._halves(error, [part], size):
                    raise
            release_cached()
        return results

    def _parts(self, rows: Sequence[int], whole: int | None = None) -> list[Sequence[int]]:
        """Cut samples in parts of neighbours, as large as those of a micro-batch of `whole` of them; None = of all."""
        size = max(1, -(-(len(rows) if whole is None else whole) >> self.number))
        return [rows[start : start + size] for start in range(0, len(rows), size)] or [rows]

    def _halves(self, error: BaseException, parts: Rows, size: Size) -> bool:
        """Halve, if the error is a shortage and that may help; else say in the error what may."""
        if not is_shortage(error):
            return False
        tokens = max(map(size, parts))
        if max(map(len, parts)) <= 1:
            error.add_note(
                f"not even a single sample of {tokens} tokens fits: make prompts or completions shorter, or let "
                "memory.offload, memory.on_host or model.gradient_checkpointing make room"
            )
            return False
        if not self._is_alone:
            vars(error)[_PASS_TOKENS] = tokens
            error.add_note(f"{KEY} makes passes smaller on all ranks; the largest of this rank had {tokens} tokens")
            return False
        self.number += 1
        largest = max(size([row]) for part in parts for row in part)
        logger.warning(
            "memory ran out in a pass of up to %d tokens (%s): it is done again in micro-batches of half as many "
            "samples, which give the same gradient, and they stay so. %s=%d would begin with them",
            *(tokens, str(error).split("\n")[0], KEY, max(tokens // 2, largest)),
        )
        return True


class Attempt(contextlib.AbstractContextManager[Cut]):
    """A block of work with parts of micro-batches, in their order, each with the number of its micro-batch.

    halves: says of an error whether the work is to be done again. is_broken_off: whether it is."""

    def __init__(self, cut: Cut, halves: Callable[[BaseException], bool]) -> None:
        self._cut, self._halves = cut, halves
        self.is_broken_off = False

    def __enter__(self) -> Cut:
        return self._cut

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self.is_broken_off = error is not None and self._halves(error)
        return self.is_broken_off
