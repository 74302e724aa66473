"""Failures of ranks: their reports, the choice of the cause among several, and the one error that the user sees."""

from __future__ import annotations

import contextlib
import pickle
import textwrap
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid_rl.errors import HybridRLError, PeerFailedError, WorkerError

LOG_TAIL_LINES = 15
LOG_READ_LINES = 200
# How faulthandler begins; the thread that crashed follows, and then all others.
CRASH = "Fatal Python error"
OF_RANKS = "_is_of_ranks"  # the attribute of an error with which a call on ranks ended
COLLECTIVE_ERRORS = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
# gloo raises plain RuntimeErrors.
COLLECTIVE_WORDS = ("gloo", "connection closed by peer", "connection reset", "broken pipe", "socket timeout", "nccl")


@dataclass(frozen=True)
class Failure:
    """The reason why a call failed on one rank.

    kind: name of the exception's type; error: the exception itself, pickled if possible. is_echo: it usually only says
    that another rank failed. is_disconnected: a connection or collective broke, an echo too; ranks
    cannot talk to each other any more. is_interrupt: a KeyboardInterrupt. is_end: the process is gone, or does not
    answer.
    """

    kind: str
    message: str
    traceback: str = ""
    error: bytes | None = None
    is_echo: bool = False
    is_disconnected: bool = False
    is_interrupt: bool = False
    is_end: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether the process is gone without a word of its own."""
        return self.is_end and not self.traceback


def failure_of(error: BaseException) -> Failure:
    """Return the failure to report for an exception that was caught on a rank."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - an exception of the user may do anything when it is pickled
        pickled = None
    text = "".join(traceback.format_exception(error))
    of_peer = isinstance(error, PeerFailedError)
    is_disconnected = is_disconnect(error) or (of_peer and error.__cause__ is not None)
    return Failure(
        type(error).__name__,
        str(error),
        text,
        pickled,
        is_echo=of_peer or is_disconnected,
        is_disconnected=is_disconnected,
        is_interrupt=isinstance(error, KeyboardInterrupt),
    )


def note_of_ranks(error: BaseException) -> BaseException:
    """Note in an error that a call on ranks ended with it, and return it."""
    vars(error)[OF_RANKS] = True
    return error


def is_of_ranks(error: BaseException) -> bool:
    """Whether a call on ranks ended with this error, or with one that it comes from."""
    cause: BaseException | None = error
    while cause is not None and not vars(cause).get(OF_RANKS):
        cause = cause.__cause__
    return cause is not None


def is_disconnect(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    if isinstance(error, COLLECTIVE_ERRORS):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in COLLECTIVE_WORDS)


def process_ended(pid: int, host: str, reason: str) -> Failure:
    """Return the failure of a rank whose process is gone. reason: as the transport gives it."""
    known = " ".join(reason.split())
    if "memory monitor" not in known and "running low on memory" not in known:
        # Without the causes that the transport guesses at.
        _, _, detail = known.partition("Worker exit detail: ")
        known = detail.split(" Some common causes")[0]
    return Failure(
        "process ended",
        f"pid {pid} on {host} is gone: it was killed (by hand, or by the kernel when memory ran out), crashed, or "
        f"called exit. {known}".rstrip(),
        is_end=True,
    )


def node_lost(pid: int, host: str, address: str) -> Failure:
    """Return the failure of a rank whose node the cluster has lost."""
    return Failure(
        "node lost",
        f"{host} ({address}), on which this rank was pid {pid}, is not in the Ray cluster any more: the machine or its "
        f"job ended, its network failed, or its raylet was killed",
        is_end=True,
    )


def cluster_ended(lost: str) -> Failure:
    """Return the failure of a cluster started here that lost these processes, without which nothing works."""
    return Failure(
        "cluster ended",
        f"{lost} of the Ray cluster on this machine is gone: it was killed (by hand, or by the kernel when memory "
        f"ran out), or crashed",
        is_end=True,
    )


@dataclass(frozen=True)
class Site:
    """The place where calls run, for errors. logs: of each rank."""

    role: str
    num_ranks: int
    logs: Mapping[int, Path]


def root_cause(failures: Mapping[int, Failure]) -> int:
    """Return the rank that failed first, not because of another one. failures: in the order of their arrival."""
    own = [rank for rank, failure in failures.items() if not failure.is_echo and not failure.is_interrupt]
    ends = [rank for rank in own if failures[rank].is_end]
    errors = [rank for rank in own if not failures[rank].is_end]
    return (errors or ends or list(failures))[0]


def error_of(site: Site, doing: str, failures: Mapping[int, Failure]) -> BaseException:
    """Make the one error for the failures of a call. doing: "update() at training step 3"."""
    rank = root_cause(failures)
    failure = failures[rank]
    lines = [f"{site.role} rank {rank} of {site.num_ranks} failed in {doing}: {failure.kind}: {failure.message}"]
    others = [f"rank {other} ({_short(failures[other])})" for other in failures if other != rank]
    if others:
        lines.append(f"after that also: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''}")
    log = site.logs.get(rank)
    if log is not None:
        lines.append(f"log of the rank: {log}")
    if failure.traceback:
        lines.append(f"remote traceback:\n{failure.traceback.rstrip()}")
    if failure.is_end and log is not None and (tail := log_tail(log)):
        lines.append(f"end of its log:\n{tail}")
    original = _unpickle(failure.error)
    if isinstance(original, HybridRLError):
        original.add_note("\n".join(lines))
        return original
    error = WorkerError("\n".join(lines))
    error.is_kill = failure.is_gone
    error.__cause__ = original
    return error


def summary_of(error: BaseException) -> str:
    """Describe in one line why a call ended, for errors of later calls. error: from `error_of`, or a Ctrl-C."""
    said = str(error) if isinstance(error, WorkerError) else "\n".join(getattr(error, "__notes__", ()))
    return textwrap.shorten((said or type(error).__name__).split("\n")[0], 160, placeholder=" ...")


def log_tail(path: Path) -> str:
    """Read the last lines of a rank's log, or those of its crash; empty if the log is on another machine."""
    try:
        with path.open(errors="replace") as file:
            lines = deque(file, LOG_READ_LINES)
    except OSError:
        return ""
    crashes = [place for place, line in enumerate(lines) if line.startswith(CRASH)]
    start = crashes[-1] if crashes else max(0, len(lines) - LOG_TAIL_LINES)
    return "".join(list(lines)[start : start + LOG_TAIL_LINES]).rstrip()


def _short(failure: Failure) -> str:
    message = failure.message.strip().split("\n")[0]
    return f"{failure.kind}: {textwrap.shorten(message, 120, placeholder=' ...')}" if message else failure.kind


def _unpickle(error: bytes | None) -> Any:
    with contextlib.suppress(Exception):  # its class may be known to the rank only; the message has its text
        return None if error is None else pickle.loads(error)
    return None
