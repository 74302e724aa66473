"""Regions in host memory, beyond what test_region_contract.py holds of all: files that others map, and what sleeping
does with the content."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybrid_rl.errors import MemoryStateError
from tests.support.engines.sleeping_region import SleepingRegion
from tests.support.inside.memory import mapping_of, release_with, set_mapping

MIB = 2**20
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def filled(region: SleepingRegion, num_bytes: int, value: int = 7) -> torch.Tensor:
    return region.allocate((num_bytes,), torch.uint8).fill_(value)


# ------------------------------------------------------------------------------------------------------- allocation


def test_the_offset_of_a_tensor_is_its_place_in_the_file() -> None:
    region = SleepingRegion("test")
    filled(region, 100, 1)
    second = filled(region, 64, 2)
    assert region.offset_of(second) == 128 and os.pread(region.fd, 3, 128) == bytes([2, 2, 2])


def test_an_unused_region_costs_nothing() -> None:
    region = SleepingRegion("test")
    tensor = region.allocate((64 * MIB,), torch.uint8)
    assert region.occupied_bytes == 0 and region.num_bytes == 64 * MIB
    tensor[:: mmap.PAGESIZE] = 1
    assert region.occupied_bytes == 64 * MIB


# ------------------------------------------------------------------------------------------------------------ sleep


def test_offload_brings_every_byte_back_to_its_place() -> None:
    region = SleepingRegion("test")
    generator = torch.Generator().manual_seed(3)
    tensors = [
        region.allocate(shape, dtype).copy_(torch.randint(0, 2, shape, generator=generator))
        for shape in ((1000, 33), (7,), (), (0,))
        for dtype in DTYPES
    ]
    before = [(t.data_ptr(), t.clone()) for t in tensors]
    for _ in range(3):
        region.sleep("offload")
        assert region.occupied_bytes == 0
        region.wake()
        for tensor, (address, content) in zip(tensors, before, strict=True):
            assert tensor.data_ptr() == address
            assert torch.equal(tensor.view(-1).view(torch.uint8), content.view(-1).view(torch.uint8))


def test_another_process_that_maps_the_file_sees_the_same_memory() -> None:
    region = SleepingRegion("test")
    tensor = filled(region, 100)
    peer = mmap.mmap(os.dup(region.fd), mmap.PAGESIZE)
    assert peer[:100] == b"\7" * 100
    region.sleep("discard")
    region.wake()
    assert peer[:100] == bytes(100)
    tensor.fill_(7)
    tensor[3] = 9
    assert peer[:5] == b"\7\7\7\x09\7"
    peer.close()


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("policy", ["discard", "offload"])
def test_nobody_sleeps_or_wakes_twice_nor_allocates_asleep(policy: str) -> None:
    region = SleepingRegion("kv")
    tensor = filled(region, 10)
    with pytest.raises(MemoryStateError, match="'kv' is already awake"):
        region.wake()
    region.sleep(policy)  # type: ignore[arg-type]
    with pytest.raises(MemoryStateError, match="'kv' is already asleep"):
        region.sleep(policy)  # type: ignore[arg-type]
    with pytest.raises(MemoryStateError, match="'kv' is asleep; wake it before allocating"):
        region.allocate((1,), torch.uint8)
    region.wake()
    assert tensor.tolist() == [7 if policy == "offload" else 0] * 10


@pytest.mark.parametrize("use", [lambda tensor: tensor.fill_(1), lambda tensor: tensor.sum()], ids=["write", "read"])
@pytest.mark.parametrize("policy", ["discard", "offload"])
def test_waking_finds_out_what_was_used_asleep(policy: str, use: Callable[[torch.Tensor], object]) -> None:
    region = SleepingRegion("kv")
    tensor = filled(region, 10)
    region.sleep(policy)  # type: ignore[arg-type]
    use(tensor)
    with pytest.raises(MemoryStateError, match=f"'kv' was used while it slept and takes {mmap.PAGESIZE} bytes"):
        region.wake()
    region.wake()
    assert tensor.tolist() == [7 if policy == "offload" else 0] * 10


def test_an_unknown_policy_moves_nothing() -> None:
    region = SleepingRegion("kv")
    tensor = filled(region, 10)
    with pytest.raises(ValueError, match="policy='keep'"):
        region.sleep("keep")  # type: ignore[arg-type]
    assert not region.is_asleep and tensor.sum() == 70


def refuse(region: SleepingRegion, *, after_losing: int) -> None:
    """The system releases the first bytes and then reports an error."""

    def fail() -> None:
        mapping_of(region)[:after_losing] = bytes(after_losing)
        raise OSError(1, "Operation not permitted")

    release_with(region, fail)


def test_offload_that_the_system_refuses_is_rolled_back() -> None:
    region = SleepingRegion("kv")
    tensor = filled(region, 2 * mmap.PAGESIZE)
    refuse(region, after_losing=mmap.PAGESIZE)
    with pytest.raises(MemoryStateError, match="not permitted.*stays awake with its content"):
        region.sleep("offload")
    assert not region.is_asleep and bool((tensor == 7).all())


def test_discard_that_the_system_refuses_says_that_the_content_is_undefined() -> None:
    region = SleepingRegion("kv")
    filled(region, 10)
    refuse(region, after_losing=5)
    with pytest.raises(MemoryStateError, match="content is undefined"):
        region.sleep("discard")
    assert not region.is_asleep


def test_no_memory_for_the_copy_and_nothing_has_moved() -> None:
    region = SleepingRegion("kv")
    tensor = filled(region, 10)
    mapping = mapping_of(region)

    class Full:
        def __getitem__(self, _: slice) -> bytes:
            raise MemoryError

    set_mapping(region, Full())
    with pytest.raises(MemoryStateError, match="no memory for a copy of its 64 bytes; it stays awake"):
        region.sleep("offload")
    set_mapping(region, mapping)
    assert not region.is_asleep and tensor.sum() == 70
    region.sleep("offload")
    region.wake()
    assert tensor.sum() == 70


# ------------------------------------------------------------------------------------------------------------- close


@pytest.mark.parametrize("asleep", [False, True])
def test_close_gives_everything_back_and_tensors_stay_readable(asleep: bool) -> None:
    region = SleepingRegion("kv")
    tensor = filled(region, MIB)
    copy = os.dup(region.fd)
    if asleep:
        region.sleep("offload")
    region.close()
    region.close()
    assert os.fstat(copy).st_blocks == 0 and not tensor.any()
    for call in (region.wake, lambda: region.sleep("discard"), lambda: region.allocate((1,), torch.uint8)):
        with pytest.raises(MemoryStateError, match="'kv' is closed"):
            call()
    os.close(copy)


def mappings(tag: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"hybrid_rl_{tag} ")


def test_mapping_and_file_go_with_the_last_that_looks_at_them() -> None:
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))
    region = SleepingRegion("gone")
    tensor = filled(region, MIB)
    assert mappings("gone") == 1
    del region
    gc.collect()
    assert mappings("gone") == 1 and tensor.sum() == 7 * MIB
    del tensor
    gc.collect()
    assert mappings("gone") == 0
    assert len(os.listdir("/proc/self/fd")) == num_files
