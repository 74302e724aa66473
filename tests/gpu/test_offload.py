"""Tensors of the device that wait in pinned host memory: equal bits for whoever comes next on the stream, memory given
back to the byte, and a wake without memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hybrid_rl.errors import MemoryRefusedError
from hybrid_rl.memory.arena import HostArena
from hybrid_rl.memory.leases import Leases
from hybrid_rl.memory.offload import OffloadedTensors
from tests.gpu.device import DEVICE, cuda_only
from tests.support.inside.memory import slots_of

NUM_ELEMENTS = 8 << 20  # 32 MiB in float32: memory of its own in the caching allocator
NUM_CYCLES = 20


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(DEVICE)
    yield arena
    arena.close()


def weights(num_elements: int = NUM_ELEMENTS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(num_elements + size, generator=generator).to(DEVICE) for size in (0, 1, 4099)]


def test_what_is_launched_after_a_wake_reads_the_bytes_that_slept(arena: HostArena) -> None:
    tensors = weights()
    expected = [tensor.to("cpu", copy=True) for tensor in tensors]
    offloaded = OffloadedTensors("actor", lambda: tensors, arena)
    for cycle in range(NUM_CYCLES):
        for tensor in tensors:
            tensor.add_(1.0)  # still running when the copies are asked for
        offloaded.sleep()
        # Whoever gets the freed memory writes to it at once.
        scratch = [torch.full_like(tensor.to("meta"), float("nan"), device=DEVICE) for tensor in expected]
        del scratch
        offloaded.wake()
        read = [tensor * 1.0 for tensor in tensors]
        for tensor, before in zip(read, expected, strict=True):
            before.add_(1.0)
            assert torch.equal(tensor.cpu(), before), cycle


@cuda_only
def test_the_device_gets_its_memory_back_to_the_byte(arena: HostArena) -> None:
    tensors = weights()
    on_host = torch.ones(5)  # Adam's step counters, say
    offloaded = OffloadedTensors("optimizer", lambda: [*tensors, on_host], arena)
    torch.cuda.synchronize()
    awake = torch.cuda.memory_allocated()
    counts = set()
    for _ in range(NUM_CYCLES):
        offloaded.sleep()
        asleep = torch.cuda.memory_allocated()
        assert awake - asleep >= offloaded.num_bytes == sum(tensor.nbytes for tensor in tensors)
        torch.cuda.empty_cache()
        offloaded.wake()
        counts.add((asleep, torch.cuda.memory_allocated(), arena.num_bytes))
    assert len(counts) == 1 and counts.pop()[1] == awake and on_host.tolist() == [1.0] * 5


@cuda_only
def test_slots_are_pinned_exactly_as_large_as_needed(arena: HostArena) -> None:
    tensor = torch.ones(3 * NUM_ELEMENTS, device=DEVICE)
    arena.store("actor", [tensor.view(torch.uint8)])
    slot = slots_of(arena)["actor"]
    assert slot.bytes.is_pinned() and arena.num_bytes == tensor.nbytes
    kept = slot.bytes
    arena.close()
    assert not kept.is_pinned()


@cuda_only
def test_a_wake_without_memory_puts_all_back(arena: HostArena) -> None:
    tensors = {"actor": weights(), "critic": weights(4 * NUM_ELEMENTS)}
    expected = [tensor.cpu() for tensor in tensors["critic"]]
    leases = Leases(
        [OffloadedTensors(tag, lambda t=t: t, arena).resident() for tag, t in tensors.items()],
        give_back=torch.cuda.empty_cache,
    )
    with leases.lease({"actor"}):
        pass
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    # With what the actor leaves there is room for two of the critic's three tensors.
    room = torch.cuda.memory_reserved() + 6 * 4 * NUM_ELEMENTS
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with pytest.raises(MemoryRefusedError, match="wake of 'critic': OutOfMemoryError"), leases.lease({"critic"}):
            pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert leases.awake == {"actor"} and leases.broken is None
    with leases.lease({"critic"}):
        assert all(
            torch.equal(tensor.cpu(), before) for tensor, before in zip(tensors["critic"], expected, strict=True)
        )
