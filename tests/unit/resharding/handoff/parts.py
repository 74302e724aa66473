"""A trainer of several ranks and engines of several ranks in one process: shards, traces, and what must come out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Condition
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.extras.plan.traffic import fsdp_layout
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Copies
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from hybrid_rl.resharding.handoff.merged import merge
from hybrid_rl.resharding.handoff.verify import Verifier
from hybrid_rl.resharding.layout import SourceLayout, TensorSpec
from hybrid_rl.resharding.rank_plan import Plan, make_plan
from hybrid_rl.resharding.trace import DestinationSpec, Fills, Trace
from hybrid_rl.weights.low_rank import LowRank
from tests.unit.resharding.cells import cell_of

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (11, 6),
    "k": (4, 6),
    "norm": (6,),
    "out": (6, 8),
    "q": (8, 6),
    "scale": (),
}
WAIT_SECONDS = 60


def globals_of(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Global tensors whose elements all differ, also in bf16."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def layout_of(
    tensors: Mapping[str, Tensor], num_ranks: int, *, replicas: int = 1, hosts: Sequence[str] | None = None
) -> SourceLayout:
    """As FSDP2 shards them."""
    specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    return fsdp_layout(specs, num_ranks, replicas=replicas, hosts=hosts)


def read_bytes_of(plan: Plan) -> tuple[int, int]:
    """Bytes of fp32 shards that a plan reads from its own rank, and from others."""
    sizes = [(bucket.source_rank == plan.rank, 4 * int(bucket.pieces.num_elements.sum())) for bucket in plan.buckets]
    return sum(size for is_own, size in sizes if is_own), sum(size for is_own, size in sizes if not is_own)


def shards_of(layout: SourceLayout, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a rank holds, as tensors of their own."""
    boxes = {sharded.spec.name: cell_of(sharded, rank) for sharded in layout.tensors}
    return {name: tensors[name][box].clone() for name, box in boxes.items() if box is not None}


class Row:
    """One copy of a trace: a box of a source to a box of a destination of its orientation."""

    def __init__(self, source: str, low: Sequence[int], high: Sequence[int], destination: str, at: Sequence[int]):
        self.source, self.low, self.high, self.destination, self.at = source, low, high, destination, at


def trace_of(
    tensors: Mapping[str, Tensor], destinations: Mapping[str, tuple[int, ...]], rows: Sequence[Row], dtype: torch.dtype
) -> Trace:
    """A trace of contiguous destinations."""
    sources = tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items())
    specs = tuple(
        DestinationSpec(name, shape, torch.empty(shape, device="meta").stride(), dtype)
        for name, shape in destinations.items()
    )
    number = {spec.name: i for i, spec in enumerate(sources)}
    target = {spec.name: i for i, spec in enumerate(specs)}

    def padded(values: Sequence[int], fill: int) -> list[int]:
        return [*values, *[fill] * (MAX_DIMS - len(values))]

    strides = {spec.name: spec.strides for spec in specs}
    copies = Copies(
        source=np.array([number[row.source] for row in rows]),
        low=np.array([padded(row.low, 0) for row in rows]),
        high=np.array([padded(row.high, 1) for row in rows]),
        destination=np.array([target[row.destination] for row in rows]),
        offset=np.array([sum(a * s for a, s in zip(row.at, strides[row.destination], strict=True)) for row in rows]),
        strides=np.array([padded(strides[row.destination], 0) for row in rows]),
    )
    nothing, empty = np.zeros(0, dtype=np.int64), np.zeros((0, MAX_DIMS), dtype=np.int64)
    fills = Fills(nothing, nothing, empty, empty, np.zeros(0))
    used = {row.source for row in rows}
    return Trace(sources, specs, copies, fills, {}, tuple(sorted(set(tensors) - used)))


def engine_trace(tensors: Mapping[str, Tensor], part: int, num_parts: int, dtype: torch.dtype) -> Trace:
    """What rank `part` of a tensor-parallel engine takes: q and k fused and split by rows, out by columns, the
    embedding by rows with the last rank's part shorter, the rest whole."""
    rows_q, rows_k, columns = 8 // num_parts, 4 // num_parts, 8 // num_parts
    share = -(-11 // num_parts)
    first, last = part * share, min(11, (part + 1) * share)
    destinations = {
        "qk": (rows_q + rows_k, 6),
        "out": (6, columns),
        "embedding": (last - first, 6),
        "norm": (6,),
        "scale": (),
    }
    rows = [
        Row("q", (part * rows_q, 0), ((part + 1) * rows_q, 6), "qk", (0, 0)),
        Row("k", (part * rows_k, 0), ((part + 1) * rows_k, 6), "qk", (rows_q, 0)),
        Row("out", (0, part * columns), (6, (part + 1) * columns), "out", (0, 0)),
        Row("embedding", (first, 0), (last, 6), "embedding", (0, 0)),
        Row("norm", (0,), (6,), "norm", (0,)),
        Row("scale", (), (), "scale", ()),
    ]
    return trace_of(tensors, destinations, rows, dtype)


def expected(tensors: Mapping[str, Tensor], part: int, num_parts: int, dtype: torch.dtype) -> list[Tensor]:
    """The destinations of `engine_trace`, by plain indexing."""
    q, k = tensors["q"].chunk(num_parts), tensors["k"].chunk(num_parts)
    columns, rows = 8 // num_parts, -(-11 // num_parts)
    whole = [
        torch.cat([q[part], k[part]]),
        tensors["out"][:, part * columns : (part + 1) * columns],
        tensors["embedding"][part * rows : (part + 1) * rows],
        tensors["norm"],
        tensors["scale"],
    ]
    return [tensor.to(dtype) for tensor in whole]


def empty_engine(trace: Trace) -> list[Tensor]:
    """Destinations full of a value that no weight has."""
    return [torch.full(spec.shape, 77.0, dtype=spec.dtype) for spec in trace.destinations]


def is_equal(destinations: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
        for a, b in zip(destinations, wanted, strict=True)
    )


def plan_of(trace: Trace, layout: SourceLayout, rank: int, bucket_bytes: int = 64) -> Plan:
    """Of small buckets, so that there are several."""
    return make_plan(trace, layout, rank, bucket_bytes=bucket_bytes)


def check_versions(results: Sequence[Any], num_parts: int, dtype: torch.dtype) -> None:
    """Each engine, by rank, got its part of every version, whose weights are 1.5 times those before."""
    for rank, versions in enumerate(results):
        assert not isinstance(versions, Exception), versions
        scaled = globals_of()
        for engine in versions:
            scaled = {name: tensor * 1.5 for name, tensor in scaled.items()}
            assert is_equal(engine, expected(scaled, rank % num_parts, num_parts, dtype))


class Rig:
    """One rank of a trainer, whose shards others read in place, and its engine, one of `num_parts` of a replica."""

    def __init__(
        self,
        rank: int,
        gather: Callable[[Any], list[Any]],
        *,
        num_ranks: int,
        num_parts: int,
        dtype: torch.dtype = torch.float32,
        replicas: int = 1,
        changes: Mapping[str, LowRank] | None = None,
    ) -> None:
        tensors = globals_of()
        layout = layout_of(tensors, num_ranks, replicas=replicas)
        self.shards = shards_of(layout, tensors, rank)
        self.source = IpcSource.connect(layout, IpcExport(layout, rank, self.shards), gather)
        self.source.changes = changes or {}
        self.trace = engine_trace(tensors, rank % num_parts, num_parts, dtype)
        self.engine = empty_engine(self.trace)
        self.plan = plan_of(self.trace, layout, rank)
        self.verifier = Verifier(self.trace, layout, gather=gather)

    def hand_over(self, version: int, plan: Plan | None = None) -> None:
        with self.source.opened(version):
            self.source.deliver(plan or self.plan, self.engine)
            merge(self.trace, self.engine, self.source.changes)

    def verify(self, version: int = 1) -> None:
        self.verifier.verify(self.source, self.engine, version=version)


class Room:
    """Participants as threads: `gather` for each of them. One that leaves breaks it for all, as a lost peer does."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = Condition()
        self._rounds: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._is_broken = False

    def gather(self, number: int) -> Callable[[Any], list[Any]]:
        turn = count()

        def gather(value: Any) -> list[Any]:
            values = self._rounds[next(turn)]
            with self._changed:
                values[number] = value
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_broken or len(values) == self._size, WAIT_SECONDS)
            if len(values) < self._size:
                raise RuntimeError("a participant is gone")
            return [values[i] for i in range(self._size)]

        return gather

    def leave(self) -> None:
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()


def run_threads(function: Callable[..., Any], size: int) -> list[Any]:
    """`function(number, gather, leave)` in one thread each; results, or the exceptions raised, in order."""
    room = Room(size)

    def call(number: int) -> Any:
        try:
            return function(number, room.gather(number), room.leave)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))
