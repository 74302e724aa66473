"""Processes of ranks on this machine, as the operating system sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil

from hybrid_rl.controller.placement import Place


def describe_process(place: Place) -> str:
    """Describe a rank's process as seen from outside."""
    process = _process(place)
    if process is None:
        return f"pid {place.pid} on {place.host}"
    with contextlib.suppress(psutil.Error):
        return f"pid {process.pid} on this machine is {process.status()}"
    return f"pid {place.pid} on this machine is gone"


def end_processes(places: Sequence[Place], seconds: float) -> None:
    """Kill the processes of ranks that run on this machine, also stopped ones, and wait until they are gone."""
    end_family([process for place in places if (process := _process(place)) is not None], seconds)


def family(pids: Sequence[int]) -> list[psutil.Process]:
    """Find these processes and all that they started."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            processes += [process, *process.children(recursive=True)]
    return processes


def is_running(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended and was not waited for yet does not."""
    try:
        return bool(process.status() != "zombie")
    except psutil.NoSuchProcess:
        return False


def end_family(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Kill those that are left, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=seconds)


def _process(place: Place) -> psutil.Process | None:
    """Find the process, if it runs on this machine and is still one of Ray's, by its title: ids are reused."""
    if not place.is_here:
        return None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(place.pid)
        if "".join(process.cmdline()[:1]).startswith("ray::"):
            return process
    return None
