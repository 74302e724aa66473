"""Residents that leave memory between the phases of a step: the same run to the bit, and every phase with what it needs
and no more."""

from __future__ import annotations

import copy
import io
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl import Trainer
from hybrid_rl.engines.base import KV_CACHE
from hybrid_rl.errors import ConfigError, HybridRLError, MemoryRefusedError, MemoryStateError
from hybrid_rl.memory.cycle import RESIDENTS
from hybrid_rl.memory.leases import Leases, Transition
from hybrid_rl.memory.offload import OffloadedTensors, own_memory
from hybrid_rl.workers.reference import Reference
from tests.support.engines.sleeping_engine import SleepingEngine, sleeping_engine
from tests.support.inside.training import before_steps
from tests.support.inside.workers import actor_of, arena_of, critic_of, cycle_of, scorers_of, worker_of
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer, spread
from tests.unit.workers.test_reward_model import classifier

METRICS = Path(__file__).parents[3] / "docs" / "metrics.md"
Records = Callable[..., list[dict[str, Any]]]
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.05, "num_iterations": 2, "offload": ["actor", "optimizer", "reference", "reward_models"]},
    "ppo": {"algorithm": "ppo", "offload": ["actor", "optimizer", "critic", "critic_optimizer", "reference"]},
    "bfloat16": {"offload": ["actor", "optimizer"]},
    "distillation": {"advantage": "distillation", "offload": ["actor", "optimizer", "teacher"]},
    "in place": {"engine": "inplace", "beta": 0.05, "offload": ["optimizer", "reference"]},
    "exact": {
        "beta": 0.05,
        "kl_estimator": "exact",
        "use_bias_correction_kl": False,
        "ref_model_sync_steps": 1,
        "offload": ["actor", "reference"],
    },
}


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with sleeping_engine():
        yield


@pytest.fixture
def run(make_trainer: Callable[..., Trainer], tmp_path: Path) -> Callable[..., Trainer]:
    """A trainer of a case over an engine that sleeps, with or without its offload."""

    def make(case: str, *, moves: bool = True, **keys: Any) -> Trainer:
        keys = {"engine": "sleeping", **CASES[case], **keys}
        offload = keys.pop("offload")
        rewards: Any = spread
        if "reward_models" in offload:
            rewards = [spread, classifier(vocab_size=len(VOCABULARY))]
            keys["reward_processing_classes"] = [None, build_tokenizer()]
        if "teacher" in offload:
            folder = tmp_path / "teacher"
            build_model(seed=7).save_pretrained(folder)
            build_tokenizer().save_pretrained(folder)
            keys["teacher_path"] = str(folder)
        model = build_model(dtype=torch.bfloat16 if case == "bfloat16" else torch.float32)
        return make_trainer(model, rewards, **keys, **{"memory.offload": offload if moves else []})

    return make


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of weights and optimizer state of policy and critic."""
    worker = worker_of(trainer)
    found: dict[str, Tensor] = {}
    with worker.lease(cycle_of(worker).save.tags):
        models = {"actor": actor_of(worker), "critic": critic_of(worker)}
        for role, trained in models.items():
            if trained is None:
                continue
            found |= {f"{role}/{name}": p.detach().clone() for name, p in trained.model.module.named_parameters()}
            state = trained.optimizer.state_dict()
            for kind in ("exp_avg", "exp_avg_sq", "step", "master"):
                found |= {f"{role}/{kind}/{name}": value.clone() for name, value in state[kind].items()}
    return found


def weights_in(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.count("/") == 1}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_everything_moving_is_the_same_to_the_bit(
    case: str, run: Callable[..., Trainer], records: Records
) -> None:
    found = []
    for moves in (False, True):
        trainer = run(case, moves=moves)
        trainer.fit()
        found.append((records(trainer, comparable=True), state_of(trainer)))
    (expected_records, expected), (told, state) = found
    assert told == expected_records
    assert_equal(state, expected)
    assert not expected["actor/model.norm.weight"].eq(1).all()  # it has learned


def test_host_memory_is_a_metric_if_anything_waits_there(run: Callable[..., Trainer]) -> None:
    assert "memory/arena_bytes" not in run("in place", moves=False, max_steps=1).step().metrics
    metrics = run("in place", max_steps=1).step().metrics
    sizes = [4 * parameter.numel() for parameter in build_model().parameters()]
    least = 3 * sum(sizes)  # both moments of Adam, and the reference
    # Each of them may leave a gap, and takes a counter of steps along; the two slots are whole pages.
    assert least < metrics["memory/arena_bytes"] <= least + 4 * 64 * len(sizes) + 2 * mmap.PAGESIZE
    assert metrics["memory/arena_bytes"] % mmap.PAGESIZE == 0
    assert metrics["memory/optimizer_bytes"] == metrics["memory/reference_bytes"] == 0  # they are there now
    explained = {*re.findall(r"`(memory/\w+)`", METRICS.read_text()), *(f"memory/{tag}_bytes" for tag in RESIDENTS)}
    assert {name for name in metrics if name.startswith("memory/")} < explained


def test_every_phase_has_what_it_needs_and_no_more(
    run: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that moves in a step, from the probe of the previous handoff on: one model at a time, and the actor gone
    while the engine generates."""
    kept: list[Transition] = []
    drain = Leases.drain_transitions

    def keep(leases: Leases) -> list[Transition]:
        moved = drain(leases)
        kept.extend(moved)
        return moved

    trainer = run("grpo", max_steps=1)
    worker = worker_of(trainer)
    assert worker.leases.awake == {"engine_weights", "kv_cache"}  # the probe of the first handoff
    worker.leases.drain_transitions()
    monkeypatch.setattr(Leases, "drain_transitions", keep)
    trainer.fit()
    told = [f"{'+' if moved.awake else '-'}{moved.tag}" for moved in kept]
    assert told == [
        *("-kv_cache", "-engine_weights", "+reward_models"),  # generated
        *("-reward_models", "+reference"),  # ref_logprobs
        *("-reference", "+actor"),  # old_logprobs, and the actor stays for its update
        "+optimizer",  # update
        *("-optimizer", "+engine_weights"),  # publish, with the trainer's half of the probe
        *("-actor", "+kv_cache"),  # the engine's half
    ]


def test_ppo_updates_the_critic_and_the_actor_one_after_the_other(run: Callable[..., Trainer]) -> None:
    trainer = run("ppo", max_steps=1)
    worker = worker_of(trainer)
    seen: dict[str, frozenset[str]] = {}
    for role, trained in (("actor", actor_of(worker)), ("critic", critic_of(worker))):

        def look(*_: Any, role: str = role, **__: Any) -> None:
            seen[role] = worker.leases.awake

        before_steps(trained, look)
    trainer.fit()
    assert seen == {"actor": {"actor", "optimizer"}, "critic": {"critic", "critic_optimizer"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["bfloat16", *(pytest.param(case, marks=pytest.mark.sweep) for case in ("grpo", "ppo"))]
)
def test_a_resumed_run_goes_on_whatever_moved_before(case: str, run: Callable[..., Trainer], records: Records) -> None:
    """Saved with everything moving, resumed without, and the other way round."""
    whole = run(case, max_steps=2, moves=False)
    whole.fit()
    expected_records, expected = records(whole, comparable=True), state_of(whole)
    for moves in (True, False):
        first = run(case, max_steps=2, moves=moves, run_name=f"{case}-{moves}")
        first.step()
        checkpoint = first.save()
        first.close()
        second = run(case, max_steps=2, moves=not moves, resume=str(checkpoint))
        second.fit()
        assert records(second, comparable=True)[-1] == expected_records[-1]
        assert_equal(state_of(second), expected)


def test_parameters_without_memory_are_refused_whoever_holds_them(run: Callable[..., Trainer]) -> None:
    """Reading them would end the process. What needs no memory is told, and afterwards they are what they were."""
    trainer = run("bfloat16")
    module, worker = trainer.module, worker_of(trainer)
    assert module is not None
    held = list(module.parameters())
    uses: list[Callable[[], Any]] = [
        *(lambda: module(input_ids=torch.tensor([[3]])), module.state_dict),
        *(lambda: held[0].norm(), lambda: held[0] * 2, lambda: repr(held[0]), lambda: held[0].data, held[0].numpy),
        *(lambda: torch.nn.utils.get_total_norm(held), lambda: copy.deepcopy(module), held[0].zero_, held[0].detach),
        *(lambda: torch.save(held, io.BytesIO()), lambda: torch.nn.utils.vector_to_parameters(held[0].new(9), held)),
    ]
    with worker.lease(frozenset()):
        for use in uses:
            with pytest.raises(MemoryStateError, match=r"wait in host memory \(memory.offload names actor\)"):
                use()
        assert held[0].shape == (len(VOCABULARY), 16) and held[0].dtype == torch.bfloat16 and held[0].grad is None
        assert sum(p.numel() for p in held) == 720 + 2 * 2368 + 16
    with worker.lease(frozenset({"actor"})):
        assert {type(parameter) for parameter in held} == {torch.nn.Parameter}
        assert held[0].norm() > 0


def test_a_new_trainer_of_a_module_finds_its_weights(
    run: Callable[..., Trainer], make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """The cell of a notebook that is run again, or one with another engine."""
    first = run("bfloat16")
    first.step()
    module = first.module
    assert module is not None and "actor" not in worker_of(first).leases.awake
    expected = weights_in(state_of(first))
    with worker_of(first).lease(frozenset()):
        pass
    second = make_trainer(module, run_name="second", engine="inplace")
    assert "is in memory only when that Trainer needs it (memory.offload names actor)" in caplog.text
    assert_equal({f"actor/{n}": p for n, p in module.named_parameters()}, expected)
    assert second.step().metrics["reward"] > 0
    with pytest.raises(HybridRLError, match="closed: a later one of this process was made of its module"):
        first.step()


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, when: Callable[..., bool]) -> None:
    """Let a method fail the first time that `when` says so of its arguments."""
    method, told = getattr(owner, name), []

    def failing(*args: Any, **options: Any) -> Any:
        if not told and when(*args):
            told.append(True)
            raise error
        return method(*args, **options)

    monkeypatch.setattr(owner, name, failing)


def test_memory_that_a_user_has_taken_hold_of_is_told_and_may_be_let_go_of(run: Callable[..., Trainer]) -> None:
    """Nothing stays half moved; with memory of its own again, the module sleeps."""
    trainer = run("bfloat16")
    trainer.step()
    module, worker = trainer.module, worker_of(trainer)
    assert module is not None
    with worker.lease(frozenset({"actor", "engine_weights"})):
        module.model.norm.weight.detach().view(torch.uint8).numpy()
    before = worker.leases.awake
    with pytest.raises(MemoryRefusedError, match=r"(?s)sleep of 'actor'.*NumPy.*own_memory.*work can go on"):
        trainer.step()
    assert worker.leases.awake == before and worker.leases.broken is None
    own_memory(module)
    assert trainer.step().metrics["reward"] > 0


def test_a_module_has_its_weights_after_close_also_if_an_engine_broke_memory(
    run: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in host memory, which nothing has harmed; no lease is had any more."""
    trainer = run("bfloat16")
    trainer.step()
    module, expected = trainer.module, state_of(trainer)
    assert module is not None
    worker = worker_of(trainer)
    with worker.lease(frozenset()):
        pass
    once(monkeypatch, SleepingEngine, "wake", RuntimeError("half mapped"), lambda _, tags: KV_CACHE in tags)
    with pytest.raises(RuntimeError, match="half mapped"):
        trainer.generate("1+2=")
    assert worker.leases.broken is not None and "actor" not in worker.leases.awake
    trainer.close()
    assert_equal({f"actor/{name}": p for name, p in module.named_parameters()}, weights_in(expected))
    assert module(input_ids=torch.tensor([[3]])).logits.isfinite().all()


@pytest.mark.parametrize("failure", ["between two models", "no room in host memory"])
def test_a_step_that_failed_before_its_update_is_run_again_to_the_bit(
    failure: str, run: Callable[..., Trainer], records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("grpo", moves=False)
    whole.fit()
    expected_records, expected = records(whole, comparable=True), state_of(whole)
    trainer = run("grpo")
    trainer.step()
    if failure == "between two models":
        error: Exception = RuntimeError("out of luck")
        once(monkeypatch, Reference, "logprobs", error, lambda *_: True)
    else:
        error = MemoryStateError("no room")
        once(monkeypatch, OffloadedTensors, "sleep", error, lambda moved, *_: moved.tag == "reference")
    with pytest.raises((RuntimeError, MemoryRefusedError), match="out of luck|no room.*work can go on"):
        trainer.step()
    trainer.fit()
    assert records(trainer, comparable=True)[-1] == expected_records[-1]
    assert_equal(state_of(trainer), expected)


def test_models_with_common_weights_cannot_move(make_trainer: Callable[..., Trainer]) -> None:
    """A reward model over the policy's own backbone: it would take the policy's weights along."""
    judge, model = classifier(vocab_size=len(VOCABULARY)), build_model(hidden_size=32)
    judge.model.embed_tokens.weight = model.model.embed_tokens.weight
    keys = {"engine": "sleeping", "memory.offload": ["reward_models"]}
    with pytest.raises(ConfigError, match="reward_models and actor have weights in common"):
        make_trainer(model, judge, reward_processing_classes=build_tokenizer(), **keys)
    assert model(input_ids=torch.tensor([[3]])).logits.isfinite().all()


def test_nothing_moves_and_nothing_is_copied_unless_it_is_listed(run: Callable[..., Trainer]) -> None:
    worker = worker_of(run("grpo", moves=False))
    assert worker.movable == {"engine_weights", "kv_cache"}
    assert arena_of(worker) is None
    assert [tags for tags, _ in scorers_of(worker)] == [{"actor", "reference"}]  # one lease, as if it were one phase
