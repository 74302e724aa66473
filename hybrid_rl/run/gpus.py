"""GPUs of this machine that PyTorch cannot use, and the reasons."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from hybrid_rl.config.hardware import Hardware

# The oldest driver that runs programs of a CUDA release, by its major version (NVIDIA's release notes of CUDA).
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
DEVICES, DRIVER = Path("/dev"), Path("/proc/driver/nvidia/version")


def without_gpu() -> Hardware:
    """Return what this machine has if PyTorch finds no GPU: why, and whether there is one that could be used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    version = torch.__version__
    if visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible):
        return Hardware(missing=f"CUDA_VISIBLE_DEVICES={visible!r} hides all")
    if not torch.backends.cuda.is_built():
        missing = f"torch {version} is built without CUDA; install a build with CUDA"
        return Hardware(missing=missing, is_overlooked=_has_gpu())
    if _has_gpu():
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return Hardware(
            missing=f"torch {version} cannot use those of this machine{hidden}: {_reason()}", is_broken=True
        )
    if _driver() is not None:
        missing = (
            "the driver is loaded, but no GPU can be opened; a container or a job has to ask for them (--gpus all)"
        )
        return Hardware(missing=missing, is_overlooked=True)
    named = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
    return Hardware(missing=f"torch {version} finds none{named}; check the output of nvidia-smi")


def _has_gpu() -> bool:
    """Whether this process may open an NVIDIA GPU: a container or a batch job may have none of the machine's."""
    nodes = [node for node in DEVICES.glob("nvidia*") if node.name.removeprefix("nvidia").isdigit()]
    return any(os.access(node, os.R_OK | os.W_OK) for node in nodes)


def _driver() -> str | None:
    """The version of the driver that is loaded, None if there is none."""
    try:
        version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER.read_text())
    except OSError:
        return None
    return version and version[0]


def _reason() -> str:
    """Why CUDA does not start here, and what to do."""
    driver, release = _driver(), torch.version.cuda or ""
    needed = OLDEST_DRIVERS.get(int(release.partition(".")[0] or 0))
    if driver is not None and needed is not None and int(driver.partition(".")[0]) < needed:
        return (
            f"driver {driver} is too old for CUDA {release}, which needs {needed} or newer; install a newer driver, or "
            f"a build of torch for an older CUDA"
        )
    try:
        torch.cuda.init()
    except Exception as error:  # of whatever kind, it says why
        return f"{' '.join(str(error).split())}; check the output of nvidia-smi"
    return "it counts none; check the output of nvidia-smi"
