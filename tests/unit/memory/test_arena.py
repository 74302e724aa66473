"""The arena's calls on CUDA, in order, with a stand-in for the runtime: copies, waits, pinning."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.arena import HostArena

PAGE = mmap.PAGESIZE


class Runtime:
    """What is called, in order. A stream's copies are those that are made while it is current."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pinned: dict[int, int] = {}
        self.status = 0
        runtime = self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                runtime.log.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                runtime.log.append(f"host waits for {self.name}")

        @contextlib.contextmanager
        def stream(made: Stream) -> Iterator[None]:
            runtime.log.append(f"on {made.name}")
            yield
            runtime.log.append(f"off {made.name}")

        copy = torch.Tensor.copy_

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            runtime.log.append(f"copy {source.numel()}")
            return copy(target, source)

        current = Stream("current")
        patch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
        patch.setattr(torch.cuda, "current_stream", lambda device: current)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch.cuda, "check_error", self.check_error)
        patch.setattr(torch.Tensor, "copy_", copy_)

    def check_error(self, status: int) -> None:
        if status:
            raise RuntimeError("out of memory (2)")

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.status:
            self.pinned[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(f"unpin {self.pinned.pop(address)}")
        return 0


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with pytest.MonkeyPatch.context() as patch:
        yield Runtime(patch)


def numbers(num_bytes: int) -> Any:
    return torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)


def test_the_host_waits_for_what_it_frees_and_not_for_what_comes_back(runtime: Runtime) -> None:
    arena = HostArena("cuda:0")
    tensors = [numbers(100), numbers(65)]
    arena.store("actor", tensors)
    assert runtime.log == [
        "side waits for current", "on side", "copy 100", "copy 65", "off side", "host waits for side"
    ]  # fmt: skip
    assert list(runtime.pinned.values()) == [PAGE] and not any(address % PAGE for address in runtime.pinned)
    runtime.log.clear()
    returned = [torch.zeros_like(tensor) for tensor in tensors]
    arena.load("actor", returned)
    assert runtime.log == [
        "side waits for current", "on side", "copy 100", "copy 65", "off side", "current waits for side"
    ]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(tensors, returned, strict=True))


def test_a_slot_that_grows_is_unpinned_after_its_last_copy(runtime: Runtime) -> None:
    arena = HostArena("cuda:0")
    arena.store("actor", [numbers(PAGE)])
    arena.store("critic", [numbers(5)])
    arena.load("actor", [numbers(PAGE)])
    runtime.log.clear()
    arena.store("actor", [numbers(PAGE + 1)])
    assert runtime.log[:2] == ["host waits for side", f"unpin {PAGE}"]
    assert sorted(runtime.pinned.values()) == [PAGE, 2 * PAGE]
    assert arena.slot_bytes() == {"actor": 2 * PAGE, "critic": PAGE} and arena.num_bytes == 3 * PAGE
    arena.store("actor", [numbers(1)])
    runtime.log.clear()
    arena.close()
    assert runtime.log == ["host waits for side", f"unpin {PAGE}", f"unpin {2 * PAGE}"] and runtime.pinned == {}


def test_an_arena_that_is_dropped_unpins(runtime: Runtime) -> None:
    HostArena("cuda:0").store("actor", [numbers(5)])
    gc.collect()
    assert runtime.pinned == {}


def test_memory_that_cannot_be_pinned_is_refused(runtime: Runtime) -> None:
    arena = HostArena("cuda:0")
    arena.store("critic", [numbers(5)])
    runtime.status = 2
    with pytest.raises(MemoryStateError, match=r"'actor' .* no 4.10 kB .*out of memory.*beside critic 4.10 kB;"):
        arena.store("actor", [numbers(5)])
    assert arena.slot_bytes() == {"critic": PAGE}
