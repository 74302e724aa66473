"""Proof that engines hold the trainer's weights: each side hashes what it has, using only its own description of it.

The hash of a parameter is the sum over its elements of a function of its name, the element's number in the global
tensor, and the element's bits in the engine's dtype. Sources find the elements by their layout, engines by the trace of
their own loader; the plan is not used. A wrong plan is therefore found just like a corrupted byte, a parameter that was
not written, or one that still has its old value. Engines that hold the same (data-parallel replicas) share one *image*.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Column, Table
from hybrid_rl.resharding.execute import HashedBoxes, hash_pieces, name_seed
from hybrid_rl.resharding.handoff.base import Gather, Parts, PeerError, Source, agree, alone, gathered
from hybrid_rl.resharding.handoff.merged import merged_part
from hybrid_rl.resharding.handoff.message import DTYPES, dtype_code
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.pieces import contiguous_strides
from hybrid_rl.resharding.tiling import check_tiling
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.weights.low_rank import LowRank

Hashes = npt.NDArray[np.int64]
_LISTED = 5  # parameters named in an error


@dataclass(frozen=True)
class _Image(Table):
    """What an engine holds, wherever it is in memory: boxes of global tensors, sorted. source [R]: index in the layout;
    dtype [R]: index in DTYPES; low, high [R, MAX_DIMS]."""

    source: Column
    dtype: Column
    low: Column
    high: Column

    def digest(self) -> str:
        """Return a short hash, equal for engines that hold the same elements in the same dtypes."""
        return hashlib.blake2b(self.content(), digest_size=16).hexdigest()


class Verifier:
    """Comparison of engines with sources, parameter by parameter. Every participant has one.

    trace: what this participant's engine takes. Destinations that it leaves out, such as layers that an engine derives,
    are not compared.
    gather: over all participants. Making a verifier is collective.

    Raises HandoffError if a trace does not write every element once, or takes what the trainer does not have.
    """

    def __init__(self, trace: Trace, layout: SourceLayout, *, gather: Gather = alone) -> None:
        self._trace, self._layout, self._gather = trace, layout, gather
        self._names = [sharded.spec.name for sharded in layout.tensors]
        self._seeds = torch.tensor([name_seed(name) for name in self._names], dtype=torch.int64)
        shape = np.ones((len(self._names), MAX_DIMS), dtype=np.int64)
        for number, sharded in enumerate(layout.tensors):
            shape[number, : sharded.check_dims()] = sharded.spec.shape
        self._strides = contiguous_strides(shape)  # of the global tensors
        self._reading, own = self._of_trace(trace)
        digest = own.digest()
        token = secrets.token_bytes(8)
        answers = gathered(gather, (layout.digest(), digest, token), "what engines hold")
        if len({theirs for theirs, _, _ in answers}) > 1:
            raise PeerError("participants verify different weights: the digests of their layouts differ")
        # The first participant of those with the same image sends its boxes to the others.
        firsts = {theirs: who for _, theirs, who in reversed(answers)}
        images = gathered(gather, own if firsts[digest] == token else None, "what engines hold")
        self.images = [image for image in images if image is not None]
        numbers = {image.digest(): number for number, image in enumerate(self.images)}
        self._image_of = [numbers[theirs] for _, theirs, _ in answers]
        self._boxes: dict[int, list[HashedBoxes]] = {}

    def verify(self, source: Source, destinations: Sequence[Tensor], *, version: int) -> float:
        """Prove that every engine holds the sources' present weights, and return the seconds. Collective.

        destinations: the tensors of this participant's engine, as in its trace. Raises HandoffError on every
        participant, naming the parameters, if an engine does not hold them or participants verify different versions.
        """
        start = time.perf_counter()
        subject = f"the content of policy version {version}"
        answers = agree(self._gather, subject, lambda: (version, self._sides(source, destinations)))
        for number, (theirs, _) in enumerate(answers):
            if theirs != version:
                raise PeerError(f"participant {number} verifies policy version {theirs}, this one verifies {version}")
        self._compare(version, [sides for _, sides in answers])
        return time.perf_counter() - start

    def _sides(self, source: Source, destinations: Sequence[Tensor]) -> tuple[Hashes, Hashes, list[str]]:
        """Return, by image and parameter, the contribution of the parts held here; by parameter, the hash of the engine
        here; and the names of the engine's tensors whose constants differ from those of its loader."""
        expected = np.zeros((len(self.images), len(self._names)), dtype=np.int64)
        for rank, parts in source.held().items():
            if rank not in self._boxes:
                self._boxes[rank] = [self._of_rank(rank, image) for image in self.images]
            for number, boxes in enumerate(self._boxes[rank]):
                expected[number] += self._expected(rank, boxes, parts, source.changes)
        return expected, self._sums(self._reading, destinations), _wrong_constants(self._trace, destinations)

    def _compare(self, version: int, sides: Sequence[tuple[Hashes, Hashes, list[str]]]) -> None:
        expected = np.sum([part for part, _, _ in sides], axis=0)  # wraps around, as intended
        problems = []
        for number, (_, actual, constants) in enumerate(sides):
            differ = np.flatnonzero(actual != expected[self._image_of[number]])
            wrong = [*constants, *(self._names[i] for i in differ)]
            if wrong:
                more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
                problems.append(f"that of participant {number} in {', '.join(wrong[:_LISTED])}{more}")
        if problems:
            raise HandoffError(
                f"engines do not hold the trainer's weights of policy version {version}: {'; '.join(problems)}. "
                f"Nothing may be generated with them; run again, and report it if it happens again"
            )

    # ----------------------------------------------------------------------------------------------- what to hash

    def _of_trace(self, trace: Trace) -> tuple[HashedBoxes, _Image]:
        """Return the boxes that the engine takes, in its memory, and their image."""
        check_tiling(trace)
        copies, parameter = trace.copies, self._layout.numbers_of(trace.sources, trace.copies.source)
        code = np.array([dtype_code(spec.dtype) for spec in trace.destinations], dtype=np.int64)[copies.destination]
        boxes = HashedBoxes(
            tensor=copies.destination,
            offset=copies.offset,
            strides=copies.strides,
            shape=copies.high - copies.low,
            dtype=code,
            parameter=parameter,
            global_offset=(copies.low * self._strides[parameter]).sum(axis=1),
            global_strides=self._strides[parameter],
        )
        order = np.lexsort((*copies.high.T, *copies.low.T, code, parameter))
        return boxes, _Image(parameter, code, copies.low, copies.high).select(order)

    def _of_rank(self, rank: int, image: _Image) -> HashedBoxes:
        """Return the parts of an image in a rank's cells; of several ranks that hold a cell the first one counts."""
        low, high = self._layout.parts(rank)
        answers = [bool((sharded.owners[..., 0] == rank).any()) for sharded in self._layout.tensors]
        high = np.where(np.array(answers, dtype=bool)[:, None], high, low)
        cell_low, cell_high = low[image.source], high[image.source]
        begin, end = np.maximum(image.low, cell_low), np.minimum(image.high, cell_high)
        rows = np.flatnonzero((end > begin).all(axis=1))
        parameter, begin, shape = image.source[rows], begin[rows], (end - begin)[rows]
        strides = contiguous_strides((cell_high - cell_low)[rows])
        return HashedBoxes(
            tensor=parameter,
            offset=((begin - cell_low[rows]) * strides).sum(axis=1),
            strides=strides,
            shape=shape,
            dtype=image.dtype[rows],
            parameter=parameter,
            global_offset=(begin * self._strides[parameter]).sum(axis=1),
            global_strides=self._strides[parameter],
        )

    def _expected(self, rank: int, boxes: HashedBoxes, parts: Parts, changes: Mapping[str, LowRank]) -> Hashes:
        """Return the hash of each parameter over a rank's boxes; what adapters change is changed for it, a part at a
        time."""
        is_adapted = np.array([name in changes for name in self._names], dtype=bool)
        hashes = self._sums(boxes.select(~is_adapted[boxes.parameter]), parts)
        low, high = self._layout.parts(rank)
        for number in np.flatnonzero(is_adapted).tolist():
            change, part = changes[self._names[number]], parts[number]
            mine = boxes.select(boxes.parameter == number)
            box = tuple(map(slice, low[number].tolist(), high[number].tolist()))[: len(change.shape)]
            for code in np.unique(mine.dtype).tolist():
                assert part is not None, "a rank that has boxes of a tensor has a part of it"
                held: list[Tensor | None] = [None] * len(parts)
                held[number] = merged_part(change, part, box, DTYPES[code])
                hashes += self._sums(mine.select(mine.dtype == code), held)
        return hashes

    def _sums(self, boxes: HashedBoxes, tensors: Parts) -> Hashes:
        """Return the hash of each parameter over the boxes, int64 [parameters]."""
        hashes: Hashes = np.zeros(len(self._names), dtype=np.int64)
        devices = {tensor.device for tensor in tensors if tensor is not None}
        for device in devices:
            is_there = np.array([tensor is not None and tensor.device == device for tensor in tensors], dtype=bool)
            rows = boxes if len(devices) == 1 else boxes.select(is_there[boxes.tensor])
            sums = torch.zeros(len(self._names), dtype=torch.int64, device=device)
            hash_pieces(rows, tensors, DTYPES, hashes=sums, seeds=self._seeds)
            hashes += sums.cpu().numpy()
        return hashes


def _wrong_constants(trace: Trace, destinations: Sequence[Tensor]) -> list[str]:
    """Return the names of the destinations whose constants differ from those of their loader."""
    wrong: dict[str, None] = {}
    for number, view, constant in trace.constants(destinations):
        value = torch.full((), constant, dtype=view.dtype, device=view.device)
        if not bool(((view == value) | ((view != view) & (value != value))).all()):
            wrong[trace.destinations[number].name] = None
    return list(wrong)
