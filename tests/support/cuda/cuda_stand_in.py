"""Regions of GPU memory on a machine without a GPU: the compiled half over a stand-in of CUDA's driver."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.memory.cuda_driver import Driver

ROOT = Path(__file__).parents[3]
UNLIMITED = 2**64 - 1
SOURCES = {"region": ROOT / "csrc" / "cuda_region.cpp", "driver": Path(__file__).with_suffix(".cpp")}
READ = [*SOURCES.values(), *sorted((ROOT / "csrc").glob("cuda_*.h")), ROOT / "setup.py"]


@dataclass(frozen=True)
class Ledger:
    """What is alive in the driver."""

    reservations: int
    maps: int
    handles: int
    retained_contexts: int
    current_contexts: int
    physical_bytes: int

    @property
    def is_empty(self) -> bool:
        return not any(astuple(self))


class StandIn:
    """The driver's controls. Faults are planned by function and number of its calls, counted from the plan on."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._library = ctypes.CDLL(driver.libcuda)
        self._library.stand_in_log.restype = ctypes.c_char_p

    def reset(
        self,
        *,
        granularity: int = 4096,
        budget: int = UNLIMITED,
        virtual_memory: bool = True,
    ) -> None:
        """Set the limits; no fault is planned then."""
        sizes = ctypes.c_uint64(granularity), ctypes.c_uint64(budget)
        self._library.stand_in_set(*sizes, int(virtual_memory))

    def fail(self, function: str, number: int = 1, code: int = 2) -> None:
        """Let the `number`-th call of a function from now on fail."""
        self._library.stand_in_fail(function.encode(), ctypes.c_long(number), code)

    def calls(self) -> Counter[str]:
        """The calls since the last look, by function."""
        return Counter(self._library.stand_in_log().decode().split())

    def ledger(self) -> Ledger:
        found = (ctypes.c_int64 * 6)()
        self._library.stand_in_ledger(found)
        return Ledger(*found)


@functools.cache
def built() -> Driver:
    """Compile both libraries as setup.py does, once for sources that did not change. Skips the test where it cannot."""
    text = b"".join(path.read_bytes() for path in READ)
    digest = hashlib.sha256(text).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"hybrid_rl_stand_in_{os.getuid()}_{digest}"
    folder.mkdir(exist_ok=True)
    for name, source in SOURCES.items():
        target = folder / f"{name}.so"
        if not target.exists():
            made = folder / f"{name}.{os.getpid()}.so"
            command = [*_setup().region_command([str(source)], made), "-Wall", "-Wextra", "-Werror"]
            if shutil.which(command[0]) is None:
                pytest.skip("needs a C++ compiler")
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            made.replace(target)
    return Driver(folder / "region.so", str(folder / "driver.so"))


def stand_in() -> StandIn:
    """The stand-in with its usual limits: pages of 4 KiB, no fault, no end of memory."""
    made = StandIn(built())
    made.reset()
    return made


def _setup() -> Any:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("hybrid_rl_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
