"""Names of Ray that tests need; those that the library needs are in `compat/ray.py`. Imported where they are used: Ray
takes a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def start_ranks_with(script: Path | str, patch: pytest.MonkeyPatch | None = None) -> None:
    """Have Ray start its workers by another script. patch: takes it back."""
    import ray._private.ray_constants

    if patch is None:
        ray._private.ray_constants.SETUP_WORKER_FILENAME = str(script)
    else:
        patch.setattr(ray._private.ray_constants, "SETUP_WORKER_FILENAME", str(script))


def own_start_script() -> Path:
    """The script by which Ray itself starts its workers."""
    import ray._private.workers

    return Path(ray._private.workers.__path__[0]) / "setup_worker.py"


def num_known_objects() -> int:
    """Objects of the object store that this process knows of."""
    import ray._private.worker

    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def session_folder() -> Path:
    """The folder of the session of Ray that this process has joined."""
    import ray._private.worker

    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def services() -> Any:
    """The module in which Ray finds clusters and addresses."""
    import ray._private.services

    return ray._private.services


def read_settings_again() -> None:
    """Have Ray take on what of its settings has been put into the environment since it was imported."""
    import ray._raylet

    ray._raylet.Config.initialize("")


def show_gpus(ids: Sequence[str]) -> None:
    """Let this process see these GPUs, as Ray does at the start of an actor."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids([*ids])
