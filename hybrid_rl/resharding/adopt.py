"""Shared memory of trainer and engine: the trainer's tensors as views of the engine's, if only their place differs.

An engine fuses what a model keeps apart (query, key and value; gate and up), one below the other. Each part is a
contiguous range of the fused tensor, so the trainer's tensor can live there, and a handoff then copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.pieces import contiguous_strides
from hybrid_rl.resharding.trace import Trace


def adopted_views(trace: Trace, destinations: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return for each source that the engine takes the view of the engine's memory that holds all of it.

    Raises HandoffError, naming them, if sources are stored differently: in another dtype, in several ranges, more than
    once, transposed, or derived by the engine.
    """
    if trace.untraced:
        raise HandoffError(
            f"the engine rearranges {len(trace.untraced)} of its tensors, e.g. {min(trace.untraced)}; their "
            "memory cannot be shared with the trainer's: leave handoff.adopt_weights out, or set "
            "engine_args.plain_weights=true"
        )
    views: dict[str, Tensor] = {}
    problems: dict[str, str] = {}
    for number, spec in enumerate(trace.sources):
        rows = np.flatnonzero(trace.copies.source == number)
        if not len(rows):
            continue
        copies = trace.copies.select(rows[:1])
        target = destinations[int(copies.destination[0])]
        shape = copies.high - copies.low
        dims = len(spec.shape)
        moving = shape[0] > 1  # a dim of one element has no stride that counts
        if len(rows) > 1 or tuple(shape[0, :dims].tolist()) != spec.shape:
            problems[spec.name] = f"is stored in {len(rows)} separate ranges"
        elif target.dtype != spec.dtype:
            problems[spec.name] = f"is {spec.dtype} in the trainer, {target.dtype} in the engine"
        elif not np.array_equal(copies.strides[0][moving], contiguous_strides(shape)[0][moving]):
            problems[spec.name] = "is laid out in another order"
        else:
            first = target.storage_offset() + int(copies.offset[0])
            views[spec.name] = target.as_strided(spec.shape, contiguous_strides(shape)[0, :dims].tolist(), first)
    if problems:
        name, problem = next(iter(problems.items()))
        raise HandoffError(
            f"{len(problems)} weights cannot share the engine's memory, e.g. {name}, which {problem}; leave "
            f"adopt_weights out"
        )
    return views


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common if they are the same memory, read in the same way."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device


def check_adopted(tensors: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> None:
    """Prove that the trainer's tensors are the engine's memory. Raises HandoffError for one that no longer is."""
    for name, view in views.items():
        mine, theirs = place_of(view), place_of(tensors[name])
        if mine != theirs:
            raise HandoffError(
                f"weight {name!r} is not in the memory that trainer and engine share: engine {mine}, trainer {theirs}; "
                f"parameters must not be rebound after the Trainer was made"
            )
