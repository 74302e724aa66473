"""The compiled half of regions on GPUs, by its plain C interface (csrc/cuda_region.h).

It needs neither CUDA's headers nor PyTorch's, so it is built wherever there is a C++ compiler; libcuda is looked for
when the first region is made. Calls release Python's lock, and none of them calls back into Python.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hybrid_rl.errors import MemoryStateError

LIBRARY = Path(__file__).parents[1] / "_cuda_region.so"
OUT_OF_MEMORY = 2  # of CUDA
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}
_MESSAGE_BYTES = 600
_capsule_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_CAPSULE_NAME = b"dltensor"  # a capsule keeps the pointer


class DriverError(MemoryStateError):
    """A call of the driver that failed. code: CUDA's, or a negative one of csrc/cuda_region.h."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Info(ctypes.Structure):
    """HybridRlRegionInfo: address, bytes reserved and mapped, bytes of a page."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("address", "capacity", "granularity", "mapped")),
        ("state", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Driver:
    """Where the compiled half is, and the libcuda that it calls: another one only in tests."""

    library: Path = LIBRARY
    libcuda: str = "libcuda.so.1"

    def new(self, ordinal: int, capacity_bytes: int, chunk_bytes: int) -> NativeRegion:
        """Reserve addresses on a device. Raises DriverError, or MemoryStateError if the library is not there."""
        functions = _load(self.library)
        pointer = ctypes.c_void_p()
        sizes = ctypes.c_uint64(capacity_bytes), ctypes.c_uint64(chunk_bytes)
        _call(functions, "hybrid_rl_region_new", self.libcuda.encode(), ordinal, *sizes, ctypes.byref(pointer))
        return NativeRegion(functions, pointer)


class NativeRegion:
    """One region of the compiled half, held until `drop`; tensors hold it besides. Methods raise DriverError."""

    def __init__(self, functions: ctypes.CDLL, pointer: ctypes.c_void_p) -> None:
        self._functions = functions
        self._pointer = pointer

    def info(self) -> Info:
        """Return what is reserved and mapped now."""
        info = Info()
        self._functions.hybrid_rl_region_info(self._pointer, ctypes.byref(info))
        return info

    def grow(self, num_bytes: int) -> None:
        """Have at least so many bytes mapped; new ones are zero."""
        _call(self._functions, "hybrid_rl_region_grow", self._pointer, ctypes.c_uint64(num_bytes))

    def sleep(self) -> None:
        """Give the physical memory back."""
        _call(self._functions, "hybrid_rl_region_sleep", self._pointer)

    def wake(self) -> None:
        """Have zeros at the same addresses."""
        _call(self._functions, "hybrid_rl_region_wake", self._pointer)

    def close(self) -> None:
        """Give the physical memory back for good."""
        _call(self._functions, "hybrid_rl_region_close", self._pointer)

    def drop(self) -> None:
        """End this hold; no other method may be called after it."""
        self._functions.hybrid_rl_region_drop(self._pointer)

    def tensor(self, offset: int, num_bytes: int, device: torch.device) -> Tensor:
        """Return uint8 [num_bytes] over the memory at an offset, which holds the region."""
        made = ctypes.c_void_p()
        place = ctypes.c_uint64(offset), ctypes.c_uint64(num_bytes)
        where = _DLPACK_DEVICES[device.type], device.index or 0
        _call(self._functions, "hybrid_rl_region_tensor", self._pointer, *place, *where, ctypes.byref(made))
        try:
            return from_dlpack(_capsule_of(made, _CAPSULE_NAME, None))
        except BaseException:
            self._functions.hybrid_rl_region_drop_tensor(made)
            raise


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    """Load the library. Raises MemoryStateError if it is not there, or cannot be loaded."""
    if not path.exists():
        raise MemoryStateError(
            f"memory on a GPU that keeps its address needs {path.name}, which was not built; install a C++ compiler "
            f"and reinstall hybrid_rl"
        )
    try:
        functions = ctypes.CDLL(str(path))
        for name in ("hybrid_rl_region_info", "hybrid_rl_region_drop", "hybrid_rl_region_drop_tensor"):
            getattr(functions, name).restype = None
    except (OSError, AttributeError) as error:
        raise MemoryStateError(f"{path} cannot be used ({error}); reinstall hybrid_rl to build it again") from error
    return functions


def _call(functions: ctypes.CDLL, name: str, *arguments: Any) -> None:
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    code = getattr(functions, name)(*arguments, message, ctypes.c_uint64(_MESSAGE_BYTES))
    if code != 0:
        raise DriverError(message.value.decode(errors="replace"), code)
