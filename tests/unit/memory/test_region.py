"""Regions in host memory, beyond what test_region_contract.py holds of all: files that others map, and what is found
out when they wake."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.region import Region
from tests.support.inside.memory import release_with

MIB = 2**20


def filled(region: Region, num_bytes: int, value: int = 7) -> torch.Tensor:
    return region.allocate((num_bytes,), torch.uint8).fill_(value)


def test_pages_are_had_when_they_are_written() -> None:
    region = Region("test", capacity_bytes=64 * MIB)
    tensor = region.allocate((64 * MIB,), torch.uint8)
    assert region.occupied_bytes == 0 and region.num_bytes == 64 * MIB
    tensor[:: mmap.PAGESIZE] = 1
    assert region.occupied_bytes == 64 * MIB


def test_another_process_that_maps_the_file_sees_the_same_memory() -> None:
    region = Region("test", capacity_bytes=mmap.PAGESIZE)
    filled(region, 100, 1)
    tensor = filled(region, 64)
    with mmap.mmap(os.dup(region.fd), mmap.PAGESIZE) as peer:
        assert region.offset_of(tensor) == 128 and peer[128:192] == b"\7" * 64
        region.release()
        region.restore()
        assert peer[128:192] == bytes(64)
        tensor[3] = 9
        assert peer[128:132] == b"\0\0\0\x09"


@pytest.mark.parametrize("use", [lambda tensor: tensor.fill_(1), lambda tensor: tensor.sum()], ids=["write", "read"])
def test_waking_finds_out_what_was_used_asleep(use: Callable[[torch.Tensor], object]) -> None:
    region = Region("kv", capacity_bytes=mmap.PAGESIZE)
    tensor = filled(region, 10)
    region.release()
    use(tensor)
    with pytest.raises(MemoryStateError, match=f"'kv' was used while it slept and takes {mmap.PAGESIZE} bytes"):
        region.restore()
    assert region.is_asleep
    region.release()
    region.restore()
    assert tensor.tolist() == [0] * 10


def test_a_release_that_the_system_refuses_leaves_the_region_awake() -> None:
    region = Region("kv", capacity_bytes=mmap.PAGESIZE)
    filled(region, 10)

    def fail() -> None:
        raise OSError(1, "Operation not permitted")

    release_with(region, fail)
    with pytest.raises(MemoryStateError, match="'kv': its pages could not be released .*not permitted"):
        region.release()
    assert not region.is_asleep


def mappings(tag: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"hybrid_rl_{tag} ")


def test_mapping_and_file_go_with_the_last_that_looks_at_them() -> None:
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))
    region = Region("gone", capacity_bytes=MIB)
    tensor = filled(region, MIB)
    assert mappings("gone") == 1
    del region
    gc.collect()
    assert mappings("gone") == 1 and tensor.sum() == 7 * MIB
    del tensor
    gc.collect()
    assert mappings("gone") == 0
    assert len(os.listdir("/proc/self/fd")) == num_files
