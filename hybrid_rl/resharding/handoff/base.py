"""What every source of weights has in common: one verb, whatever lies between trainer and engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError, PeerFailedError
from hybrid_rl.resharding.execute import copy_pieces
from hybrid_rl.resharding.handoff.message import Message, dtype_code
from hybrid_rl.resharding.layout import ShardedTensor, SourceLayout, WeightLayout
from hybrid_rl.resharding.plan import Plan, Run
from hybrid_rl.resharding.tables import Column, Pieces
from hybrid_rl.tensors.boxes import local_tensor

Gather = Callable[[Any], list[Any]]  # the objects of all participants, in a fixed order, on every participant
Parts = Sequence[Tensor | None]  # what one rank holds of each tensor of a layout; None or empty: nothing

LOCAL, PEER, HOST, REMOTE, DISK = "local", "peer", "host", "remote", "disk"


@dataclass(frozen=True)
class HandoffReport:
    """What one handoff did.

    num_bytes: bytes written to the engine; minimum_bytes: what that would be if every element were written once;
    num_tensors: tensors checked or written. link_bytes: bytes that came over each link, as they travelled: in the
    source's dtype if its memory is read in place, in the engine's dtype if it is sent. The links: "local" (memory of
    this rank, or of its own GPU), "peer" (another GPU of the node, read over the link between the two), "host" (another
    process of the node, otherwise), "remote" (another node), "disk". num_pieces, num_buckets: copies, and the launches
    that carried them out. staging_bytes: memory taken in between.
    """

    version: int
    num_bytes: int
    num_tensors: int
    seconds: float
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    num_pieces: int = 0
    num_buckets: int = 0
    staging_bytes: int = 0
    minimum_bytes: int = 0


@dataclass(frozen=True)
class Delivered:
    """What carrying out a plan did on this rank; fields as of HandoffReport."""

    num_bytes: int
    link_bytes: Mapping[str, int]
    num_pieces: int
    num_buckets: int
    staging_bytes: int = 0
    minimum_bytes: int = 0


def alone(value: Any) -> list[Any]:
    """The `Gather` of a single participant."""
    return [value]


class PeerError(HandoffError, PeerFailedError):
    """Another participant failed, is gone, or means another handoff: it is not waited for any more."""


def gathered(gather: Gather, value: Any, what: str) -> list[Any]:
    """`gather(value)`. Raises PeerError, which says over what, where the process group or channel behind it fails."""
    try:
        return gather(value)
    except (RuntimeError, OSError, EOFError) as error:
        raise PeerError(f"a participant is gone, or took too long, over {what}: {error}") from error


class Source(ABC):
    """Weights that an engine can take.

    A handoff is `with source.opened(version): source.deliver(plan, destinations)`, in every participant: trainer ranks
    and, where an engine lives in a process of its own, that one.
    """

    _last_version = -1
    waits_for: torch.device | None = None  # whose work must be done before others read or write; see synchronise

    @abstractmethod
    def layout(self) -> SourceLayout:
        """What weights there are, in the order by which plans number them, and which rank holds which part."""

    @abstractmethod
    def deliver(
        self, plan: Plan, destinations: Sequence[Tensor], *, hashes: Tensor | None = None, seeds: Tensor | None = None
    ) -> Delivered:
        """Carry out this rank's plan: write the engine's tensors, numbered as in the plan.

        hashes, seeds: see copy_pieces; what was read is hashed on the way. Raises HandoffError where that is impossible
        or a peer fails; what has been written by then is undefined.
        """

    @abstractmethod
    def full(self, name: str) -> Tensor:
        """A whole global tensor, for layers that an engine has to load by its own path. Of a source whose parts travel
        by messages this is collective."""

    @abstractmethod
    def held(self) -> Mapping[int, Parts]:
        """The parts that this participant answers for when content is proved: rank of the layout -> its parts."""

    def close(self) -> None:
        """Let go of what was mapped or allocated; idempotent."""
        return

    def gather(self, value: Any) -> list[Any]:
        """The values of all participants; all must call it."""
        return [value]

    def weight_layout(self) -> WeightLayout:
        """Names, shapes and dtypes, ordered by name."""
        specs = (sharded.spec for sharded in self.layout().tensors)
        return WeightLayout(tuple(sorted(specs, key=lambda spec: spec.name)))

    def prepare(self, version: int) -> None:
        """What a participant has to do before others may read. Raises HandoffError where it cannot."""
        if version <= self._last_version:
            raise HandoffError(
                f"policy version {version} was asked for, but version {self._last_version} has been handed over "
                f"already; versions rise"
            )

    @contextmanager
    def opened(self, version: int) -> Iterator[None]:
        """The time in which the weights of a policy version are read. It begins when all participants have theirs ready
        and ends when all are through, so nobody may change a weight inside. Collective.

        Raises HandoffError where participants differ in version or layout; where one fails, it raises its own error and
        all others PeerError.
        """
        failure: Exception | None = None
        try:
            self.prepare(version)
            synchronise(self.waits_for)  # the shards are written before anybody reads them
        except Exception as error:
            failure = error
        self._meet("begin", version, self.layout().digest(), failure)
        try:
            yield
            synchronise(self.waits_for)  # they have been read before anybody writes them again
        except PeerError:
            raise  # the others are not there any more to be told
        except BaseException as error:
            with suppress(HandoffError):
                self._meet("end", version, "", error)
            raise
        self._meet("end", version, "", None)
        self._last_version = version

    def _meet(self, stage: str, version: int, digest: str, failure: BaseException | None) -> None:
        """Wait for all participants at the same point. Raises `failure`, or PeerError for another one's."""
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers = self.tell((stage, version, digest, said))
        if failure is not None:
            raise failure
        for number, (_, _, _, theirs) in enumerate(answers):
            if theirs is not None:
                raise PeerError(f"participant {number} of the handoff of policy version {version} failed: {theirs}")
        mine = (stage, version, digest, None)
        for number, answer in enumerate(answers):
            if answer != mine:
                raise PeerError(
                    f"participants mean different handoffs: here {_words(mine)}, number {number} {_words(answer)}"
                )

    def tell(self, value: tuple[str, int, str, Any]) -> list[Any]:
        """`gather` of (stage, version, digest, anything). Raises PeerError where it fails, or where participants are
        not all at the same stage."""
        answers = gathered(self.gather, value, f"the handoff of policy version {value[1]} ({value[0]})")
        for number, answer in enumerate(answers):
            if answer[0] != value[0]:
                said = answer[3] if isinstance(answer[3], str) else "no failure"
                raise PeerError(
                    f"participant {number} is at {answer[0]!r} of the handoff of policy version {answer[1]}, here it "
                    f"is {value[0]!r} of {value[1]}: {said}"
                )
        return answers


def _words(answer: tuple[Any, ...]) -> str:
    stage, version, digest, _ = answer
    return f"{stage} of policy version {version}" + (f" with layout {digest}" if digest else "")


def read_bytes(run: Run, parts: Parts) -> int:
    """Bytes of what a run reads, in the dtypes of the parts."""
    return _bytes_of(run.pieces.source, run, parts)


def written_bytes(run: Run, destinations: Parts) -> int:
    """Bytes of what a run writes, in the dtypes of the engine's tensors."""
    return _bytes_of(run.pieces.destination, run, destinations)


def _bytes_of(index: Column, run: Run, tensors: Parts) -> int:
    sizes = np.array([0 if tensor is None else tensor.itemsize for tensor in tensors], dtype=np.int64)
    return int((run.pieces.num_elements * sizes[index]).sum())


def pull(
    plan: Plan,
    parts: Callable[[int], Parts],
    destinations: Sequence[Tensor],
    link: Callable[[int], str],
    hashes: Tensor | None,
    seeds: Tensor | None,
) -> Delivered:
    """Carry out a plan whose sources this process can read where they lie: `parts(rank)`."""
    link_bytes: Counter[str] = Counter()
    num_launches = staging_bytes = 0
    for run in plan.runs:
        held = parts(run.source_rank)
        launches, staged = copy_run(run, held, destinations, hashes, seeds)
        num_launches, staging_bytes = num_launches + launches, max(staging_bytes, staged)
        link_bytes[link(run.source_rank)] += read_bytes(run, held)
    return Delivered(
        num_bytes=sum(written_bytes(run, destinations) for run in plan.runs),
        link_bytes=dict(link_bytes),
        num_pieces=sum(len(run.pieces) for run in plan.runs),
        num_buckets=num_launches,
        staging_bytes=staging_bytes,
        minimum_bytes=plan.report.minimum.written_bytes,
    )


def copy_run(
    run: Run, held: Parts, destinations: Sequence[Tensor], hashes: Tensor | None, seeds: Tensor | None
) -> tuple[int, int]:
    """Copy all that comes from one rank, whose parts this process can read: in one launch on the device of the engine's
    tensors, whatever is cast and however it lies.

    Only what lies on another device than these is staged, bucket by bucket: cast where it lies, sent over as one, and
    unpacked. That is so for shards in host memory and an engine on a GPU. Returns launches, and the bytes staged at
    most at a time.
    """
    groups = by_device(run.pieces, held, destinations)
    if any(_crosses(pieces, held, destinations) for pieces in groups):
        groups = [group for bucket in run.buckets for group in by_device(bucket.pieces, held, destinations)]
    staging_bytes = 0
    for pieces in groups:
        if not _crosses(pieces, held, destinations):
            copy_pieces(pieces, held, destinations, hashes=hashes, seeds=seeds)
            continue
        source, target = held[pieces.source[0]], destinations[pieces.destination[0]]
        assert source is not None
        message = Message.of(pieces, np.array([dtype_code(t.dtype) for t in destinations])[pieces.destination])
        staging = torch.empty(message.num_bytes, dtype=torch.uint8, device=source.device)
        message.pack(held, staging)
        message.unpack(staging.to(target.device), destinations, hashes, seeds)
        staging_bytes = max(staging_bytes, 2 * message.num_bytes)
    return len(groups), staging_bytes


def _crosses(pieces: Pieces, held: Parts, destinations: Sequence[Tensor]) -> bool:
    """Whether pieces of one pair of devices lead from one to another; what is not held at all, copy_pieces reports."""
    source = held[pieces.source[0]]
    return source is not None and source.device != destinations[pieces.destination[0]].device


def by_device(pieces: Pieces, sources: Parts, destinations: Sequence[Tensor]) -> list[Pieces]:
    """The pieces, apart for each pair of devices that they lead from and to."""
    read, row = np.unique(pieces.source, return_inverse=True)
    written, column = np.unique(pieces.destination, return_inverse=True)
    held = [sources[i] for i in read.tolist()]
    froms = [None if tensor is None else tensor.device for tensor in held]
    tos = [destinations[i].device for i in written.tolist()]
    devices = {device: number for number, device in enumerate(dict.fromkeys([*froms, *tos]))}
    if len(devices) <= 1:
        return [pieces] if len(pieces) else []
    pairs = np.array([devices[d] for d in froms])[row.ravel()] * len(devices)
    pairs += np.array([devices[d] for d in tos])[column.ravel()]
    return [pieces.select(np.flatnonzero(pairs == pair)) for pair in np.unique(pairs)]


def link_between(hosts: Sequence[str], rank: int | None, host: str) -> Callable[[int], str]:
    """The link from a source rank to `rank`, which lives on `host`; None: a process that is none of the ranks."""
    return lambda source: LOCAL if source == rank else HOST if hosts[source] == host else REMOTE


def number_of(layout: SourceLayout, name: str) -> int:
    """The number of a tensor in a layout. Raises HandoffError where it has none of this name."""
    for number, sharded in enumerate(layout.tensors):
        if sharded.spec.name == name:
            return number
    raise HandoffError(f"the trainer has no weight {name!r}; it has {len(layout.tensors)} others")


def cells(sharded: ShardedTensor) -> Iterator[tuple[tuple[slice, ...], Sequence[int]]]:
    """The cells of a tensor: the box of each, and the ranks that hold it."""
    for cell in np.ndindex(sharded.owners.shape[:-1]):
        box = tuple(slice(cuts[at], cuts[at + 1]) for cuts, at in zip(sharded.cuts, cell, strict=True))
        yield box, sharded.owners[cell].tolist()


def assembled(layout: SourceLayout, name: str, parts: Callable[[int], Parts], device: torch.device) -> Tensor:
    """A whole tensor from parts that this process can read."""
    number = number_of(layout, name)
    sharded = layout.tensors[number]
    full = torch.empty(sharded.spec.shape, dtype=sharded.spec.dtype, device=device)
    for box, owners in cells(sharded):
        part = parts(owners[0])[number]
        if part is None:
            raise HandoffError(f"rank {owners[0]} holds nothing of {name!r}, though the layout gives it {box}")
        full[box] = part.reshape(full[box].shape)
    return full


def local_parts(layout: SourceLayout, rank: int, tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
    """What a rank holds of each tensor of a layout, from plain tensors and DTensors by name.

    Raises HandoffError where a tensor is missing or is not what the layout says.
    """
    found: list[Tensor | None] = []
    low, high = layout.parts(rank)
    for sharded, extents in zip(layout.tensors, (high - low).tolist(), strict=True):
        name, shape = sharded.spec.name, tuple(extents[: len(sharded.spec.shape)])
        if 0 in extents:
            found.append(None)
            continue
        if name not in tensors:
            raise HandoffError(
                f"rank {rank} has no {name!r}, of which the layout gives it a part; hand over all weights"
            )
        part = local_tensor(tensors[name])
        if (tuple(part.shape), part.dtype) != (shape, sharded.spec.dtype):
            raise HandoffError(
                f"rank {rank} holds {part.dtype} {list(part.shape)} of {name!r}, where the layout says "
                f"{sharded.spec.dtype} {list(shape)}; make the layout from these weights"
            )
        found.append(part)
    return found


def synchronise(device: torch.device | None = None) -> None:
    """Wait for what this process has started on a GPU, on any stream: others may read, or write, when it says so.

    device: the GPU; the current one if it is None or none.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize(device if device is not None and device.type == "cuda" else None)
