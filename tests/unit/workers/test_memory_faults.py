"""Residents that cannot move in the middle of a run: memory is as it was and the run goes on, or it ends with an error
that says why; either way, what comes of it is to the bit the run that nothing disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.engines.inplace.kv_cache import PagedCache
from hybrid_rl.errors import HybridRLError, MemoryRefusedError, MemoryStateError
from tests.support.engines.sleeping_engine import sleeping_engine
from tests.support.inside.engines import cache_of
from tests.support.inside.memory import offloaded, storage_sizes
from tests.support.inside.workers import engine_of, worker_of
from tests.support.memory.memory_faults import fail_once
from tests.support.memory.memory_runs import compare, compare_checkpoints, folders
from tests.support.tiny import build_model

pytestmark = pytest.mark.slow

NUM_STEPS = 3
BROKEN_AT = 2  # the step in which the fault comes
IDS = torch.tensor([[6, 7, 8]])


def swept(*tags: str) -> list[Any]:
    return [pytest.param(tag, marks=pytest.mark.sweep) for tag in tags]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with sleeping_engine(), folders(tmp_path) as make:
        yield lambda **keys: make(**{"case": "ppo", "engine": "sleeping", "max_steps": NUM_STEPS, **keys})


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nothing disturbs."""
    with sleeping_engine(), folders(tmp_path_factory.mktemp("straight")) as make:
        trainer = make(case="ppo", engine="sleeping", max_steps=NUM_STEPS, save_steps=NUM_STEPS)
        trainer.fit()
        return trainer.run_folder


@pytest.fixture
def fault() -> Iterator[Callable[..., None]]:
    undo: list[Callable[[], None]] = []
    yield lambda *arguments: undo.append(fail_once(*arguments))
    for function in reversed(undo):
        function()


def assert_in_place(worker: Any) -> None:
    """What is awake has its bytes, what sleeps has none."""
    for tag, memory in offloaded(worker).items():
        assert memory.is_asleep == (tag not in worker.leases.awake), tag
        sizes = storage_sizes(memory)
        assert sizes == {0} if memory.is_asleep else 0 not in sizes, tag


@pytest.mark.parametrize("tag", ["reward_models", "actor", *swept("reference", "critic")])
def test_a_wake_without_memory_before_the_update_takes_the_step_back(
    make: Callable[..., Trainer], straight: Path, fault: Callable[..., None], tag: str
) -> None:
    trainer = make(save_steps=NUM_STEPS)
    trainer.step()
    worker = worker_of(trainer)
    fault(tag, "no memory")
    with pytest.raises(MemoryRefusedError) as raised:
        trainer.step()
    told = str(raised.value)
    for part in (f"wake of {tag!r}: OutOfMemoryError", "memory was put back", "In memory were ", "memory.offload"):
        assert part in told, told
    assert trainer.global_step == 1 and worker.leases.broken is None
    assert_in_place(worker)
    trainer.fit()
    trainer.close()
    compare(trainer.run_folder, straight)


@pytest.mark.parametrize("tag", ["optimizer", *swept("critic_optimizer")])
def test_a_wake_without_memory_in_the_update_ends_the_run_which_resume_goes_on_with(
    make: Callable[..., Trainer], straight: Path, fault: Callable[..., None], tag: str
) -> None:
    trainer = make(save_steps=1)
    trainer.step()
    fault(tag, "no memory")
    with pytest.raises(MemoryRefusedError, match=f"wake of '{tag}': OutOfMemoryError"):
        trainer.step()
    assert_in_place(worker_of(trainer))
    with pytest.raises(HybridRLError, match="make a new Trainer"):
        trainer.step()
    trainer.close()
    resume(make, trainer, straight)


def test_an_engine_that_does_not_wake_breaks_memory(
    make: Callable[..., Trainer], straight: Path, fault: Callable[..., None]
) -> None:
    """How it is then nobody knows, so nothing is computed any more; the user's module gets its weights back."""
    trainer = make(save_steps=1)
    trainer.step()
    fault("", "engine")
    with pytest.raises(RuntimeError, match="asked to fail"):
        trainer.step()
    for _ in range(2):
        with pytest.raises(HybridRLError, match="make a new Trainer|in an unknown state since this failure: wake of"):
            trainer.step()
    with pytest.raises(MemoryStateError, match="in an unknown state"):
        trainer.generating.update_weights(9)
    trainer.close()
    resume(make, trainer, straight)


@pytest.mark.parametrize(("tag", "num_steps"), [("reference", 1), ("optimizer", 2)])
def test_ctrl_c_between_sleep_and_wake_waits_for_the_end_of_the_transition(
    make: Callable[..., Trainer], straight: Path, fault: Callable[..., None], tag: str, num_steps: int
) -> None:
    """Before the update it takes the step back; from then on the step is completed first."""
    trainer = make(save_steps=NUM_STEPS)
    trainer.step()
    fault(tag, "interrupt")
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert trainer.global_step == num_steps and worker_of(trainer).leases.broken is None
    assert_in_place(worker_of(trainer))
    trainer.fit()
    trainer.close()
    compare(trainer.run_folder, straight)


def test_an_arena_that_is_too_small_is_told_at_the_start(make: Callable[..., Trainer]) -> None:
    """Nothing has begun, and the module is the user's as it was."""
    model, same = build_model(), build_model()
    with pytest.raises(HybridRLError, match="memory.host_memory"):
        make(model=model, host_memory="100KB")
    mine, theirs = model.state_dict(), same.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert torch.equal(model(input_ids=IDS).logits, same(input_ids=IDS).logits)


def test_a_cache_without_memory_is_told_and_may_come_later(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the in-place engine, whose weights are the actor's."""

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("asked to fail")

    keys = {"engine": "inplace", "offload": ["optimizer", "critic", "critic_optimizer"], "save_steps": NUM_STEPS}
    expected = make(**keys, run_name="expected")
    expected.fit()
    trainer = make(**keys, run_name="disturbed")
    trainer.step()
    worker = worker_of(trainer)
    with worker.lease(frozenset()):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "_bytes", out_of_memory)
        with pytest.raises(MemoryRefusedError, match="wake of 'kv_cache': OutOfMemoryError"):
            trainer.step()
    assert not cache_of(engine_of(worker)).is_allocated and worker.leases.broken is None
    trainer.fit()
    for one in (expected, trainer):
        one.close()
    compare(trainer.run_folder, expected.run_folder)


def resume(make: Callable[..., Trainer], broken: Trainer, straight: Path) -> None:
    """Go on from the last checkpoint of a run, and compare its end with that of the undisturbed one."""
    resumed = make(save_steps=NUM_STEPS, resume="auto", run_name=broken.run_folder.name)
    assert resumed.global_step == BROKEN_AT - 1
    resumed.fit()
    resumed.close()
    name = f"checkpoint-{NUM_STEPS}"
    compare_checkpoints(resumed.run_folder / name, straight / name)
