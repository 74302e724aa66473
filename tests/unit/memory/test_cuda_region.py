"""Regions of GPU memory over a stand-in of the driver: what can fail fails, at every call, and nothing leaks."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.cuda_driver import Driver, DriverError
from hybrid_rl.memory.cuda_region import CudaRegion
from tests.support.cuda.cuda_stand_in import StandIn, stand_in

PAGE = 4096
FAULT = 700  # CUDA_ERROR_ILLEGAL_ADDRESS: what a device says after a kernel went wrong


@pytest.fixture
def standing_in() -> Iterator[StandIn]:
    made = stand_in()
    yield made
    made.reset()
    gc.collect()
    assert made.ledger().is_empty, made.ledger()


def region_of(standing_in: StandIn, num_pages: int = 8, tag: str = "kv") -> CudaRegion:
    """Pieces of two pages."""
    return CudaRegion(
        tag,
        capacity_bytes=num_pages * PAGE,
        device="cpu",
        chunk_bytes=2 * PAGE,
        driver=standing_in.driver,
    )


def pages(region: CudaRegion, count: int, value: int = 7) -> Tensor:
    return region.allocate((count * PAGE,), torch.uint8).fill_(value)


# ------------------------------------------------------------------------------------------------------------ growth


def test_memory_is_had_in_pieces_as_tensors_need_it(standing_in: StandIn) -> None:
    region = region_of(standing_in)
    standing_in.calls()
    first = pages(region, 3)
    assert standing_in.calls()["cuMemCreate"] == 2 and region.occupied_bytes == 3 * PAGE
    pages(region, 1)
    assert standing_in.calls()["cuMemCreate"] == 1 and region.occupied_bytes == 4 * PAGE
    region.allocate((1,), torch.uint8)
    region.allocate((PAGE - 64,), torch.uint8)  # the same page
    assert standing_in.calls()["cuMemCreate"] == 1 and region.occupied_bytes == 5 * PAGE
    assert first.sum() == 7 * 3 * PAGE
    region.release()
    region.restore()
    assert standing_in.calls()["cuMemCreate"] == 4 and region.occupied_bytes == 5 * PAGE


def test_a_device_with_larger_pages_rounds_up(standing_in: StandIn) -> None:
    standing_in.reset(granularity=2**16)
    region = region_of(standing_in)
    assert region.capacity_bytes == 2**16
    pages(region, 1)
    assert region.occupied_bytes == 2**16
    region.close()
    del region
    gc.collect()


def test_too_little_memory_for_the_last_piece_undoes_the_others(standing_in: StandIn) -> None:
    region = region_of(standing_in)
    first = pages(region, 2)
    standing_in.reset(budget=5 * PAGE)
    with pytest.raises(DriverError, match=r"'kv' cannot grow: cuMemCreate of 8192 bytes gave CUDA_ERROR_OUT_OF_M") as e:
        pages(region, 4)
    assert e.value.code == 2 and region.num_bytes == region.occupied_bytes == 2 * PAGE and first.sum() == 14 * PAGE
    assert pages(region, 3).sum() == 21 * PAGE  # what fits still does


def test_too_little_memory_to_wake_leaves_everything_asleep(standing_in: StandIn) -> None:
    region = region_of(standing_in)
    tensor = pages(region, 6)
    region.release()
    standing_in.reset(budget=4 * PAGE)
    for _ in range(2):
        with pytest.raises(MemoryStateError, match="'kv' cannot wake: cuMemCreate of 8192 bytes.*out of memory"):
            region.restore()
        assert region.is_asleep and standing_in.ledger().physical_bytes == 0 and standing_in.ledger().maps == 0
    standing_in.reset()
    region.restore()
    assert not tensor.any()


# ------------------------------------------------------------------------------------------------- faults everywhere


class Script:
    """Two growths and a night, each step tried again if a fault made it fail: the first failure must have
    changed nothing, so that the second try succeeds."""

    def __init__(self, standing_in: StandIn) -> None:
        self.standing_in = standing_in
        self.failures: list[str] = []

    def attempt(self, step: Callable[[], Any], unchanged: Callable[[], bool] = lambda: True) -> Any:
        for _ in range(3):
            try:
                return step()
            except MemoryStateError as error:
                self.failures.append(str(error))
                assert unchanged(), error
        raise AssertionError(self.failures)

    def run(self) -> None:
        num_files = len(os.listdir("/proc/self/fd"))
        self.steps()
        gc.collect(0)
        assert len(os.listdir("/proc/self/fd")) == num_files

    def steps(self) -> None:
        region = self.attempt(lambda: region_of(self.standing_in))
        first = self.attempt(lambda: pages(region, 3), lambda: region.num_bytes == region.occupied_bytes == 0)
        grown = 3 * PAGE
        second = self.attempt(
            lambda: pages(region, 4, 9),
            lambda: region.num_bytes == region.occupied_bytes == grown and bool((first == 7).all()),
        )

        def awake() -> bool:
            first.fill_(1)
            second.fill_(2)
            return not region.is_asleep and region.occupied_bytes == 7 * PAGE

        self.attempt(region.release, awake)
        assert region.occupied_bytes == 0
        self.attempt(region.restore, lambda: region.is_asleep and region.occupied_bytes == 0)
        assert not first.any() and not second.any()
        assert awake()
        self.attempt(region.close)


QUIET = {  # calls whose failure nobody needs to hear of: they are made again, by what gives the last hold up
    "cuCtxPopCurrent_v2",
    "cuMemAddressFree",
    "cuDevicePrimaryCtxRelease_v2",
}


def test_one_fault_at_every_call_changes_nothing_and_leaks_nothing(standing_in: StandIn) -> None:
    gc.collect()
    standing_in.calls()
    Script(standing_in).run()
    made = standing_in.calls()
    assert standing_in.ledger().is_empty and len(made) >= 15 and sum(made.values()) > 70
    for function, count in made.items():
        for number in range(1, count + 1):
            standing_in.fail(function, number, FAULT)
            script = Script(standing_in)
            script.run()
            assert standing_in.ledger().is_empty, (function, number, standing_in.ledger())
            if script.failures:
                assert all(f"{function.removesuffix('_v2')}" in text and "(700: " in text for text in script.failures)
            else:  # or it hit the opened region's end, which has nobody to tell
                assert function in QUIET or number > count - 12, (function, number)
            standing_in.reset()


@pytest.mark.sweep
def test_two_faults_at_any_two_calls_leak_nothing(standing_in: StandIn) -> None:
    """The second may hit what undoes the first: the region is then broken, and close gives everything back."""
    gc.collect()
    standing_in.calls()
    Script(standing_in).run()
    made = standing_in.calls()
    points = [(function, number) for function, count in made.items() for number in range(1, count + 1)]
    for place, (function, number) in enumerate(points):
        for other, another in points[place + 1 :]:
            if other == function and function in QUIET:
                continue  # the second try of the last hold
            standing_in.fail(function, number, FAULT)
            standing_in.fail(other, another, FAULT)
            broken_pieces(standing_in)
            assert standing_in.ledger().is_empty, (function, number, other, another, standing_in.ledger())
            standing_in.reset()


def broken_pieces(standing_in: StandIn) -> None:
    """The same steps, each made once, closed whatever happened."""
    try:
        region = region_of(standing_in)
    except MemoryStateError:
        return
    steps = (lambda: pages(region, 3), lambda: pages(region, 4), region.release, region.restore)
    for step in steps:
        with suppress(MemoryStateError):
            step()
    for _ in range(3):
        try:
            region.close()
        except MemoryStateError:
            continue
        break


def test_what_cannot_be_undone_is_said_and_can_only_be_closed(standing_in: StandIn) -> None:
    region = region_of(standing_in)
    pages(region, 4)
    region.release()
    standing_in.fail("cuMemCreate", 2)
    standing_in.fail("cuMemUnmap", 1, FAULT)
    with pytest.raises(MemoryStateError, match=r"cuMemCreate.*; undoing it failed too: cuMemUnmap of 8192 bytes gave"):
        region.restore()
    with pytest.raises(MemoryStateError, match="it is broken, not asleep"):
        region.restore()
    assert region.occupied_bytes == 2 * PAGE
    region.close()
    assert standing_in.ledger().physical_bytes == 0


def test_sleep_that_fails_for_good_is_said(standing_in: StandIn) -> None:
    region = region_of(standing_in)
    tensor = pages(region, 4)
    standing_in.fail("cuMemUnmap", 2, FAULT)
    with pytest.raises(MemoryStateError, match="it stays awake, and its content is lost"):
        region.release()
    assert not region.is_asleep and int(tensor.sum()) == 7 * 2 * PAGE  # of two pieces one was lost
    standing_in.fail("cuMemUnmap", 2, FAULT)
    standing_in.fail("cuMemCreate", 1)
    with pytest.raises(MemoryStateError, match="nor can what was given back be had again: cuMemCreate"):
        region.release()
    with pytest.raises(MemoryStateError, match="broken"):
        pages(region, 1)


# ---------------------------------------------------------------------------------------------------------- support


def test_a_device_that_cannot_do_it_is_named(standing_in: StandIn) -> None:
    standing_in.reset(virtual_memory=False)
    what = "device 0 and its driver offer no virtual memory management"
    with pytest.raises(MemoryStateError, match=f"region 'kv' cannot be made: {what}"):
        region_of(standing_in)


def test_a_driver_that_is_not_there_or_lacks_a_function_is_named(standing_in: StandIn, tmp_path: Path) -> None:
    library = standing_in.driver.library
    with pytest.raises(MemoryStateError, match=r"cannot be made: libnothing.so.7 cannot be loaded \(libnothing.so.7: "):
        CudaRegion("kv", capacity_bytes=1, device="cpu", driver=Driver(library, "libnothing.so.7"))
    with pytest.raises(MemoryStateError, match="libc.so.6 has no function cuInit; install a newer driver"):
        CudaRegion("kv", capacity_bytes=1, device="cpu", driver=Driver(library, "libc.so.6"))
    with pytest.raises(MemoryStateError, match="needs none.so, which was not built; install a C.. compiler"):
        CudaRegion("kv", capacity_bytes=1, device="cpu", driver=Driver(tmp_path / "none.so"))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(MemoryStateError, match=r"text.so cannot be used .*; reinstall"):
        CudaRegion("kv", capacity_bytes=1, device="cpu", driver=Driver(tmp_path / "text.so"))


def test_a_driver_that_does_not_start_is_asked_again(standing_in: StandIn, tmp_path: Path) -> None:
    shutil.copy(standing_in.driver.libcuda, tmp_path / "driver.so")
    copy = StandIn(Driver(standing_in.driver.library, str(tmp_path / "driver.so")))
    copy.fail("cuInit", code=100)
    with pytest.raises(MemoryStateError, match="cuInit gave an error without a name \\(100: no description\\)"):
        region_of(copy)
    pages(region_of(copy), 1)


def test_a_failed_wait_is_the_kernels_and_nothing_has_moved(standing_in: StandIn) -> None:
    region = region_of(standing_in)
    tensor = pages(region, 2)
    standing_in.fail("cuCtxSynchronize", code=FAULT)
    with pytest.raises(MemoryStateError, match="'kv' cannot sleep: cuCtxSynchronize gave"):
        region.release()
    assert not region.is_asleep and tensor.sum() == 14 * PAGE
    standing_in.fail("cuCtxSynchronize", code=FAULT)
    with pytest.raises(MemoryStateError, match="cuCtxSynchronize.*; the memory was given back"):
        region.close()
    assert standing_in.ledger().physical_bytes == 0


# --------------------------------------------------------------------------------------------------------------- end


def test_the_last_tensor_may_go_in_another_thread(standing_in: StandIn) -> None:
    """As the autograd engine's."""
    region = region_of(standing_in)
    held = [pages(region, 2)]
    del region
    assert standing_in.ledger().maps == 1
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert standing_in.ledger().is_empty


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_nothing_is_written_where_it_does_not_belong(tmp_path: Path) -> None:
    """These tests and the contract's, with both libraries under sanitizers of addresses and undefined behaviour."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    named = [["-print-file-name=libasan.so"], ["-print-file-name=libubsan.so"]]
    found = [subprocess.run([compiler, *name], capture_output=True, text=True, check=True).stdout for name in named]
    if not all(Path(path.strip()).is_absolute() for path in found):
        pytest.skip("needs libasan and libubsan")
    environment = {
        **os.environ,
        "CXX": f"{compiler} -fsanitize=address,undefined -fno-sanitize-recover=undefined",
        "LD_PRELOAD": " ".join(path.strip() for path in found),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "TMPDIR": str(tmp_path),
    }
    files = [__file__, str(Path(__file__).with_name("test_region_contract.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not sweep", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
