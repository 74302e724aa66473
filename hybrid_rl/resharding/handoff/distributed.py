"""Handoff by messages, for trainer ranks that cannot map each other's memory.

Every rank is both sender and receiver. The buckets of a receiver's plan are its rounds: in round k each rank gets its
k-th remote bucket and sends what others get from it in theirs, so all know the whole order and no ranks wait for each
other in a circle. The sender packs a bucket in the engine's dtypes and the receiver unpacks it into the engine: with
the message itself three writes per byte. While a round travels, the previous one is unpacked and the next one packed.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_rl.resharding.handoff.base import (
    HOST,
    LOCAL,
    REMOTE,
    Delivered,
    Gather,
    Parts,
    PeerError,
    Source,
    cells,
    copy_shares,
    local_parts,
    number_of,
    written_bytes,
)
from hybrid_rl.resharding.handoff.ipc import IpcSource
from hybrid_rl.resharding.handoff.message import Message, dtype_code
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.rank_plan import Plan

Copied = TypeVar("Copied")


@dataclass(frozen=True)
class _Order:
    """One receiver's order to this rank: its plan's digest and its messages by round."""

    digest: str
    messages: Mapping[int, Message]


class DistributedSource(Source):
    """The shards of all ranks, sent to the ranks that need them.

    layout: its ranks are those of the process group, in order.
    tensors: this rank's, plain or DTensor, by name.
    gather: over the same ranks.
    reader: a source of the same layout and ranks that reads in place the parts that need not be sent.
    sent: with a reader, the ranks whose parts it cannot read; without one, all other ranks' parts are sent.
    timeout_seconds: for one message, after which its peer counts as gone.

    A rank stages at most two buckets that it receives, and as much as it sends in two rounds.
    """

    def __init__(
        self,
        layout: SourceLayout,
        rank: int,
        tensors: Mapping[str, Tensor],
        *,
        gather: Gather,
        reader: IpcSource | None = None,
        sent: Collection[int] = (),
        timeout_seconds: float = 120.0,
    ) -> None:
        self._layout, self._rank, self._tensors = layout, rank, dict(tensors)
        self.gather, self._timeout = gather, timedelta(seconds=timeout_seconds)
        self._reader = reader
        self._sent = frozenset(sent) if reader else frozenset(range(len(layout.hosts))) - {rank}
        self._parts: list[Tensor | None] = local_parts(layout, rank, tensors)
        sizes: dict[torch.device, int] = {}
        for part in self._parts:
            if part is not None:
                sizes[part.device] = sizes.get(part.device, 0) + part.nbytes
        self._device = max(sizes, key=lambda device: sizes[device]) if sizes else torch.device("cpu")
        self.waits_for = reader.waits_for if reader else self._device
        self._orders: dict[int, _Order] = {}
        self._version = -1

    def held(self) -> dict[int, Parts]:
        """Return this rank's own parts."""
        return self._reader.held() if self._reader else {self._rank: self._parts}

    def prepare(self, version: int) -> None:
        """Collect this rank's parts. Raises HandoffError if one is missing or differs from the layout."""
        super().prepare(version)
        if self._reader:
            self._reader.prepare(version)
        self._version = version
        parts = local_parts(self._layout, self._rank, self._tensors)
        # With shards in host memory, buffers may be on the GPU.
        self._parts = [None if part is None else part.to(self._device).contiguous() for part in parts]

    def deliver(self, plan: Plan, destinations: Sequence[Tensor]) -> Delivered:
        """Send and receive all rounds, read what can be read, and write the engine. Collective."""
        read = [share for share in plan.shares if share.source_rank not in self._sent]
        received = [share for share in plan.shares if share.source_rank in self._sent]
        parts: Callable[[int], Parts] = self._reader.parts if self._reader else lambda rank: self._parts
        link: Callable[[int], str] = self._reader.link if self._reader else lambda rank: LOCAL
        copying = functools.partial(copy_shares, read, parts, destinations, link)
        (link_bytes, num_launches, staging_bytes), buffer_bytes = self._exchange(plan, destinations, copying)
        hosts = self._layout.hosts
        for share in received:
            is_near = hosts[share.source_rank] == hosts[self._rank]
            link_bytes[HOST if is_near else REMOTE] += written_bytes(share, destinations)
        num_buckets = num_launches + sum(len(share.buckets) for share in received)
        return Delivered.of(plan, destinations, link_bytes, num_buckets, staging_bytes + buffer_bytes)

    def close(self) -> None:
        """Close the reader."""
        if self._reader:
            self._reader.close()

    def full(self, name: str) -> Tensor:
        """Broadcast the cells of one tensor from their first owners. Collective."""
        number = number_of(self._layout, name)
        sharded = self._layout.tensors[number]
        full = torch.empty(sharded.spec.shape, dtype=sharded.spec.dtype, device=self._device)
        for box, owners in cells(sharded):
            part = self._parts[number] if owners[0] == self._rank else None
            if part is None:
                part = torch.empty_like(full[box], memory_format=torch.contiguous_format)
            # As bytes, because not every backend supports every dtype.
            flat = part.reshape(-1).view(torch.uint8)
            self._wait([self._calling(dist.broadcast, flat, src=owners[0], async_op=True)])
            full[box] = part.view(full[box].shape)
        return full

    # ---------------------------------------------------------------------------------------------------- messages

    def _exchange(
        self, plan: Plan, destinations: Sequence[Tensor], copying: Callable[[], Copied]
    ) -> tuple[Copied, int]:
        """Send and receive all rounds, with `copying` done while the first one travels. Return what `copying` returned,
        and the bytes of the buffers."""
        dtype = np.array([dtype_code(tensor.dtype) for tensor in destinations], dtype=np.int64)
        buckets = [bucket for bucket in plan.buckets if bucket.source_rank in self._sent]
        senders = [bucket.source_rank for bucket in buckets]
        incoming = {k: Message.of(b.pieces, dtype[b.pieces.destination]) for k, b in enumerate(buckets)}
        num_rounds = self._agree(plan, senders, incoming)
        outgoing = [
            {receiver: order.messages[k] for receiver, order in self._orders.items() if k in order.messages}
            for k in range(num_rounds)
        ]
        sizes_in = [incoming[k].num_bytes if k in incoming else 0 for k in range(num_rounds)]
        sizes_out = [sum(message.num_bytes for message in messages.values()) for messages in outgoing]
        room_in, room_out = _room(sizes_in, self._device), _room(sizes_out, self._device)

        def start(k: int) -> list[dist.Work]:
            if k >= num_rounds:
                return []
            sender = senders[k] if k in incoming else None
            return self._start(outgoing[k], room_out[k % 2], sender, room_in[k % 2][: sizes_in[k]])

        under_way = start(0)
        copied = copying()
        for k in range(num_rounds):
            following = start(k + 1)
            self._wait(under_way)
            if k in incoming:
                incoming[k].unpack(room_in[k % 2], destinations)
            under_way = following
        return copied, sum(buffer.numel() for buffer in (*room_in, *room_out))

    def _start(
        self, messages: Mapping[int, Message], room: Tensor, sender: int | None, into: Tensor
    ) -> list[dist.Work]:
        operations = []
        if sender is not None:
            operations.append(dist.P2POp(dist.irecv, into, peer=sender))
        begin = 0
        for receiver, message in messages.items():
            staging = room[begin : begin + message.num_bytes]
            message.pack(self._parts, staging)
            operations.append(dist.P2POp(dist.isend, staging, peer=receiver))
            begin += message.num_bytes
        if not operations:
            return []
        works: list[dist.Work] = self._calling(dist.batch_isend_irecv, operations)
        return works

    def _wait(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            # On CUDA the stream waits, not this thread; the process group then detects a peer that is gone.
            self._calling(work.wait, *(() if self._device.type == "cuda" else (self._timeout,)))

    def _calling(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._rank}: a message of the handoff of policy version {self._version} failed; a peer is "
                f"gone, or took longer than {self._timeout.total_seconds():g} s: {error}"
            ) from error

    # --------------------------------------------------------------------------------------------------- agreement

    def _agree(self, plan: Plan, senders: Sequence[int], incoming: Mapping[int, Message]) -> int:
        """Send orders to senders that do not have them yet; return the number of rounds of all ranks."""
        dtypes = hashlib.blake2b(b"".join(message.dtype.tobytes() for message in incoming.values()), digest_size=8)
        digest = f"{plan.digest} {dtypes.hexdigest()}"
        known = {receiver: order.digest for receiver, order in self._orders.items()}
        answers = self.tell(("plan", self._version, digest, (len(senders), known)))
        wanted = [answer[2] for answer in answers]
        changed = [
            receiver
            for receiver, digest in enumerate(wanted)
            if any(answer[3][1].get(receiver) != digest for rank, answer in enumerate(answers) if rank != receiver)
        ]
        if changed:
            self._exchange_orders(changed, wanted, senders, incoming)
        return int(max(answer[3][0] for answer in answers))

    def _exchange_orders(
        self, changed: Sequence[int], wanted: Sequence[str], senders: Sequence[int], incoming: Mapping[int, Message]
    ) -> None:
        """Send each rank that this one reads from its messages by round, and receive what others want from here."""
        others = [rank for rank in range(len(wanted)) if rank != self._rank]
        orders = dict.fromkeys(others, b"")
        if self._rank in changed:
            for rank in set(senders):
                orders[rank] = pickle.dumps({k: incoming[k] for k, sender in enumerate(senders) if sender == rank})
        sizes = [answer[3] for answer in self.tell(("orders", self._version, "", {r: len(orders[r]) for r in others}))]
        operations, received = [], {}
        for rank in others:
            if orders[rank]:
                sent = torch.frombuffer(bytearray(orders[rank]), dtype=torch.uint8).to(self._device)
                operations.append(dist.P2POp(dist.isend, sent, peer=rank))
            theirs = torch.empty(sizes[rank][self._rank], dtype=torch.uint8, device=self._device)
            if len(theirs):
                operations.append(dist.P2POp(dist.irecv, theirs, peer=rank))
            if rank in changed:
                received[rank] = theirs
        if operations:
            self._wait(self._calling(dist.batch_isend_irecv, operations))
        for rank, theirs in received.items():
            messages = pickle.loads(theirs.cpu().numpy().tobytes()) if len(theirs) else {}
            self._orders[rank] = _Order(wanted[rank], messages)


def _room(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Allocate the staging memory of even and of odd rounds."""
    return [torch.empty(max(sizes[start::2], default=0), dtype=torch.uint8, device=device) for start in (0, 1)]
