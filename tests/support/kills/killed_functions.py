"""Rewards and tools of runs that are killed. Reward and tool processes import this file, so it imports little."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CALLS = "HYBRID_RL_TEST_CALLS"  # a folder: of each process that runs calls a file, and one more during a call
CALL_SECONDS = 0.02  # long enough to be hit


def long(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
    """A reward that depends on the step that it is told."""
    return [len(ids) + trainer_state.global_step / 64 for ids in completion_ids]


def lengths(completion_ids: Any, **_: Any) -> list[float]:
    """A reward that does not depend on when it is asked."""
    return [float(len(ids)) for ids in completion_ids]


def long_in_a_process(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
    """The same, in a process that can be found."""
    with found():
        return long(completion_ids, trainer_state)


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: the other
    """
    with found():
        return a + b


@contextlib.contextmanager
def found() -> Iterator[None]:
    """Tell which process this is, and, for some time, that it is in a call."""
    folder, pid = Path(os.environ[CALLS]), os.getpid()
    (folder / f"{pid}").touch()
    (folder / f"{pid}.calls").touch()
    time.sleep(CALL_SECONDS)
    yield
    (folder / f"{pid}.calls").unlink()


def book(amount: int, call_key: str) -> str:
    """Book an amount.

    Args:
        amount: how much
    """
    act(call_key, str(amount))
    return f"booked {amount}"


def act(call_key: str, text: str) -> None:
    """Do what may be done once only, unless this call has done it before; it can be interrupted before and after."""
    run, _, call = call_key.partition("/")
    folder = Path(os.environ[CALLS]).with_name("effects") / run
    folder.mkdir(parents=True, exist_ok=True)
    time.sleep(CALL_SECONDS)
    with contextlib.suppress(FileExistsError), (folder / call.replace("/", "_")).open("x") as file:
        file.write(text)
    time.sleep(CALL_SECONDS)


class Line:
    """A place on a line, an environment that can be restored."""

    def reset(self, start: int, **row: Any) -> str:
        """Begin at a place."""
        self.place = start
        return f" at {start}"

    def move(self, by: int, call_key: str) -> str:
        """Move.

        Args:
            by: how far
        """
        act(call_key, str(by))
        self.place += by
        return str(self.place)

    def state(self) -> int:
        """Return the place."""
        return self.place

    def restore(self, state: int) -> None:
        """Go to a place."""
        self.place = state

    def get_reward(self) -> float:
        """Return a tenth of the place."""
        return self.place / 10


def booking() -> list[Any]:
    """Make a tool with an effect that nobody can take back."""
    return [book]


def sandboxed() -> list[Any]:
    """Make the Python tool."""
    from hybrid_rl.extras.programs.python_tool import PythonTool

    return [PythonTool(strict=False).python]


def adding() -> list[Any]:
    """Make a plain tool."""
    return [add]
