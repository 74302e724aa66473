"""Errors that users see. Every message says what is wrong, the value, and what to do."""

from __future__ import annotations

from collections.abc import Callable


class HybridRLError(Exception):
    """Base of all errors that this library raises on purpose."""


class PeerFailedError(HybridRLError):
    """Another participant failed, which ended this one's work too. To be mixed into an error of its field: it is never
    the cause where another rank tells of a failure of its own. With a `__cause__`: the connection to others broke."""


class ConfigError(HybridRLError, ValueError):
    """A configuration key or value cannot be used."""


class NotYetSupportedError(HybridRLError, NotImplementedError):
    """A documented plan of the project that does not work yet."""


class DataError(HybridRLError, ValueError):
    """A dataset, prompt or batch column is unusable."""


class NoSignalError(DataError):
    """Too few prompts give groups whose rewards differ: there is nothing to learn from."""


class DivergedError(HybridRLError, RuntimeError):
    """Nothing is learned any more: updates are skipped one after the other, because they are not finite."""


class StorageError(HybridRLError, OSError):
    """A file cannot be written now: the disk is full, or the folder read-only."""


class ModelError(HybridRLError, ValueError):
    """A model or tokenizer cannot be loaded or used."""


class BrokenModelError(ModelError):
    """A model that worked gives logits that are not finite: its weights have diverged."""


class RewardError(HybridRLError, RuntimeError):
    """Too many rewards failed, or a reward function cannot be used at all."""


class EngineStateError(HybridRLError, RuntimeError):
    """A rollout engine was asked for something that its state or policy version forbids."""


class QueueFullError(HybridRLError, RuntimeError):
    """More requests were submitted than a rollout engine lets wait."""


class HandoffError(HybridRLError, RuntimeError):
    """Engine and trainer do not hold the same weights."""


class MemoryStateError(HybridRLError, RuntimeError):
    """A resident was used, woken or put to sleep against the rules of its lease."""


class CheckpointError(HybridRLError, RuntimeError):
    """A checkpoint cannot be written or read."""


class WorkerError(HybridRLError, RuntimeError):
    """A rank of a worker group failed, died or hung; the message names it and holds its traceback."""


def counted(number: int, noun: str) -> str:
    """ "1 step", "3 steps": for messages."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def do_all(*actions: Callable[[], object]) -> None:
    """Do each of them, whatever becomes of the others; then raise the first error, which notes the others."""
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
