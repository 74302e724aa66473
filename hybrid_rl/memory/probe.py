"""Measured memory use, as the operating system and the device report it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.byte_sizes import size_text


def measure() -> dict[str, int]:
    """Return bytes: `process` (resident set of this process), `available` (memory the machine can still provide), and
    on CUDA `device_allocated`, `device_peak` and `device_free`."""
    sizes = {"process": psutil.Process().memory_info().rss, "available": psutil.virtual_memory().available}
    if torch.cuda.is_available():
        sizes["device_allocated"] = torch.cuda.memory_allocated()
        sizes["device_peak"] = torch.cuda.max_memory_allocated()
        sizes["device_free"] = torch.cuda.mem_get_info()[0]
    return sizes


def available_host_bytes() -> int:
    """Return the bytes that this machine can still provide, or the control group (version 2) of a container or job,
    whichever is less."""
    groups = _group_bytes(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return min([psutil.virtual_memory().available, *groups])


def _group_bytes(root: Path, own: Path) -> Iterator[int]:
    """Yield what each limited control group of this process, and those around it, can still give. Pages of files are
    given back when memory is asked for."""
    try:
        name = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = root / name.strip("/")
    for path in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
        try:
            limit = (path / "memory.max").read_text().strip()
            used = int((path / "memory.current").read_text())
            stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            yield max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def free_device_bytes(device: torch.device) -> int | None:
    """Return the bytes that the driver of a GPU can still give; None for a CPU, whose memory comes when it is
    touched."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def unused_bytes(device: torch.device) -> int:
    """Return the bytes that PyTorch's allocator keeps of a GPU without using them; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def require_room(num_bytes: int, free_bytes: int) -> None:
    """Raise MemoryStateError unless so many bytes can be had. free_bytes: of the device."""
    if num_bytes > free_bytes:
        raise MemoryStateError(
            f"it takes {size_text(num_bytes)}, and {size_text(free_bytes)} of the device are free: "
            f"{size_text(num_bytes - free_bytes)} are missing"
        )
