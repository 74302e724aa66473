"""What every region promises: in host memory, and on a GPU over a stand-in of its driver. tests/gpu/test_region.py runs
the same tests on a real one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.arena import HostArena
from hybrid_rl.memory.cuda_region import CudaRegion
from hybrid_rl.memory.offload import OffloadedTensors
from hybrid_rl.memory.region import Region, TensorRegion
from tests.support.cuda.cuda_stand_in import StandIn, stand_in

MIB = 2**20
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


@dataclass
class Kind:
    """How to make regions of a kind, and the bytes of memory that all of them take by the system's account, which may
    err by `slack` bytes. unit: bytes of a tensor of some size. reads_when_gone: whether tensors of a closed region may
    be read."""

    make: Callable[..., TensorRegion]
    taken_bytes: Callable[[], int]
    unit: int = MIB
    slack: int = 0
    reads_when_gone: bool = False

    def takes(self, num_bytes: int) -> bool:
        """Whether all regions take so many bytes."""
        return abs(self.taken_bytes() - num_bytes) <= self.slack


def host() -> Kind:
    def taken() -> int:
        files = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and "hybrid_rl_" in os.readlink(fd)]
        return sum({(status := fd.stat()).st_ino: status.st_blocks * 512 for fd in files}.values())

    def make(tag: str = "test", capacity_bytes: int = 16 * MIB) -> Region:
        return Region(tag, capacity_bytes=capacity_bytes)

    return Kind(make, taken, reads_when_gone=True)


def cuda(standing_in: StandIn) -> Kind:
    def make(tag: str = "test", capacity_bytes: int = 16 * MIB) -> CudaRegion:
        return CudaRegion(
            tag, capacity_bytes=capacity_bytes, device="cpu", chunk_bytes=MIB // 2, driver=standing_in.driver
        )

    return Kind(make, lambda: standing_in.ledger().physical_bytes)


@pytest.fixture(params=["host", "cuda"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return host() if request.param == "host" else cuda(stand_in())


def filled(region: TensorRegion, num_bytes: int, value: int = 7) -> torch.Tensor:
    return region.allocate((num_bytes,), torch.uint8).fill_(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_are_zero_aligned_and_apart(kind: Kind, dtype: torch.dtype) -> None:
    region = kind.make()
    tensors = [region.allocate(shape, dtype) for shape in ((3, 5), (), (1,), (2, 0, 3), (65,))]
    assert [tuple(t.shape) for t in tensors] == [(3, 5), (), (1,), (2, 0, 3), (65,)]
    assert all(t.dtype == dtype and t.is_contiguous() and t.device == region.device for t in tensors)
    held = [t for t in tensors if t.numel()]
    assert all(t.data_ptr() % 64 == 0 and not t.view(torch.uint8 if t.dim() else t.dtype).any() for t in held)
    ends = [t.data_ptr() + t.numel() * t.itemsize for t in held]
    assert all(end <= after.data_ptr() for end, after in zip(ends[:-1], held[1:], strict=True))
    # 15, 1, 1 and 65 elements, each rounded up to whole 64 bytes.
    assert region.num_bytes == sum(-(-n * dtype.itemsize // 64) * 64 for n in (15, 1, 1, 65))


def test_a_tensor_saves_itself_and_not_its_region(kind: Kind, tmp_path: Path) -> None:
    region = kind.make()
    filled(region, MIB)
    path = tmp_path / "tensor.pt"
    torch.save(filled(region, 100, 3), path)
    assert path.stat().st_size < 10_000
    assert torch.load(path).tolist() == [3] * 100


def test_tensors_are_found_in_their_region(kind: Kind) -> None:
    region, other = kind.make(), kind.make("other")
    first, second = filled(region, 100, 1), filled(region, 64, 2)
    # 100 bytes, rounded up to whole 64.
    assert (region.offset_of(first), region.offset_of(second)) == (0, 128)
    assert region.offset_of(second[5:].view(59)) == 133
    assert region.offset_of(first.view(10, 10).T) == 0
    for elsewhere in (torch.zeros(3), filled(other, 100), first[:0], torch.empty(3, device="meta")):
        assert region.offset_of(elsewhere) is None
    region.close()
    with pytest.raises(MemoryStateError, match="region 'test' is closed and cannot be searched"):
        region.offset_of(first)


def test_what_does_not_fit_is_refused_and_changes_nothing(kind: Kind) -> None:
    region = kind.make("kv", capacity_bytes=8192)
    most = region.capacity_bytes  # a whole number of pages, which may be larger than 8192
    region.allocate((1,), torch.int64)
    with pytest.raises(
        MemoryStateError, match=rf"'kv' holds 64 of {most} bytes; a tensor \({most // 4},\) of torch.float32"
    ):
        region.allocate((most // 4,), torch.float32)
    assert region.allocate((most // 4 - 16,), torch.float32).numel() == most // 4 - 16 and region.num_bytes == most
    with pytest.raises(MemoryStateError, match=rf"holds {most} of {most} bytes; a tensor \(1,\) of torch.uint8"):
        region.allocate((1,), torch.uint8)


def test_unused_capacity_costs_nothing(kind: Kind) -> None:
    before = kind.taken_bytes()
    region = kind.make(capacity_bytes=64 * kind.unit)
    assert kind.takes(before)
    filled(region, 4 * kind.unit)
    assert kind.takes(before + 4 * kind.unit)


def test_release_gives_the_memory_back_and_restore_gives_zeros_at_the_same_place(kind: Kind) -> None:
    size = 2 * kind.unit
    region = kind.make(capacity_bytes=2 * size)
    before = kind.taken_bytes()
    first, second = filled(region, size), filled(region, size, 9)
    addresses = first.data_ptr(), second.data_ptr()
    assert kind.takes(before + 2 * size) and region.occupied_bytes == 2 * size
    for _ in range(3):
        region.release()
        assert region.is_asleep and kind.takes(before) and region.num_bytes == 2 * size
        region.restore()
        assert not region.is_asleep and not first.any() and not second.any()
        first.fill_(5)
        second.fill_(6)
        assert (first.sum().item(), second.sum().item()) == (5 * size, 6 * size)
        assert (first.data_ptr(), second.data_ptr()) == addresses and kind.takes(before + 2 * size)


def test_a_region_that_slept_goes_on_where_it_was(kind: Kind) -> None:
    region = kind.make()
    first = filled(region, 100)
    region.release()
    region.restore()
    second = filled(region, MIB, 3)
    assert region.offset_of(second) == 128 and not first.any() and second.sum() == 3 * MIB


def test_an_empty_region_sleeps_too(kind: Kind) -> None:
    region = kind.make()
    region.release()
    region.restore()
    assert filled(region, 4).tolist() == [7] * 4


def test_twice_is_as_good_as_once_and_nobody_allocates_asleep(kind: Kind) -> None:
    region = kind.make("kv")
    tensor = filled(region, 10)
    region.restore()
    assert tensor.tolist() == [7] * 10 and not region.is_asleep
    region.release()
    region.release()
    assert region.occupied_bytes == 0
    with pytest.raises(MemoryStateError, match="'kv' is asleep; wake it before allocating"):
        region.allocate((1,), torch.uint8)
    region.restore()
    region.restore()
    assert tensor.tolist() == [0] * 10 and region.num_bytes == 64


def test_the_content_of_a_region_waits_in_host_memory(kind: Kind) -> None:
    region = kind.make()
    first, second = filled(region, 100, 3), region.allocate((7, 5), torch.float32).fill_(0.25)
    assert region.content().shape == (128 + 192,) and region.content().data_ptr() == first.data_ptr()
    offloaded = OffloadedTensors("weights", lambda: [first, second], HostArena(region.device), [region])
    offloaded.sleep()
    assert region.is_asleep and region.occupied_bytes == 0
    offloaded.wake()
    assert first.tolist() == [3] * 100 and second.tolist() == [[0.25] * 5] * 7


@pytest.mark.parametrize("asleep", [False, True])
def test_close_gives_everything_back(kind: Kind, asleep: bool) -> None:
    before = kind.taken_bytes()
    region = kind.make("kv", capacity_bytes=2 * kind.unit)
    tensor = filled(region, 2 * kind.unit)
    if asleep:
        region.release()
    region.close()
    region.close()
    assert kind.takes(before)
    assert not kind.reads_when_gone or not tensor.any()
    for call in (region.restore, region.release, lambda: region.allocate((1,), torch.uint8)):
        with pytest.raises(MemoryStateError, match="'kv' is closed"):
            call()


def test_memory_goes_with_the_last_that_looks_at_it(kind: Kind) -> None:
    gc.collect()
    before = kind.taken_bytes()
    num_files = len(os.listdir("/proc/self/fd"))
    region = kind.make("gone", capacity_bytes=2 * kind.unit)
    tensor = filled(region, 2 * kind.unit)
    view = tensor[5:]
    del region, tensor
    gc.collect()
    assert view.sum() == 7 * (2 * kind.unit - 5)
    del view
    gc.collect()
    assert kind.takes(before)
    assert kind.slack or len(os.listdir("/proc/self/fd")) == num_files  # CUDA opens files as it likes
