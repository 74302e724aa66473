"""What a step costs in memory when vLLM sleeps, counted on a stand-in of vLLM's engine under the whole worker: no copy
of a weight, the order of what moves, the most bytes at a time, and nothing of vLLM's held when its memory goes."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.device_allocator import AllocationData, cumem
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from hybrid_rl.batch import Batch
from hybrid_rl.compat.vllm import clear_allocator_error
from hybrid_rl.controller import RankContext
from hybrid_rl.engines.base import KV_CACHE, TAGS, WEIGHTS, Beginning
from hybrid_rl.errors import EngineStateError, HandoffError, MemoryRefusedError
from hybrid_rl.memory.byte_sizes import size_text
from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.vllm import memory as memory_module
from hybrid_rl.vllm import vllm_engine as engine_module
from hybrid_rl.vllm.weights import WeightWriter
from hybrid_rl.workers.hybrid import HybridWorker
from hybrid_rl.workers.setup import WorkerSetup
from tests.support.inside.memory import give_back_with
from tests.support.inside.vllm import num_known_requests
from tests.support.inside.workers import engine_of, probe_of, side_of
from tests.support.tiny import build_model
from tests.unit.engines.engines import finish, forward_logprobs, request
from tests.unit.training.conftest import Bench
from tests.vllm.ledger import KV_BYTES, Extension, Ledger, LedgerLLM

pytestmark = pytest.mark.slow

FREE_BYTES, STAGING_BYTES = 3 << 20, 1 << 19  # what an update leaves in PyTorch's allocator, what a handoff stages
# What a handoff has staged lies in the allocator as well, when the cache wakes.
MORNING = ["empty_cache", ("wake", WEIGHTS), "handoff", "empty_cache", ("wake", KV_CACHE)]
CYCLE = [("sleep", 2), *MORNING]


class Watched(Bench):
    """A worker over the stand-in. at_the_end: tensors of vLLM's that are alive when its memory goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_new: bool, **keys: Any) -> None:
        self.ledger = Ledger()
        self.at_the_end: list[Any] | None = None
        write = WeightWriter.write

        def build(arguments: dict[str, Any], *_: Any) -> tuple[LedgerLLM, int]:
            self.llm = LedgerLLM(build_model(), arguments, self.ledger, is_new=is_new)
            self.llm.extension.init_module(self.llm.python_malloc_callback, self.llm.python_free_callback)
            self.llm.extension.patch_into(monkeypatch, self.llm.pointer_to_data)
            return self.llm, KV_BYTES

        def watched(writer: WeightWriter, *args: Any) -> Any:
            with self.ledger.handoff(STAGING_BYTES):
                return write(writer, *args)

        def tear_down(*_: Any, **__: Any) -> None:
            self.at_the_end = [tensor for tensor in (ref() for ref in self.held) if tensor is not None]
            engine_module.release_groups(with_all=True)
            self.llm.drop()

        monkeypatch.setattr(engine_module, "build", build)
        monkeypatch.setattr(memory_module, "get_mem_allocator_instance", lambda: self.llm)
        monkeypatch.setattr(engine_module, "clean_allocator", lambda: self.ledger.log.append("clean"))
        monkeypatch.setattr(engine_module, "tear_down", tear_down)
        monkeypatch.setattr(engine_module, "can_sleep_on", lambda device: True)
        monkeypatch.setattr(WeightWriter, "write", watched)
        super().__init__(engine="vllm", **{"handoff.verify_steps": 1}, **keys)

    def make(self, setup: WorkerSetup, context: RankContext) -> HybridWorker:
        worker = super().make(setup, context)
        self.ledger.log.clear()
        give_back_with(worker.leases, self.ledger.empty_cache)
        self.held = [weakref.ref(tensor) for tensor in engine_of(worker).weights.destinations]
        return worker

    def update(self, batch: Batch, step: int = 1) -> dict[str, float]:
        """As in Bench; afterwards the allocator keeps what it has freed."""
        metrics = super().update(batch, step)
        self.ledger.hold("free blocks", FREE_BYTES)
        return metrics


@pytest.fixture(params=[False, True], ids=["0.25.1", "0.32"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(**keys: Any) -> Watched:
        made.append(Watched(monkeypatch, is_new=request.param, **keys))
        return made[-1]

    yield make
    for watched in made:
        watched.group.close()


def test_three_cycles_copy_no_weight_and_never_hold_more_than_one_side(watch: Callable[..., Watched]) -> None:
    bench = watch(handoff={"probe_steps": 1})
    ledger, weight_bytes = bench.ledger, bench.llm.weight_bytes
    assert ledger.log == MORNING  # the engine slept from the start
    slopes = bench.llm.model.slopes
    for step in (1, 2, 3):
        ledger.log.clear()
        ledger.peak_bytes = 0
        metrics = bench.train(step)
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
        assert 0 <= bench.handoff["handoff/probe_gap"] < 1e-5
        assert ledger.log == CYCLE
        assert ledger.copied == {"to host": 0, "to device": 0} and ledger.host_bytes == 0
        # The engine awake, or what the update left; a handoff stages beside the weights alone.
        assert ledger.peak_bytes == max(FREE_BYTES, weight_bytes + max(KV_BYTES, STAGING_BYTES))
        assert slopes.tolist() == [1, 2, 3, 4]
    assert bench.awake >= {ENGINE_WEIGHTS, KV_CACHE}


def test_without_a_probe_the_cache_wakes_for_the_rollout(watch: Callable[..., Watched]) -> None:
    bench = watch(handoff={"probe_steps": 0})
    assert bench.ledger.log == MORNING[:-2]
    bench.rollout()
    assert bench.ledger.log == MORNING


def test_a_step_that_broke_off_publishes_again_before_it_generates(watch: Callable[..., Watched]) -> None:
    """Scoring has put the engine to sleep: its weights are lost, and the policy is still the one that was published."""
    bench = watch(old_logprobs="recompute")
    first = bench.rollout()
    bench.group.score(first, 1)
    engine = engine_of(bench.worker)
    assert (engine.state.value, engine.policy_version) == ("asleep", -1)
    bench.ledger.log.clear()
    again = bench.rollout()
    assert bench.ledger.log == MORNING
    assert torch.equal(again["completion_ids"].values, first["completion_ids"].values)
    assert again["policy_version"].values.unique().tolist() == [0]
    assert bench.ledger.copied == {"to host": 0, "to device": 0}


def test_weights_that_were_lost_and_trained_on_are_not_published_as_the_old_version(
    watch: Callable[..., Watched],
) -> None:
    bench = watch()
    bench.update(bench.prepared())
    with pytest.raises(EngineStateError, match="lost them when it slept.*update its weights before generating"):
        bench.rollout()
    bench.version = 1
    with pytest.raises(EngineStateError, match="update its weights before generating"):
        bench.rollout()
    bench.publish(1)
    assert bench.rollout()["policy_version"].values.unique().tolist() == [1]


def test_weights_that_were_found_wrong_are_not_published_again_by_a_rollout(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = watch()
    bench.update(bench.prepared())

    def wrong(version: int) -> dict[str, float]:
        raise HandoffError("other bytes")

    with monkeypatch.context() as patch:
        patch.setattr(side_of(bench.worker), "verify", wrong)
        with pytest.raises(HandoffError, match="other bytes"):
            bench.publish(1)
    bench.version = 1
    with pytest.raises(EngineStateError, match="failed a check"):
        bench.rollout()


@pytest.mark.parametrize("call", ["add_request", "step"])
def test_an_engine_that_failed_goes_to_sleep_and_training_can_be_saved(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    """Its requests are dropped; it generates nothing more and is given no weights, and the leases hold."""
    bench = watch()
    bench.train(1)
    original, num_calls = getattr(bench.llm, call), itertools.count()

    def fails_once(*args: Any, **options: Any) -> Any:
        if next(num_calls) == 2:
            raise RuntimeError("no memory")
        return original(*args, **options)

    monkeypatch.setattr(bench.llm, call, fails_once)
    with pytest.raises(RuntimeError, match="no memory") as raised:
        bench.rollout(2)
    assert re.search(r"the engine failed; make a new one.*save\(\).*resume=", raised.value.__notes__[0])
    engine = engine_of(bench.worker)
    assert engine.num_unfinished
    # Blocks of requests that a failed pass left half done cannot be dropped.
    monkeypatch.setattr(bench.llm, "reset_prefix_cache", lambda **_: False)
    bench.ledger.log.clear()
    bench.group.save(tmp_path / "checkpoint", {})
    assert (tmp_path / "checkpoint").is_dir() and bench.ledger.log == [("sleep", 2)]
    assert engine.num_unfinished == 0 and num_known_requests(bench.llm) == 0
    for call_again in (bench.rollout, bench.publish):
        with pytest.raises(EngineStateError, match=r"failed \(RuntimeError: no memory\); make a new one.*resume="):
            call_again(2)
    bench.group.save(tmp_path / "another", {})


def test_a_failure_while_weights_are_published_again_is_tried_again_by_the_next_rollout(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = watch(old_logprobs="recompute")
    first = bench.rollout()
    bench.group.score(first, 1)

    def fails(*_: Any) -> Any:
        raise OSError("no space left")

    for owner, name in (
        (WeightWriter, "write"),
        (side_of(bench.worker), "verify"),
        (probe_of(bench.worker), "compare"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            with pytest.raises(OSError, match="no space left"):
                bench.rollout()
        assert engine_of(bench.worker).policy_version == -1
    assert torch.equal(bench.rollout()["completion_ids"].values, first["completion_ids"].values)


def test_the_cache_alone_sleeps_and_the_weights_stay(watch: Callable[..., Watched]) -> None:
    """No phase of a step asks for it; whoever does finds the weights as they were."""
    bench = watch()
    with bench.worker.lease(frozenset({ACTOR, ENGINE_WEIGHTS})):
        assert bench.llm.asleep == {KV_CACHE}
    assert engine_of(bench.worker).policy_version == 0 and bench.ledger.host_bytes == 0
    first = bench.rollout()
    with bench.worker.lease(frozenset({ACTOR, ENGINE_WEIGHTS})):
        pass
    bench.ledger.log.clear()
    with bench.worker.lease(frozenset()):  # the weights follow the cache, which does not wake for it
        assert bench.llm.asleep == {WEIGHTS, KV_CACHE} and bench.ledger.log == [("sleep", 2)]
    assert torch.equal(bench.rollout()["completion_ids"].values, first["completion_ids"].values)


@pytest.mark.parametrize(("tag", "num_missing"), [(KV_CACHE, 5), (WEIGHTS, KV_BYTES + 7)])
def test_a_wake_for_which_there_is_no_room_is_refused_before_vllm_is_touched(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, tag: str, num_missing: int
) -> None:
    """vLLM's own wake would break off in the middle. Everything is put back, and the rollout is made again."""
    bench = watch(old_logprobs="recompute")
    first = bench.rollout()
    bench.group.score(first, 1)
    sizes = {WEIGHTS: bench.llm.weight_bytes, KV_CACHE: KV_BYTES}
    free_bytes = sum(sizes.values()) - num_missing
    monkeypatch.setattr(
        memory_module, "free_device_bytes", lambda device: free_bytes - sum(bench.ledger.device.values())
    )
    before = bench.awake
    with pytest.raises(MemoryRefusedError) as refused:
        bench.rollout()
    free = free_bytes - (sizes[WEIGHTS] if tag == KV_CACHE else 0)
    name = ENGINE_WEIGHTS if tag == WEIGHTS else tag
    told = (
        f"room for '{name}': MemoryStateError: it takes {size_text(sizes[tag])}, and {size_text(free)} of the device "
        f"are free: {size_text(sizes[tag] - free)} are missing; memory was put back as it was before, and work can go "
        f"on. In memory were"
    )
    assert str(refused.value).startswith(told) and "rollout.kv_cache_memory_bytes" in str(refused.value)
    assert bench.worker.leases.broken is None and bench.llm.asleep <= {WEIGHTS, KV_CACHE} - before
    free_bytes += num_missing
    assert torch.equal(bench.rollout()["completion_ids"].values, first["completion_ids"].values)


def test_bytes_to_map_are_those_of_the_tags_that_sleep_and_of_what_wakes_with_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = {
        number: AllocationData((0, num_bytes, number, 0), tag, None, is_asleep)
        for number, (tag, num_bytes, is_asleep) in enumerate(
            [(WEIGHTS, 1, True), (WEIGHTS, 2, True), (WEIGHTS, 4, False), (KV_CACHE, 8, True), ("cudagraph", 16, True)]
        )
    }
    allocator = SimpleNamespace(pointer_to_data=data)
    monkeypatch.setattr(memory_module, "get_mem_allocator_instance", lambda: allocator)
    assert memory_module.bytes_to_map(frozenset({WEIGHTS})) == 1 + 2 + 16
    assert memory_module.bytes_to_map(frozenset({KV_CACHE})) == 8 + 16
    assert memory_module.bytes_to_map(frozenset({WEIGHTS, KV_CACHE})) == 1 + 2 + 8 + 16


def test_a_real_allocator_gives_back_what_is_awake_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's allocator and executor themselves, over a driver that refuses to map or unmap a thing twice."""
    mapped = {1, 2, 3}

    def create(handle: tuple[int, ...]) -> None:
        assert handle[2] not in mapped
        mapped.add(handle[2])

    allocator = CuMemAllocator()
    for tag, address in ((WEIGHTS, 1), (WEIGHTS, 2), (KV_CACHE, 3)):
        allocator.pointer_to_data[address] = AllocationData((0, 2 << 20, address, 0), tag)
    monkeypatch.setattr(cumem, "create_and_map", create)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # an error where there is no device
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: mapped.remove(handle[2]))
    monkeypatch.setattr(memory_module, "get_mem_allocator_instance", lambda: allocator)

    def rpc(name: str, kwargs: dict[str, Any]) -> None:
        allocator.sleep(()) if name == "sleep" else allocator.wake_up(kwargs["tags"])

    bare: Any = type("Bare", (Executor,), {"collective_rpc": staticmethod(rpc)})
    bare.__abstractmethods__ = frozenset()
    executor = object.__new__(bare)
    executor.sleeping_tags = set()
    if not hasattr(bare, "is_sleeping"):  # else it follows from the tags
        executor.is_sleeping = False
    llm = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor)),
        sleep=lambda level, mode: executor.sleep(level),
        wake_up=executor.wake_up,
    )
    if hasattr(LLMEngine, "release_kv_cache_memory"):  # by which the table of differences knows it
        llm.release_kv_cache_memory = None
    memory = memory_module.EngineMemory(llm, can_sleep=True)
    for _ in range(2):
        memory.sleep(TAGS)
        assert mapped == set()
        memory.wake(frozenset({WEIGHTS}))
        assert mapped == {1, 2} and memory_module.bytes_to_map(TAGS) == 2 << 20
        memory.sleep(frozenset({WEIGHTS}))
        assert mapped == set() and memory_module.bytes_to_map(TAGS) == 6 << 20
        memory.wake(frozenset({WEIGHTS}))
        memory.wake(frozenset({KV_CACHE}))
        assert mapped == {1, 2, 3}


@pytest.mark.parametrize("has_room", [True, pytest.param(False, marks=pytest.mark.sweep)], ids=["room", "no room"])
def test_an_engine_that_sleeps_is_closed_and_the_allocator_serves_the_next_one(
    watch: Callable[..., Watched], has_room: bool
) -> None:
    """Each segment is mapped as it is freed; if there is no memory left to map, what fails is forgotten."""
    first = watch()
    first.train(1)
    engine_of(first.worker).sleep(TAGS)
    extension = first.llm.extension
    assert first.llm.asleep == TAGS and extension.mapped == set()
    extension.has_room = has_room
    first.group.close()
    assert first.at_the_end == [] and first.llm.pointer_to_data == {} and extension.mapped == set()
    assert extension.num_refused == (0 if has_room else 2)
    assert extension.callbacks == (first.llm.python_malloc_callback, first.llm.python_free_callback)
    extension.has_room = True
    assert extension.malloc(99)
    second = watch()
    second.train(1)
    assert second.ledger.log[-6:] == CYCLE


def test_a_failed_allocation_spoils_neither_the_next_engine_nor_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's allocator itself: it knows what it could not allocate, and would unmap that when the next engine
    sleeps."""
    allocator, extension = CuMemAllocator(), Extension()
    extension.init_module(allocator.python_malloc_callback, allocator.python_free_callback)
    extension.patch_into(monkeypatch, allocator.pointer_to_data)
    monkeypatch.setattr(memory_module, "get_mem_allocator_instance", lambda: allocator)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert extension.malloc(1)
    extension.has_room = False
    assert not extension.malloc(2)
    extension.has_room = True
    assert not extension.malloc(3)  # of which there is enough, while the error stays
    memory_module.clean_allocator()
    assert [*allocator.pointer_to_data] == [1] and extension.malloc(3)
    allocator.sleep(())
    assert extension.mapped == set()
    with memory_module.freed_asleep():
        extension.free(1)
        extension.free(3)
    assert allocator.pointer_to_data == {} and not extension.has_error and extension.malloc(4)


def test_the_error_that_stays_is_a_number_of_the_compiled_allocator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clear_allocator_error()  # there is none on a CPU
    source, library = tmp_path / "allocator.c", tmp_path / "cumem_allocator.so"
    source.write_text("int error_code = 201;\n")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-o", library, source], check=True)
    monkeypatch.setitem(sys.modules, "vllm.cumem_allocator", SimpleNamespace(__file__=str(library)))
    clear_allocator_error()
    assert ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "error_code").value == 0


def test_what_was_sampled_ahead_is_not_given_out_as_a_later_version(watch: Callable[..., Watched]) -> None:
    """A scheduler that works ahead has a token of the old weights on its way when the request is broken off; it goes on
    under new weights, with the same id."""
    bench = watch()
    engine = engine_of(bench.worker)
    sent = request(7, 4, 6, temperature=0.0)
    engine.submit([sent], 0)
    for _ in range(3):
        assert engine.step() == []
    engine.abort([7])
    [broken] = engine.step()
    assert (broken.finish_reason, broken.versions) == ("abort", [0, 0])
    with torch.no_grad():
        for parameter in bench.module.parameters():
            parameter.mul_(1.3)
    engine.update_weights(TensorSource.of(bench.module), 1)
    engine.sleep(TAGS)
    engine.wake(TAGS)
    with pytest.raises(EngineStateError, match="update its weights before generating"):
        engine.step()
    engine.update_weights(TensorSource.of(bench.module), 1)
    begun = Beginning(tuple(broken.completion_ids), tuple(broken.logprobs), tuple(broken.versions))
    engine.submit([replace(sent, begun=begun)], 1)
    [sample] = finish(engine)
    assert sample.versions == [0, 0, 1, 1, 1, 1]
    expected = forward_logprobs(bench.module, sent, sample)
    torch.testing.assert_close(torch.tensor(sample.logprobs)[2:], expected[2:], rtol=1e-5, atol=1e-5)
    assert (torch.tensor(sample.logprobs)[:2] - expected[:2]).abs().max() > 1e-3
