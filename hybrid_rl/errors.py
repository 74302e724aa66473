"""Errors for users. Every message says what is wrong, the value, and what to do."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

REPORT_EXTRA = 'pip install "hybrid_rl[report]"'  # pictures, the report, tables


class HybridRLError(Exception):
    """Base class of all errors that this library raises on purpose."""


class PeerFailedError(HybridRLError):
    """Work that ended because another participant failed. A mix-in for an error of a specific kind: it is not reported
    as the cause if another rank reports its own failure. With a `__cause__`, a connection broke."""


class ConfigError(HybridRLError, ValueError):
    """A configuration key or value cannot be used."""


class NoRoomError(ConfigError):
    """The machines have no room for the ranks now: nodes are missing, or Ray did not start in time."""


class DataError(HybridRLError, ValueError):
    """A dataset, prompt or batch column is unusable."""


class MessagesRefusedError(DataError):
    """A chat template refuses messages: their roles, their order, or what they hold."""


class NoSignalError(DataError):
    """Too few prompts have groups whose rewards differ: there is nothing to learn from."""


class DivergedError(HybridRLError, RuntimeError):
    """Learning has stopped: update after update is skipped because gradients are not finite."""


class StorageError(HybridRLError, OSError):
    """A file cannot be written now: the disk is full, or the folder read-only."""


class ModelError(HybridRLError, ValueError):
    """A model or tokenizer cannot be loaded or used."""


class BrokenModelError(ModelError):
    """A model that worked gives logits that are not finite: its weights have diverged."""


class RewardError(HybridRLError, RuntimeError):
    """Too many rewards failed, or a reward function cannot be used at all."""


class AgentError(HybridRLError, RuntimeError):
    """Tools or environments fail in a way that no trajectory can go on with: it ends the run."""


class SandboxError(AgentError):
    """The sandbox of programs cannot be made, is not safe, or died."""


class HistoryRewrittenError(AgentError):
    """A chat template renders earlier turns of a trajectory differently later on, and the configuration refuses it."""


class EngineStateError(HybridRLError, RuntimeError):
    """A rollout engine's state or policy version does not allow the request."""


class QueueFullError(HybridRLError, RuntimeError):
    """More requests were submitted than the queue of a rollout engine may hold."""


class HandoffError(HybridRLError, RuntimeError):
    """Engine and trainer do not hold the same weights."""


class MemoryStateError(HybridRLError, RuntimeError):
    """A resident was used, woken or put to sleep in violation of its lease."""


class MemoryRefusedError(MemoryStateError):
    """A lease that cannot be had. On all ranks nothing has moved, or everything was put back: work can go on."""


class CheckpointError(HybridRLError, RuntimeError):
    """A checkpoint cannot be written or read."""


class WorkerError(HybridRLError, RuntimeError):
    """A rank of a worker group failed, died or hung; the message names it and holds its traceback.

    is_kill: processes are gone, and none said why: they were killed, perhaps because memory ran out.
    """

    is_kill = False


def counted(number: int, noun: str) -> str:
    """ "1 step", "3 steps": a count with its noun, for messages."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def shorten(value: object, max_chars: int = 60) -> str:
    """Return `repr(value)` for messages, cut to `max_chars` characters."""
    text = repr(value)
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def visible(text: str) -> str:
    """Return text in which control characters, half characters and those that turn the direction of writing are
    replaced by what they are called, so that they do nothing to a page or a terminal."""
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char in "\n\t" or (char.isascii() and char.isprintable()):
        return char
    code, kind = ord(char), unicodedata.category(char)
    if kind == "Cc":
        return chr(0x2400 + code) if code < 0x20 else f"\\x{code:02x}"
    # Joiners are parts of emoji and of some scripts.
    if kind in ("Cs", "Co", "Zl", "Zp") or (kind == "Cf" and char not in "\u200c\u200d"):
        return f"\\u{code:04x}"
    return char


def do_all(*actions: Callable[[], object]) -> None:
    """Run all actions, even if some fail; then raise the first error, with the others as notes."""
    failures: list[BaseException] = []
    for action in actions:
        try:
            action()
        except BaseException as error:
            failures.append(error)
    for other in failures[1:]:
        failures[0].add_note(f"then {type(other).__name__}: {other}")
    if failures:
        raise failures[0]
