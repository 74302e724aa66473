"""Regions of GPU memory that a process lends to others of its machine.

The driver names memory by file descriptors, and these go from process to process by a Unix socket alone. (To take them
out of another process, pidfd_getfd, is forbidden in many containers, and to other than child processes on Ubuntu.) So a
process that exports regions listens, on an address without a file, and sends descriptors to whoever asks and belongs to
the same user. It takes them from the driver for each answer and closes them afterwards: a descriptor that is kept keeps
the memory from being given back.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid_rl.errors import HandoffError, MemoryStateError
from hybrid_rl.memory.cuda_region import CudaRegion, Handles, OpenedRegion
from hybrid_rl.resharding.handoff.base import PeerError
from hybrid_rl.resharding.handoff.gpu_memory import CannotShareError

MOST_FDS = 253  # in one message (SCM_MAX_FD of Linux)
_MESSAGE_BYTES = 1 << 16
_SECONDS = 30.0  # for an answer, which takes milliseconds


@dataclass(frozen=True)
class LentRegion:
    """A region of another process. address: of its socket; number: among its regions; num_releases: of the region when
    it was exported, because after another one its memory is another."""

    address: str
    number: int
    tag: str
    num_releases: int


class RegionLender:
    """Answers other processes that ask for regions, in a thread of its own, until `close`.

    Raises CannotShareError if one of the regions cannot be shared now.
    """

    def __init__(self, regions: Sequence[CudaRegion]) -> None:
        for region in regions:
            try:
                region.handles().close()
            except MemoryStateError as error:
                raise CannotShareError(str(error)) from error
        address = f"hybrid_rl/{os.getpid()}/{secrets.token_hex(8)}"
        self.lent = tuple(
            LentRegion(address, number, region.tag, region.num_releases) for number, region in enumerate(regions)
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_name(address))
        self._listener.listen()
        # The thread holds no lender, so that one that is forgotten ends, and its thread with it.
        thread = threading.Thread(
            target=_serve, args=(self._listener, tuple(regions)), name="hybrid_rl_regions", daemon=True
        )
        self._end = weakref.finalize(self, _hang_up, self._listener, thread)
        thread.start()

    def close(self) -> None:
        """Answer nobody any more; idempotent. What others have mapped stays mapped."""
        self._end()


def open_region(lent: LentRegion, rank: int, device: torch.device) -> OpenedRegion:
    """Map a region of a rank of this machine for a device.

    Raises PeerError if its process does not answer, HandoffError if it refuses, CannotShareError if the driver cannot
    map the memory here.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.connect(_name(lent.address))
            connection.send(json.dumps([lent.number, lent.num_releases]).encode())
            handles = _received(connection)
        except OSError as error:
            raise PeerError(
                f"region {lent.tag!r} of rank {rank} cannot be had ({type(error).__name__}: {error}): its process is "
                f"gone, or runs in another container on {socket.gethostname()}; for that use the distributed source"
            ) from error
    if isinstance(handles, str):
        raise HandoffError(f"region {lent.tag!r} of rank {rank}: {handles}")
    try:
        return OpenedRegion(lent.tag, handles, device=device)
    except MemoryStateError as error:
        raise CannotShareError(str(error)) from error
    finally:
        handles.close()


def _name(address: str) -> str:
    return f"\0{address}"


def _hang_up(listener: socket.socket, thread: threading.Thread) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread; close alone would not
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(_SECONDS)  # it holds the regions
    listener.close()


def _serve(listener: socket.socket, regions: Sequence[CudaRegion]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed
        with connection:
            try:
                connection.settimeout(_SECONDS)
                _answer(connection, regions)
            except (OSError, ValueError, LookupError, TypeError):
                continue  # the other side is gone, or talks nonsense


def _answer(connection: socket.socket, regions: Sequence[CudaRegion]) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    number, num_releases = json.loads(connection.recv(_MESSAGE_BYTES))
    region = regions[number]
    if user != os.getuid():
        refusal = "its process belongs to another user"
    elif region.is_asleep or region.num_releases != num_releases:
        refusal = "it has slept since it was exported; export it again while it is awake"
    else:
        refusal = ""
        try:
            handles = region.handles()
        except MemoryStateError as error:
            refusal = str(error)
    if refusal:
        connection.send(json.dumps(refusal).encode())
        return
    try:
        connection.send(json.dumps(len(handles.fds)).encode())
        for start in range(0, len(handles.fds), MOST_FDS):
            part = slice(start, start + MOST_FDS)
            socket.send_fds(connection, [json.dumps(handles.sizes[part]).encode()], list(handles.fds[part]))
    finally:
        handles.close()


def _received(connection: socket.socket) -> Handles | str:
    """Return what is sent: descriptors, or why there are none. Raises OSError if the other side breaks off."""
    count = json.loads(connection.recv(_MESSAGE_BYTES) or b"null")
    if isinstance(count, str):
        return count
    fds: list[int] = []
    sizes: list[int] = []
    try:
        while count is None or len(fds) < count:
            message, received, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, MOST_FDS)
            fds += received
            if not message or not received:
                raise ConnectionError("it broke off")
            sizes += json.loads(message)
    except BaseException:
        Handles(tuple(fds), ()).close()
        raise
    return Handles(tuple(fds), tuple(sizes))
