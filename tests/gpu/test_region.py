"""Regions of GPU memory on the real driver: the contract of all regions, graphs that outlive a night, and lack of
memory."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch

from hybrid_rl.engines.sampling import choose_plain
from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.cuda_region import CudaRegion
from tests.gpu.device import DEVICE, cuda_only
from tests.support.cuda.cuda_stand_in import stand_in
from tests.unit.memory.test_region_contract import *  # noqa: F403
from tests.unit.memory.test_region_contract import Kind, cuda

MIB = 2**20
SECONDS = timedelta(seconds=120)


def taken_bytes() -> int:
    """What others than PyTorch's allocator hold of the device."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@pytest.fixture
def kind() -> Kind:
    if DEVICE != "cuda":
        return cuda(stand_in())

    def make(tag: str = "test", capacity_bytes: int = 1024 * MIB) -> CudaRegion:
        return CudaRegion(tag, capacity_bytes=capacity_bytes, device="cuda", chunk_bytes=32 * MIB)

    torch.zeros(1, device="cuda").sum().item()  # the context and the first kernels
    # The driver takes tables of pages, and code of kernels that are loaded late.
    return Kind(make, taken_bytes, unit=64 * MIB, slack=32 * MIB)


@cuda_only
def test_a_graph_computes_on_after_a_night() -> None:
    region = CudaRegion("test", capacity_bytes=8 * MIB, device="cuda")
    source = region.allocate((1024, 1024), torch.float32)
    result = torch.zeros(1024, 1024, device="cuda")
    source.fill_(1)
    result.copy_(source * 2 + 1)  # kernels are loaded outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result.copy_(source * 2 + 1)
    for value in range(5):
        region.release()
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").fill_(255)  # somebody has the memory meanwhile
        region.restore()
        graph.replay()
        assert result.sum().item() == result.numel()  # of zeros
        source.fill_(value)
        graph.replay()
        assert result.sum().item() == (2 * value + 1) * result.numel()


@cuda_only
def test_kernels_of_other_streams_are_waited_for() -> None:
    region = CudaRegion("test", capacity_bytes=256 * MIB, device="cuda")
    tensor = region.allocate((256 * MIB,), torch.uint8)
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            for value in range(200):
                tensor.fill_(value)
        region.release()  # while they run
        region.restore()
        assert not tensor.any()
    torch.cuda.synchronize()


@cuda_only
def test_too_little_memory_to_restore_leaves_the_region_released() -> None:
    region = CudaRegion("kv_cache", capacity_bytes=2048 * MIB, device="cuda")
    tensor = region.allocate((2048 * MIB,), torch.uint8).fill_(7)
    address = tensor.data_ptr()
    region.release()
    before = taken_bytes()
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 1024 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(MemoryStateError, match=r"'kv_cache' cannot wake: cuMemCreate of \d+ bytes.*bytes are free on"):
        region.restore()
    assert region.is_asleep and region.occupied_bytes == 0
    assert abs(taken_bytes() - before) < 32 * MIB
    del hog
    region.restore()  # PyTorch has kept what it freed, and gives it back
    assert tensor.data_ptr() == address and not tensor.any()


@cuda_only
def test_copies_and_kernels_of_triton_take_memory_of_a_region() -> None:
    """Both ask the driver what a pointer is."""
    region = CudaRegion("test", capacity_bytes=8 * MIB, device="cuda")
    logits = region.allocate((4, 1000), torch.float32)
    logits.copy_(torch.arange(4000.0).view(4, 1000))
    chosen = torch.zeros(4, 2, dtype=torch.int32, device="cuda")
    uniform = torch.full((4,), 0.5, dtype=torch.float64, device="cuda")
    choose_plain(logits, torch.ones(4, device="cuda"), uniform, chosen)
    assert chosen[:, 0].tolist() == [999] * 4  # of probability 1 - 1/e, the others below one half
    assert logits.cpu().sum().item() == logits.sum(dtype=torch.float64).item() == 4000 * 3999 / 2
