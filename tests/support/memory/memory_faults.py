"""Faults of residents on request, in whatever process they are asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import torch

from hybrid_rl.memory.offload import OffloadedTensors, _Memory
from hybrid_rl.memory.probe import require_room
from tests.support.engines.sleeping_engine import SleepingEngine

How = Literal["no memory", "no room", "engine", "interrupt", "kill"]


def fail_once(tag: str, how: How) -> Callable[[], None]:
    """Have the next wake of a resident go wrong; returns what takes the fault away again.

    no memory: the allocator gives it a part, and then no more. no room: the engine sees before it wakes, whatever the
    tag, that there is too little. engine: the engine's wake raises, whatever the tag.
    interrupt: Ctrl-C comes as it wakes. kill: the process ends.
    """
    wake, take, engine = OffloadedTensors.wake, _Memory.take, SleepingEngine.wake
    room = SleepingEngine.require_room
    is_due = True

    def undo() -> None:
        OffloadedTensors.wake, _Memory.take, SleepingEngine.wake = wake, take, engine  # type: ignore[method-assign]
        SleepingEngine.require_room = room  # type: ignore[method-assign]

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

    def refusing(*_: Any) -> None:
        undo()
        require_room(2, 1)

    if how == "no room":
        SleepingEngine.require_room = refusing  # type: ignore[method-assign]
    elif how == "engine":
        SleepingEngine.wake = broken  # type: ignore[method-assign]
    else:
        OffloadedTensors.wake = faulty  # type: ignore[method-assign]
    return undo
