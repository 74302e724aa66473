"""Faults of residents on request, in whatever process they are asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import torch

from hybrid_rl.memory.offload import OffloadedTensors, _Memory
from tests.sleeping_engine import SleepingEngine

How = Literal["no memory", "engine", "interrupt", "kill"]


def fail_once(tag: str, how: How) -> Callable[[], None]:
    """Have the next wake of a resident go wrong; returns what takes the fault away again.

    no memory: the allocator gives it a part, and then no more. engine: the engine's wake raises, whatever the tag.
    interrupt: Ctrl-C comes as it wakes. kill: the process ends.
    """
    wake, take, engine = OffloadedTensors.wake, _Memory.take, SleepingEngine.wake
    is_due = True

    def undo() -> None:
        OffloadedTensors.wake, _Memory.take, SleepingEngine.wake = wake, take, engine  # type: ignore[method-assign]

    def taken(memory: _Memory) -> None:
        take(memory)
        raise torch.OutOfMemoryError("asked to fail")

    def faulty(memory: OffloadedTensors) -> None:
        nonlocal is_due
        if memory.tag != tag or not is_due:
            return wake(memory)
        is_due = False
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            return wake(memory)
        _Memory.take = taken  # type: ignore[method-assign]
        try:
            return wake(memory)
        finally:
            _Memory.take = take  # type: ignore[method-assign]

    def broken(*_: Any) -> None:
        undo()
        raise RuntimeError("asked to fail")

    if how == "engine":
        SleepingEngine.wake = broken  # type: ignore[method-assign]
    else:
        OffloadedTensors.wake = faulty  # type: ignore[method-assign]
    return undo
