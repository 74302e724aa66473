"""Tensors that sleep in host memory: equal bits, the same objects and views, exact bytes, and failures between."""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hybrid_rl
from hybrid_rl.compat.torch import version_of
from hybrid_rl.errors import MemoryRefusedError, MemoryStateError
from hybrid_rl.memory.arena import HostArena
from hybrid_rl.memory.leases import Leases
from hybrid_rl.memory.offload import OffloadedTensors, own_memory
from hybrid_rl.memory.region import Region
from hybrid_rl.process.interrupts import clear_interrupt
from tests.support.inside.memory import copies_of, leased_tags

PAGE = mmap.PAGESIZE
PACKAGE = str(Path(hybrid_rl.__file__).parent) + os.sep


@pytest.fixture
def arena() -> HostArena:
    return HostArena("cpu")


def mixed() -> dict[str, Tensor]:
    """Views of one storage, a tied pair, an empty tensor, a scalar, odd sizes and every kind of bits."""
    torch.manual_seed(0)
    base = torch.randn(33, 7)
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
    return {
        "base": base,
        "row": base[3],
        "columns": base.t()[1::2],
        "weight": weight,
        "tied": weight,
        "alias": weight.data,
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "odd": torch.tensor([True, False, True]),
        "bits": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
    }


def bits(tensor: Tensor) -> bytes:
    # A copy: numpy() makes the memory of a tensor NumPy's as well, for good.
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def stored(tensors: dict[str, Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}.values())


# --------------------------------------------------------------------------------------------------------- equal bits


def test_everything_returns_bit_for_bit_and_nothing_is_held_meanwhile(arena: HostArena) -> None:
    tensors = mixed()
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    versions = {name: version_of(tensor) for name, tensor in tensors.items()}
    offloaded = OffloadedTensors("actor", lambda: tensors, arena)
    # 33*7 floats, 15 bfloat16, one int64, 3 bools, 4 floats: each storage once.
    assert offloaded.num_bytes == 924 + 30 + 8 + 3 + 16
    offloaded.sleep()
    assert offloaded.is_asleep and stored(tensors) == 0 and offloaded.num_bytes == 981
    offloaded.wake()
    assert not offloaded.is_asleep and stored(tensors) == 981
    assert {name: bits(tensor) for name, tensor in tensors.items()} == before
    assert {name: version_of(tensor) for name, tensor in tensors.items()} == versions
    # Views are still views, and ties are ties.
    tensors["base"].fill_(2.0)
    assert tensors["row"].tolist() == [2.0] * 7 and float(tensors["columns"].sum()) == 2.0 * 3 * 33
    with torch.no_grad():
        tensors["tied"].fill_(3.0)
    assert bool((tensors["alias"] == 3).all()) and tensors["alias"].data_ptr() == tensors["weight"].data_ptr()


def test_a_graph_that_was_recorded_before_still_works(arena: HostArena) -> None:
    weight = nn.Parameter(torch.arange(6.0))
    loss = (weight * weight).sum()
    offloaded = OffloadedTensors("actor", lambda: [weight], arena)
    offloaded.sleep()
    offloaded.wake()
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_state_that_is_made_later_and_grows_is_found_at_the_next_sleep(arena: HostArena) -> None:
    state: list[Tensor] = []
    offloaded = OffloadedTensors("optimizer", lambda: state, arena)
    offloaded.sleep()
    offloaded.wake()
    assert offloaded.num_bytes == 0 and arena.slot_bytes() == {"optimizer": PAGE}
    for size in (PAGE, 3 * PAGE, 2 * PAGE):
        state[:] = [torch.full((size,), 5, dtype=torch.uint8)]
        offloaded.sleep()
        assert offloaded.num_bytes == size
        offloaded.wake()
        assert state[0].tolist() == [5] * size
    assert arena.slot_bytes() == {"optimizer": 3 * PAGE}  # it keeps what it has


def test_200_cycles_take_the_same_bytes_to_the_byte(arena: HostArena) -> None:
    tensors = {"weights": torch.randn(300_001), "moments": torch.randn(2, 70_000, dtype=torch.float64)}
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    leases = Leases([OffloadedTensors(tag, lambda t=t: [t], arena).resident() for tag, t in tensors.items()])
    seen, resident = set(), []
    with leases.lease(tensors):
        pass
    for _ in range(200):
        with leases.lease({"weights"}):
            seen.add((stored(tensors), arena.num_bytes, *leases.resident_bytes().values()))
        with leases.lease({"moments"}):
            seen.add((stored(tensors), arena.num_bytes, *leases.resident_bytes().values()))
        resident.append(psutil.Process().memory_info().rss)
    slots = -(-1_200_004 // PAGE) * PAGE + -(-1_120_000 // PAGE) * PAGE
    # The first cycle has put only one of them to sleep.
    assert {entry for entry in seen if entry[1] == slots} == {
        (1_200_004, slots, 1_200_004, 0),
        (1_120_000, slots, 0, 1_120_000),
    }
    assert max(resident[20:]) - min(resident[20:]) < 2**20
    with leases.lease(tensors):
        assert {name: bits(tensor) for name, tensor in tensors.items()} == before


# ------------------------------------------------------------------------------------------------------------ regions


def test_a_region_gives_its_pages_back_and_keeps_its_address(arena: HostArena) -> None:
    region = Region("actor", capacity_bytes=64 * PAGE)
    tensors = [region.allocate((5 * PAGE,), torch.uint8).random_(), region.allocate((7, 3), torch.float32).normal_()]
    tensors.append(torch.randn(9))
    before, addresses = [bits(tensor) for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    with mmap.mmap(region.fd, 5 * PAGE, mmap.MAP_SHARED, mmap.PROT_READ) as of_peer:
        offloaded = OffloadedTensors("actor", lambda: tensors, arena, [region])
        assert offloaded.num_bytes == region.num_bytes + 36
        offloaded.sleep()
        assert region.occupied_bytes == 0 and tensors[2].untyped_storage().nbytes() == 0
        offloaded.wake()
        assert [bits(tensor) for tensor in tensors] == before
        assert [tensor.data_ptr() for tensor in tensors[:2]] == addresses[:2]
        assert of_peer[:] == before[0]
    region.close()


def test_a_region_that_was_used_while_it_slept_is_told_and_returns_later(arena: HostArena) -> None:
    region = Region("actor", capacity_bytes=PAGE)
    tensor = region.allocate((10,), torch.float32).fill_(4.0)
    offloaded = OffloadedTensors("actor", lambda: [tensor], arena, [region])
    offloaded.sleep()
    tensor.fill_(9.0)
    with pytest.raises(MemoryStateError, match="was used while it slept"):
        offloaded.wake()
    assert offloaded.is_asleep and region.occupied_bytes == 0
    offloaded.wake()
    assert tensor.tolist() == [4.0] * 10


# ----------------------------------------------------------------------------------------------------- what is refused


def of_numpy(_: Path) -> Tensor:
    return torch.from_numpy(np.zeros(10, dtype=np.float32))


def of_file(folder: Path) -> Tensor:
    save_file({"w": torch.zeros(10)}, folder / "w.safetensors")
    return load_file(folder / "w.safetensors")["w"]


def of_region(_: Path) -> Tensor:
    return Region("another", capacity_bytes=PAGE).allocate((10,), torch.float32)


def shared(_: Path) -> Tensor:
    return torch.zeros(10).share_memory_()


@pytest.mark.parametrize("make", [of_numpy, of_file, of_region, shared])
def test_memory_of_others_is_refused_at_once_by_name(
    arena: HostArena, make: Callable[[Path], Tensor], tmp_path: Path
) -> None:
    tensor = make(tmp_path)
    with pytest.raises(MemoryStateError, match=r"head.weight of 'actor' \(\(10,\) of torch.float32\) cannot sleep"):
        OffloadedTensors("actor", lambda: {"body": torch.zeros(3), "head.weight": tensor}, arena)


def test_a_tensor_without_memory_is_refused_at_once(arena: HostArena) -> None:
    with pytest.raises(MemoryStateError, match="tensor 1 of 'actor'.*it is on meta, not on cpu"):
        OffloadedTensors("actor", lambda: [torch.zeros(3), torch.zeros(3, device="meta")], arena)


def test_a_module_is_given_memory_of_its_own(arena: HostArena, tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0), "b": torch.ones(3)}, tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    module = nn.Module()
    module.w = nn.Parameter(loaded["w"].view(3, 4).t())
    module.head = nn.Module()
    module.head.w = module.w
    module.register_buffer("part", loaded["w"][2:5])
    module.b = nn.Parameter(torch.ones(3))
    objects, kept = [*module.parameters()], module.b.data_ptr()
    own_memory(module)
    assert [*module.parameters()] == objects and module.head.w is module.w and module.b.data_ptr() == kept
    assert module.w.tolist() == torch.arange(12.0).view(3, 4).t().tolist() and module.part.tolist() == [2.0, 3.0, 4.0]
    assert module.part.data_ptr() == module.w.data_ptr() + 8
    offloaded = OffloadedTensors("actor", lambda: [*module.parameters(), *module.buffers()], arena)
    assert offloaded.num_bytes == 48 + 12
    offloaded.sleep()
    offloaded.wake()


def test_sleeping_twice_and_waking_twice_are_refused(arena: HostArena) -> None:
    zeros = torch.zeros(3)
    offloaded = OffloadedTensors("actor", lambda: [zeros], arena)
    with pytest.raises(MemoryStateError, match="already awake"):
        offloaded.wake()
    offloaded.sleep()
    with pytest.raises(MemoryStateError, match="already asleep"):
        offloaded.sleep()


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_wake_that_fails_half_way_is_still_asleep(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException
) -> None:
    tensors = [torch.randn(n) for n in (10, 20, 30)]
    before = [bits(tensor) for tensor in tensors]
    offloaded = OffloadedTensors("actor", lambda: tensors, arena)
    offloaded.sleep()
    resize = torch.UntypedStorage.resize_

    def scarce(storage: torch.UntypedStorage, size: int) -> None:
        if size == tensors[at].numel() * 4:
            raise error
        resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", scarce)
        with pytest.raises(type(error)):
            offloaded.wake()
    assert offloaded.is_asleep and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    offloaded.wake()
    assert [bits(tensor) for tensor in tensors] == before


@pytest.mark.parametrize("failing", ["store", "release", "resize"])
def test_a_sleep_that_fails_half_way_leaves_everything_awake(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    region = Region("actor", capacity_bytes=PAGE)
    tensors = [torch.randn(10), region.allocate((10,), torch.float32).normal_(), torch.randn(30)]
    before = [bits(tensor) for tensor in tensors]
    offloaded = OffloadedTensors("actor", lambda: tensors, arena, [region])
    resize = torch.UntypedStorage.resize_

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    def fail_half_way(storage: torch.UntypedStorage, size: int) -> None:
        if storage.nbytes() == 120 and size == 0:
            raise RuntimeError("no")
        resize(storage, size)

    with monkeypatch.context() as patch:
        if failing == "store":
            patch.setattr(copies_of(arena), "out", fail)
        elif failing == "release":
            patch.setattr(Region, "release", fail)
        else:
            patch.setattr(torch.UntypedStorage, "resize_", fail_half_way)
        with pytest.raises(RuntimeError, match="no"):
            offloaded.sleep()
    assert not offloaded.is_asleep and [bits(tensor) for tensor in tensors] == before
    offloaded.sleep()
    offloaded.wake()
    assert [bits(tensor) for tensor in tensors] == before


def test_the_limit_names_who_holds_what_and_nothing_moves() -> None:
    arena = HostArena("cpu", limit_bytes=3 * PAGE)
    ones = torch.ones(10)
    small = OffloadedTensors("critic", lambda: [ones], arena)
    small.sleep()
    weights = torch.ones(2 * PAGE + 1, dtype=torch.uint8)
    large = OffloadedTensors("optimizer", lambda: [weights], arena)
    with pytest.raises(
        MemoryStateError,
        match=r"memory.host_memory is too small for optimizer: of it a rank may take 12.3 kB, but needs 16.4 kB so far "
        r"\(critic 4.10 kB, optimizer 12.3 kB\); set it to at least 16384 bytes for each rank of a host, or name fewer",
    ):
        large.sleep()
    assert not large.is_asleep and bool(weights.all()) and arena.num_bytes == PAGE
    weights.untyped_storage().resize_(2 * PAGE)
    weights.set_(weights.untyped_storage())  # now it fits, exactly
    large.sleep()
    assert arena.num_bytes == arena.limit_bytes


def test_leases_put_everything_back_if_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = HostArena("cpu", limit_bytes=2 * PAGE)
    tensors = {"actor": torch.randn(PAGE // 4), "critic": torch.randn(PAGE // 2), "reward_models": torch.randn(7)}
    before = {tag: bits(tensor) for tag, tensor in tensors.items()}
    leases = Leases(OffloadedTensors(tag, lambda t=t: [t], arena).resident() for tag, t in tensors.items())
    with pytest.raises(MemoryRefusedError, match="sleep of 'critic': .*memory.host_memory"), leases.lease({"actor"}):
        pass
    assert stored(tensors) == 3 * PAGE + 28 and leases.awake == set(tensors)
    with leases.lease({"critic"}):
        assert stored(tensors) == 2 * PAGE
    with monkeypatch.context() as patch:
        resize = torch.UntypedStorage.resize_

        def scarce(storage: torch.UntypedStorage, size: int) -> None:
            if size == 28:
                raise torch.OutOfMemoryError("CUDA out of memory")
            resize(storage, size)

        patch.setattr(torch.UntypedStorage, "resize_", scarce)
        refusal = r"wake of 'reward_models': OutOfMemoryError: .* In memory were actor 4.10 kB, critic 8.19 kB"
        with pytest.raises(MemoryRefusedError, match=refusal), leases.lease(tensors):
            pass
        assert leases.awake == {"critic"} and stored(tensors) == 2 * PAGE
    with leases.lease(tensors):
        assert {tag: bits(tensor) for tag, tensor in tensors.items()} == before


def test_host_memory_that_cannot_be_had_leaves_everything_awake(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    weights = torch.ones(10)
    offloaded = OffloadedTensors("actor", lambda: [weights], arena)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryStateError, match="no 4.10 kB to be had there .*beside nothing else"):
        offloaded.sleep()
    assert not offloaded.is_asleep and weights.tolist() == [1.0] * 10


def test_a_closed_arena_holds_nothing(arena: HostArena) -> None:
    ones = torch.ones(10)
    offloaded = OffloadedTensors("actor", lambda: [ones], arena)
    offloaded.sleep()
    arena.close()
    arena.close()
    assert arena.num_bytes == 0
    with pytest.raises(MemoryStateError, match="holds nothing of 'actor', but 40 bytes were asked for"):
        offloaded.wake()
    assert offloaded.is_asleep


# --------------------------------------------------------------------------------------------------------- interrupts


def test_ctrl_c_twice_at_any_line_leaves_one_state(arena: HostArena) -> None:
    """Between any two lines of a lease that swaps residents, outside of `__exit__`, which has only one."""
    tensors = {"actor": torch.randn(9), "critic": torch.randn(2, 3)}
    before = {tag: bits(tensor) for tag, tensor in tensors.items()}
    offloaded = {tag: OffloadedTensors(tag, lambda t=t: [t], arena) for tag, t in tensors.items()}
    leases = Leases(item.resident() for item in offloaded.values())
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent_at, lines = 0, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "__exit__":
            return None
        if event == "line":
            lines += 1
            if lines in (sent_at, sent_at + 1):
                signal.raise_signal(signal.SIGINT)
        return trace

    def is_interrupted(at: int) -> bool:
        nonlocal sent_at, lines
        with leases.lease(tensors):
            sent_at, lines = at, 0
        tracer = sys.gettrace()
        sys.settrace(trace)
        try:
            with leases.lease({("actor", "critic")[sent_at % 2]}):
                return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(tracer)

    try:
        for at in (-2, -3):  # both ways; the arena has made its slots then
            assert not is_interrupted(at) and lines > 100
        for at in range(1, 10**6):
            if not is_interrupted(at):
                break
            assert leases.awake == {tag for tag, item in offloaded.items() if not item.is_asleep}
            assert leases.broken is None and leased_tags(leases) is None
        assert at > lines > 100
    finally:
        signal.signal(signal.SIGINT, handler)
        clear_interrupt()
    with leases.lease(tensors):
        assert {tag: bits(tensor) for tag, tensor in tensors.items()} == before
