"""Where ranks are, and what their processes hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rl.controller import WorkerGroup

if TYPE_CHECKING:
    import pytest


def places_of(owner: Any) -> Sequence[Any]:
    """Host, bundle and GPUs of each rank of a group on Ray, or of its actors."""
    backend: Any = owner._backend if isinstance(owner, WorkerGroup) else None
    ranks = owner if backend is None else backend._ranks
    places: Sequence[Any] = ranks._places
    return places


def place_ranks(ranks: Any, role: str, num_ranks: int, options: Any) -> None:
    """Choose places for ranks, and start none."""
    ranks._place(role, num_ranks, options)


def served_worker(server: Any) -> Any:
    """The worker that a rank's process answers for."""
    return server._worker


def restore_taken_devices(patch: pytest.MonkeyPatch) -> None:
    """Forget afterwards which devices this process has taken."""
    from hybrid_rl.controller import ranks

    patch.setattr(ranks, "_taken", ranks._taken)


def remove_if_left(folder: Path) -> None:
    """Remove a temporary folder whose process has ended, as the next one to start does."""
    from hybrid_rl.controller import session

    session._remove_if_left(folder)


def started_at(pid: int) -> int | None:
    """When a process started, as owners of folders note it; None if there is none."""
    from hybrid_rl.checkpoint import owners

    return owners._started(pid)
