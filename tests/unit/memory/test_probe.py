"""What the probe measures is there."""

from __future__ import annotations

import mmap

import psutil
import pytest
import torch

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.probe import free_device_bytes, measure, require_room

SIZE = 64 * 2**20


def is_seen_and_given_back() -> bool:
    """64 MiB of anonymous pages written; 8 MiB of slack for whatever else the process does."""
    before = measure()["process"]
    block = mmap.mmap(-1, SIZE)
    block.write(b"\1" * SIZE)
    held = measure()["process"]
    block.close()
    after = measure()["process"]
    slack = SIZE // 8
    return SIZE - slack < held - before < SIZE + slack and abs(after - before) < 2 * slack


def test_touched_memory_is_seen_and_given_back() -> None:
    """Once in five times: a thread that another test has left may take or free memory meanwhile."""
    assert any(is_seen_and_given_back() for _ in range(5))


def test_available_is_below_what_the_machine_has() -> None:
    assert 0 < measure()["available"] <= psutil.virtual_memory().total


@pytest.mark.skipif(torch.cuda.is_available(), reason="device numbers are there")
def test_no_device_no_device_numbers() -> None:
    assert set(measure()) == {"process", "available"}


def test_what_is_missing_is_told() -> None:
    require_room(2**30, 2**30)
    with pytest.raises(MemoryStateError, match=r"^it takes 3.22 GB, and 1.34 GB of .* free: 1.88 GB are missing$"):
        require_room(3 * 2**30, 5 * 2**28)
    assert free_device_bytes(torch.device("cpu")) is None
