"""Many ranks as one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hybrid_rl.controller.dispatch import Dispatch, dispatch_of


class Backend(Protocol):
    """Where the ranks of a group run. label: what the driver is doing, for errors ("training step 3")."""

    role: str
    num_ranks: int
    label: str

    @property
    def has_ended(self) -> bool:
        """Whether there are no ranks any more that could be called."""
        ...

    def call(self, name: str, record: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one method on all ranks as its declaration says."""
        ...

    def close(self) -> None:
        """End all ranks; idempotent."""
        ...


class WorkerGroup:
    """Calls the dispatched methods of a worker class on every rank: `group.update(batch)`."""

    def __init__(self, cls: type, backend: Backend) -> None:
        self._cls = cls
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        record = dispatch_of(self._cls, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._backend.call(name, record, args, kwargs)

        return call

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self._backend.num_ranks

    @property
    def has_ended(self) -> bool:
        """Whether the ranks are gone, by a failure or `close`."""
        return self._backend.has_ended

    @property
    def label(self) -> str:
        """What the driver is doing; errors of the ranks name it."""
        return self._backend.label

    @label.setter
    def label(self, label: str) -> None:
        self._backend.label = label

    def close(self) -> None:
        """End all ranks; idempotent."""
        self._backend.close()
