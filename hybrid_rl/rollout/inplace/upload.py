"""Numbers of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any] | Sequence[int], device: torch.device, dtype: npt.DTypeLike = np.int64) -> Tensor:
    """These numbers as a tensor: on a CPU the array's own memory, on CUDA a copy that nobody waits for."""
    host = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
