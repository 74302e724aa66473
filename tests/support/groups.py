"""Worker groups of any worker class, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid_rl.controller import Backend, WorkerGroup


def dispatched_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods of a worker class that can be called on a group, by name."""
    return {name: getattr(cls, name) for name in dir(cls) if hasattr(getattr(cls, name), "__dispatch__")}


class OpenGroup(WorkerGroup):
    """A group that calls every dispatched method of a worker class by its name, without types."""

    def __init__(self, worker: type, backend: Backend) -> None:
        super().__init__(backend)
        self._methods = dispatched_methods(worker)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"{name!r} is none of {sorted(self._methods)}")
        return lambda *args: self._ranks.call(self._methods[name], *args)
