"""The count of live storages that plans are held to: against sums by hand, and against PyTorch's own record of every
allocation."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.support.memory.measured_memory import Measured, MeasuredMemory

KB = 1000


def kilobytes(number: int) -> Tensor:
    return torch.zeros(number * KB, dtype=torch.uint8)


def test_peaks_of_phases_by_hand() -> None:
    kept: list[Tensor] = []
    with MeasuredMemory(lambda: {"kept": kept}) as memory:
        with memory.phase("one"):
            kept.append(kilobytes(10))
            first, second = kilobytes(4), kilobytes(3)
            view = first[1000:].view(3, KB)
            del first, second  # 4 stay, for the view
            third = kilobytes(2)
            del view, third
        with memory.phase("two"):
            kept.append(kilobytes(1))
    assert memory.phases["one"] == Measured(17 * KB, {"kept": 10 * KB}, {"kept": 10 * KB})
    assert memory.phases["one"].transient_bytes == 7 * KB
    assert memory.phases["two"] == Measured(11 * KB, {"kept": 11 * KB}, {"kept": 11 * KB})


def test_a_phase_inside_another_is_not_part_of_it() -> None:
    with MeasuredMemory(dict) as memory, memory.phase("outer"):
        kilobytes(7)
        with memory.phase("inner"):
            kilobytes(9)
        kilobytes(5)
    assert {name: found.peak_bytes for name, found in memory.phases.items()} == {"outer": 7 * KB, "inner": 9 * KB}


def test_storages_that_change_their_size_are_followed() -> None:
    """As FSDP frees what it has gathered, and as residents go to host memory."""
    moved, host = kilobytes(8), kilobytes(8)
    with MeasuredMemory(lambda: {"moved": [moved], "host": [host]}, on_host=["host"]) as memory:
        assert memory.look() == Measured(8 * KB, {"moved": 8 * KB}, {"moved": 8 * KB})
        moved.untyped_storage().resize_(0)
        assert memory.look().peak_bytes == 0
        with memory.phase("awake"):
            moved.untyped_storage().resize_(8 * KB)
            moved.resize_(9 * KB)
            moved.resize_(2 * KB)  # which gives nothing back
            moved.untyped_storage().resize_(3 * KB)
    assert memory.phases["awake"].residents == {"moved": 9 * KB}


def test_what_was_there_before_counts_as_soon_as_it_is_used() -> None:
    before = kilobytes(6)
    with MeasuredMemory(dict) as memory, memory.phase("use"):
        before.add_(1)
    assert memory.phases["use"].peak_bytes == 6 * KB


def test_gradients_are_seen_when_they_are_most() -> None:
    """Weights of 4,000 and 400 bytes: the gradient of the last layer comes first, and both are there at the end."""
    model = nn.Sequential(nn.Linear(100, 10, bias=False), nn.Linear(10, 10, bias=False))
    found = lambda: {"gradients": [p.grad for p in model.parameters() if p.grad is not None]}  # noqa: E731
    with MeasuredMemory(found) as memory, memory.phase("backward"):
        model(torch.ones(1, 100)).sum().backward()
        torch.zeros(KB, dtype=torch.uint8)
    assert memory.phases["backward"].largest == {"gradients": 4400}


def test_what_lasts_is_known_after_it_lost_its_name() -> None:
    """A buffer that an optimizer still reads when its parameter has let go of it."""
    named = [kilobytes(3)]
    held = list(named)
    with MeasuredMemory(lambda: {"named": named}, lasting=["named"]) as memory, memory.phase("step"):
        named.clear()
        kilobytes(1)
        held.clear()
        kilobytes(2)
    assert memory.phases["step"].residents == {"named": 3 * KB} and memory.look().peak_bytes == 0


def of_profiler(events: list) -> int:
    """The most bytes at a time beyond those at the start, from allocations and frees in their order."""
    total = most = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def test_an_update_takes_what_the_profiler_of_pytorch_saw() -> None:
    """It records every allocation of the allocator; inside kernels as well, which are small here."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def update() -> None:
        model(torch.ones(200, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    update()  # the moments
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        update()
    expected = of_profiler(recorded.profiler.kineto_results.events())  # type: ignore[union-attr]
    held = lambda: {"held": [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]}  # noqa: E731
    with MeasuredMemory(held) as memory:
        before = memory.look().peak_bytes
        with memory.phase("update"):
            update()
    assert memory.phases["update"].peak_bytes - before == pytest.approx(expected, rel=0.002)
    assert expected > 5_000_000
