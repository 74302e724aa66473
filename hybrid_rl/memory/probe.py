"""Measured memory use, as the operating system and the device report it."""

from __future__ import annotations

import psutil
import torch


def measure() -> dict[str, int]:
    """Return bytes: `process` (resident set of this process), `available` (memory the machine can still provide), and
    on CUDA `device_allocated`, `device_peak` and `device_free`."""
    found = {"process": psutil.Process().memory_info().rss, "available": psutil.virtual_memory().available}
    if torch.cuda.is_available():
        found["device_allocated"] = torch.cuda.memory_allocated()
        found["device_peak"] = torch.cuda.max_memory_allocated()
        found["device_free"] = torch.cuda.mem_get_info()[0]
    return found
