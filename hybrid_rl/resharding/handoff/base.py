"""The interface of all sources of weights, whatever connects trainer and engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError, PeerFailedError
from hybrid_rl.resharding.copy_tables import Column, Pieces
from hybrid_rl.resharding.execute import copy_pieces
from hybrid_rl.resharding.folders import ElsewhereError, agreed
from hybrid_rl.resharding.handoff.message import Message, dtype_code
from hybrid_rl.resharding.layout import ShardedTensor, SourceLayout
from hybrid_rl.resharding.rank_plan import Plan, RankShare
from hybrid_rl.weights.boxes import local_tensor
from hybrid_rl.weights.low_rank import LowRank

Gather = Callable[[Any], list[Any]]  # from one object per participant to those of all, in a fixed order
Parts = Sequence[Tensor | None]  # one rank's part of each tensor of a layout; None or empty: nothing

PROBE_TOKENS = 4  # of the probe of a handoff: trainer and engine continue a prompt by so many

LOCAL, PEER, HOST, REMOTE, DISK = "local", "peer", "host", "remote", "disk"


def num_probe_passes(dtype: torch.dtype, *, is_rounded: bool = False) -> int:
    """Return how often the trainer computes its half of a probe: once more in 16 bits, for its own noise, and once more
    if the engine rounds its weights, or keys and values, for what that does."""
    return 1 + (dtype.itemsize < 4) + is_rounded


@dataclass(frozen=True)
class Delivered:
    """The execution of a plan on this rank.

    num_bytes: bytes written to the engine.
    link_bytes: bytes that came over each link, as they travelled: in the source's dtype if its memory is read in place,
    in the engine's dtype if it is sent. The links: "local" (memory of this rank, or of its own GPU), "peer" (another
    GPU of the node, read over the link between the two), "host" (another process of the node, otherwise), "remote"
    (another node), "disk".
    num_pieces, num_buckets: copies, and the launches that executed them.
    staging_bytes: temporary memory, at most at a time.
    minimum_bytes: what num_bytes would be if every element were written once.
    """

    num_bytes: int
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    num_pieces: int = 0
    num_buckets: int = 0
    staging_bytes: int = 0
    minimum_bytes: int = 0

    @classmethod
    def of(
        cls, plan: Plan, destinations: Sequence[Tensor], link_bytes: Mapping[str, int], num_buckets: int, staging: int
    ) -> Delivered:
        """Describe the execution of all of a plan. staging: bytes."""
        num_bytes = sum(written_bytes(share, destinations) for share in plan.shares)
        num_pieces = sum(len(share.pieces) for share in plan.shares)
        return cls(num_bytes, dict(link_bytes), num_pieces, num_buckets, staging, plan.minimum_bytes)


@dataclass(frozen=True, kw_only=True)
class HandoffReport(Delivered):
    """The record of one handoff. num_tensors: tensors checked or written."""

    version: int
    num_tensors: int
    seconds: float


def alone(value: Any) -> list[Any]:
    """Gather the value of a single participant."""
    return [value]


class PeerError(HandoffError, PeerFailedError):
    """Another participant failed, is gone, or is in a different handoff: it is no longer waited for."""


def gathered(gather: Gather, value: Any, what: str) -> list[Any]:
    """Return `gather(value)`. Raises PeerError, naming `what`, if its process group or channel fails."""
    try:
        return gather(value)
    except (RuntimeError, OSError, EOFError) as error:
        raise PeerError(f"a participant is gone, or took too long, over {what}: {error}") from error


def agree(gather: Gather, what: str, action: Callable[[], Any]) -> list[Any]:
    """Run an action on every participant and return the results. If it raises on one, that one raises its own error,
    and all others PeerError, naming `what`."""
    try:
        return agreed(lambda value: gathered(gather, value, what), action)
    except ElsewhereError as error:
        raise PeerError(f"another participant failed over {what}: {error}") from None


class Source(ABC):
    """Weights that an engine can take.

    A handoff is `with source.opened(version): source.deliver(plan, destinations)` in every participant: all trainer
    ranks and, if an engine has its own process, that one.
    """

    _layout: SourceLayout
    gather: Gather = staticmethod(alone)  # the values of all participants; all must call it
    _last_version = -1
    changes: Mapping[str, LowRank] = MappingProxyType({})  # what adapters add to tensors; set before each handoff
    adapters: Mapping[str, LowRank] = MappingProxyType({})  # the same, for engines that add them by themselves
    waits_for: torch.device | None = None  # device whose work must be done before others read or write; see synchronise

    def layout(self) -> SourceLayout:
        """Return the weights, in the order by which plans number them, and the ranks of their parts."""
        return self._layout

    @abstractmethod
    def deliver(self, plan: Plan, destinations: Sequence[Tensor]) -> Delivered:
        """Execute this rank's plan: write the engine's tensors, numbered as in the plan.

        Raises HandoffError if that is impossible or a peer fails; the content of the engine is then undefined.
        """

    @abstractmethod
    def full(self, name: str) -> Tensor:
        """Return a whole global tensor, for layers that an engine has to load by itself. Collective if the
        source sends messages."""

    @abstractmethod
    def held(self) -> Mapping[int, Parts]:
        """Return the parts that this participant represents when content is proved: rank of the layout -> its parts."""

    def close(self) -> None:
        """Release what was mapped or allocated; idempotent."""
        return

    def prepare(self, version: int) -> None:
        """Do what a participant must do before others may read. Raises HandoffError if it cannot."""
        if version <= self._last_version:
            raise HandoffError(
                f"policy version {version} was requested, but version {self._last_version} has already been handed "
                f"over; versions must increase"
            )

    @contextmanager
    def opened(self, version: int) -> Iterator[None]:
        """Open the weights of a policy version for reading. The block begins when all participants are ready and ends
        when all are done, so no weight may be changed inside it. Collective.

        Raises HandoffError if participants differ in version or layout; if one fails, it raises its own error and all
        others raise PeerError.
        """
        failure: Exception | None = None
        try:
            self.prepare(version)
            synchronise(self.waits_for)  # the shards must be written before anyone reads them
        except Exception as error:
            failure = error
        self._meet("begin", version, self.layout().digest(), failure)
        try:
            yield
            synchronise(self.waits_for)  # they must be read before anyone writes them again
        except PeerError:
            raise  # the others are gone and cannot be informed
        except BaseException as error:
            with suppress(HandoffError):
                self._meet("end", version, "", error)
            raise
        self._meet("end", version, "", None)
        self._last_version = version

    def _meet(self, stage: str, version: int, digest: str, failure: BaseException | None) -> None:
        """Wait for all participants at the same point. Raises `failure`, or PeerError for another participant's."""
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
                    f"participants are in different handoffs: {_words(mine)} here, {_words(answer)} at participant "
                    f"{number}"
                )

    def tell(self, value: tuple[str, int, str, Any]) -> list[Any]:
        """Return `gather` of (stage, version, digest, anything). Raises PeerError if it fails, or if participants are
        not all at the same stage."""
        answers = gathered(self.gather, value, f"the handoff of policy version {value[1]} ({value[0]})")
        for number, answer in enumerate(answers):
            if answer[0] != value[0]:
                said = answer[3] if isinstance(answer[3], str) else "no failure"
                raise PeerError(
                    f"participant {number} is at {answer[0]!r} of the handoff of policy version {answer[1]}, this one "
                    f"at {value[0]!r} of {value[1]}: {said}"
                )
        return answers


def _words(answer: tuple[Any, ...]) -> str:
    stage, version, digest, _ = answer
    return f"{stage} of policy version {version}" + (f" with layout {digest}" if digest else "")


def written_bytes(share: RankShare, destinations: Parts) -> int:
    """Count the bytes that a share of a plan writes, in the dtypes of the engine's tensors."""
    return _bytes_of(share.pieces.destination, share, destinations)


def _bytes_of(index: Column, share: RankShare, tensors: Parts) -> int:
    sizes = np.array([0 if tensor is None else tensor.itemsize for tensor in tensors], dtype=np.int64)
    return int((share.pieces.num_elements * sizes[index]).sum())


def copy_shares(
    shares: Iterable[RankShare],
    parts: Callable[[int], Parts],
    destinations: Sequence[Tensor],
    link: Callable[[int], str],
) -> tuple[Counter[str], int, int]:
    """Copy shares of a plan in place. Return bytes by link, the number of launches, and the most bytes staged at a
    time."""
    link_bytes: Counter[str] = Counter()
    num_launches = staging_bytes = 0
    for share in shares:
        held = parts(share.source_rank)
        groups = _launches(share, held, destinations)
        for pieces in groups:
            if _crosses(pieces, held, destinations):
                staging_bytes = max(staging_bytes, _copy_staged(pieces, held, destinations))
            else:
                copy_pieces(pieces, held, destinations)
        num_launches += len(groups)
        link_bytes[link(share.source_rank)] += _bytes_of(share.pieces.source, share, held)
    return link_bytes, num_launches, staging_bytes


def _launches(share: RankShare, held: Parts, destinations: Sequence[Tensor]) -> list[Pieces]:
    """Return what to copy from one rank whose parts this process can read, by launch: all in one on the device of the
    engine's tensors, whatever the dtypes and strides; bucket by bucket if parts are on another device."""
    groups = by_device(share.pieces, held, destinations)
    if any(_crosses(pieces, held, destinations) for pieces in groups):
        return [group for bucket in share.buckets for group in by_device(bucket.pieces, held, destinations)]
    return groups


def _copy_staged(pieces: Pieces, held: Parts, destinations: Sequence[Tensor]) -> int:
    """Copy parts to another device: cast where they are, sent as one, and unpacked. That is the case for shards in host
    memory and an engine on a GPU. Returns the bytes staged."""
    source, target = held[pieces.source[0]], destinations[pieces.destination[0]]
    assert source is not None
    message = Message.of(pieces, np.array([dtype_code(t.dtype) for t in destinations])[pieces.destination])
    staging = torch.empty(message.num_bytes, dtype=torch.uint8, device=source.device)
    message.pack(held, staging)
    message.unpack(staging.to(target.device), destinations)
    return 2 * message.num_bytes


def _crosses(pieces: Pieces, held: Parts, destinations: Sequence[Tensor]) -> bool:
    """Whether pieces, all of one pair of devices, cross devices. A missing part is reported by copy_pieces."""
    source = held[pieces.source[0]]
    return source is not None and source.device != destinations[pieces.destination[0]].device


def by_device(pieces: Pieces, sources: Parts, destinations: Sequence[Tensor]) -> list[Pieces]:
    """Split pieces by the pair of devices that they go from and to."""
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


def number_of(layout: SourceLayout, name: str) -> int:
    """Return the number of a tensor in a layout. Raises HandoffError if it has none of this name."""
    for number, sharded in enumerate(layout.tensors):
        if sharded.spec.name == name:
            return number
    raise HandoffError(f"the trainer has no weight {name!r}; it has {len(layout.tensors)} others")


def cells(sharded: ShardedTensor) -> Iterator[tuple[tuple[slice, ...], Sequence[int]]]:
    """Yield the cells of a tensor: the box of each, and the ranks that hold it."""
    for cell in np.ndindex(sharded.owners.shape[:-1]):
        box = tuple(slice(cuts[at], cuts[at + 1]) for cuts, at in zip(sharded.cuts, cell, strict=True))
        yield box, sharded.owners[cell].tolist()


def assembled(layout: SourceLayout, name: str, parts: Callable[[int], Parts], device: torch.device) -> Tensor:
    """Assemble a whole tensor from parts that this process can read."""
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
    """Return a rank's part of each tensor of a layout, from plain tensors and DTensors by name.

    Raises HandoffError if a tensor is missing or differs from the layout.
    """
    parts: list[Tensor | None] = []
    low, high = layout.parts(rank)
    for sharded, extents in zip(layout.tensors, (high - low).tolist(), strict=True):
        name, shape = sharded.spec.name, tuple(extents[: len(sharded.spec.shape)])
        if 0 in extents:
            parts.append(None)
            continue
        if name not in tensors:
            raise HandoffError(
                f"rank {rank} has no {name!r}, of which the layout gives it a part; hand over all weights"
            )
        part = local_tensor(tensors[name])
        if (tuple(part.shape), part.dtype) != (shape, sharded.spec.dtype):
            raise HandoffError(
                f"rank {rank} holds {part.dtype} {list(part.shape)} of {name!r}, but the layout says "
                f"{sharded.spec.dtype} {list(shape)}; make the layout from these weights"
            )
        parts.append(part)
    return parts


def synchronise(device: torch.device | None = None) -> None:
    """Wait for all work of this process on a GPU, on any stream, so that other processes may read or write.

    device: the GPU; the current one for None or the CPU.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize(device if device is not None and device.type == "cuda" else None)
