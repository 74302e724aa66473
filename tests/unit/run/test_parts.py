"""Parts of a Trainer by themselves: no model, no workers, no Trainer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError, EngineStateError, HybridRLError, WorkerError
from hybrid_rl.extras.views.run_view import View
from hybrid_rl.run import restarts
from hybrid_rl.run.attributes import Shown, refusing, setting, shown
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.evaluator import RunEvaluator
from hybrid_rl.run.familiar import Familiar
from hybrid_rl.run.position import Position
from hybrid_rl.run.recovery import Recovery
from hybrid_rl.run.settings import Settings
from hybrid_rl.run.tenancy import Tenancy, open_here


def parts(position: Position | None = None, **more: Any) -> Any:
    """What a part is given, of which each takes what it needs; `said` has what was told."""
    found = SimpleNamespace(said=[], config=load_config({"max_restarts": 1})[0], position=position, **more)
    found.log = found
    found.display = SimpleNamespace(message=found.said.append, retotal=found.said.append, start=lambda *_, **__: None)
    return found


# ----------------------------------------------------------------------------------------------------------- tenancy


def tenancy_of(position: Position, module: nn.Module | None = None, **more: Any) -> tuple[Tenancy, Any, list[str]]:
    done: list[str] = []
    guard: Any = SimpleNamespace(is_torn=False, is_stepping=False)
    found = Tenancy(parts().config, module, Path("runs/mine"), guard, position, lambda: done.append("published"))
    closing = ExitStack()
    closing.callback(done.append, "closed")
    found.enter(closing)
    return found, guard, done


def test_a_tenant_is_open_until_it_is_closed_once() -> None:
    tenancy, _, done = tenancy_of(Position(max_steps=3))
    assert tenancy in open_here()
    with tenancy.working("fit()"), pytest.raises(HybridRLError, match=r"while fit\(\) runs"):
        tenancy.close()
    tenancy.close("of a test;")
    tenancy.close()
    assert done == ["closed"] and tenancy not in open_here()
    with pytest.raises(HybridRLError, match="closed: of a test; make a new one"):
        tenancy.require_open()


def test_a_tenant_that_computes_or_is_torn_refuses() -> None:
    tenancy, guard, _ = tenancy_of(Position(max_steps=3, step=2))
    with tenancy.computing(), pytest.raises(EngineStateError, match="an evaluation or generation is running; save"):
        tenancy.require_idle("save")
    tenancy.require_idle("save")
    guard.is_torn = True
    with pytest.raises(HybridRLError, match="the update after step 2 was interrupted"):
        tenancy.require_open()
    tenancy.close()


def test_a_module_that_another_has_trained_is_published_again() -> None:
    module = nn.Linear(1, 1)
    (mine, _, done), (other, *_) = (tenancy_of(Position(max_steps=3), module) for _ in range(2))
    mine.note_training()
    mine.require_current()
    assert done == []
    other.note_training()
    mine.require_current()
    mine.require_current()
    assert done == ["published"]
    mine.close()
    other.close()


# ---------------------------------------------------------------------------------------------------------- settings


def test_settings_refuse_before_they_change_anything() -> None:
    position = Position(max_steps=3)
    given = parts(position, require_open=lambda: None, is_busy=True)
    settings = Settings(given, given)
    assert settings.value("learning_rate") == given.config.optimizer.learning_rate and settings.value("max_steps") == 3
    for changes in ({"max_steps": 0}, {"seed": 1}, {"max_steps": 5, "callbacks": [3]}):
        with pytest.raises(ConfigError):
            settings.set(changes)
    assert position.max_steps == 3
    settings.set({"max_steps": 5})
    assert settings.length_for(None) is None and settings.length_for(4) == 4 and position.max_steps == 5
    assert settings.length_for(7) == 7 and position.max_steps == 7 and settings.metrics() == {}


# -------------------------------------------------------------------------------------------------------- attributes


def test_attributes_are_shown_assigned_or_refused() -> None:
    @refusing
    class Owner:
        step: int = shown("_part.step")
        again = step
        temperature: float = setting()

        def __init__(self) -> None:
            self._part, self.changes = SimpleNamespace(step=3), {}
            self._settings = SimpleNamespace(value=self.changes.__getitem__)

        def set(self, **changes: Any) -> None:
            self.changes |= changes

    owner: Any = Owner()
    owner.temperature = 0.5
    assert (owner.step, owner.again, owner.temperature) == (3, 3, 0.5)
    with pytest.raises(AttributeError, match=r"trainer\.step can only be read"):
        owner.again = 4
    with pytest.raises(ConfigError, match=r"trainer\.seed would do nothing: it is fixed"):
        owner.seed = 4
    assert not hasattr(owner, "seed") and isinstance(Owner.step, Shown)


# --------------------------------------------------------------------------------------------- evaluations, restarts


def evaluator_of(position: Position, **more: Any) -> tuple[RunEvaluator, Any]:
    given = parts(
        position,
        handoff={"handoff": 1.0},
        run=SimpleNamespace(data=SimpleNamespace(eval={})),
        metrics=lambda step, record: given.said.append((step, record)),
        look=lambda: given.said.append("looked"),
        best=SimpleNamespace(look=lambda step, metrics: metrics["eval/reward"] > 0),
        **more,
    )
    return RunEvaluator(given, given, given, given, lambda *_: None), given


def test_the_record_before_the_first_step_is_written_once() -> None:
    position = Position(max_steps=3)
    evaluator, given = evaluator_of(position)
    evaluator.at_start()
    evaluator.at_start()
    assert given.said == [(0, {"handoff": 1.0})] and position.has_begun


def test_an_evaluation_that_is_broken_off_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    position = Position(max_steps=3, step=1)
    evaluator, _ = evaluator_of(position)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluator, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluator.after_step({"reward": 1.0, "loss": float("nan")})
    assert position.owed is not None and position.owed["reward"] == 1.0


def test_the_best_step_is_to_be_saved_if_checkpoints_are() -> None:
    position = Position(max_steps=3, step=1)
    evaluator, given = evaluator_of(position)
    evaluator.note_best({"eval/reward": 1.0})
    assert not position.save_due and given.said == ["looked"]
    given.config = load_config({"save_steps": 2})[0]
    evaluator.note_best({"eval/reward": 0.0})
    assert not position.save_due
    evaluator.note_best({"eval/reward": 1.0})
    assert position.save_due


def test_work_goes_on_after_one_loss_but_not_after_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(restarts, "may_restart", lambda *_, **__: True)
    position, done = Position(max_steps=9, step=4, save_due=True), list[str]()
    stopper = SimpleNamespace(stop=SimpleNamespace(reason="", check=lambda: None), ends_early=False, is_asked=True)

    @restarts.dataclass(frozen=True)
    class Prepared:
        checkpoint: Checkpoint | None = None
        module: None = None

    def start(finish: Any) -> None:
        finish()
        position.step = 0

    given = parts(position, run=Prepared(), folder=tmp_path, end=lambda: done.append("ended"), start=start, lost=None)
    given.is_taken_up, given.finish = False, lambda: done.append("started")
    given.resume = lambda checkpoint: done.append(f"log at {checkpoint}")
    recovery = Recovery(given, given, given, stopper)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="second"):
        for number, attempt in enumerate(recovery.attempts()):
            with attempt:
                raise WorkerError(["first", "second"][number])
    assert done == ["ended", "log at None", "started"] and recovery.metrics() == {"restarts": 1.0}
    assert not position.save_due and not stopper.is_asked and given.lost is None


# -------------------------------------------------------------------------------------------------------------- crew


def test_a_crew_tells_of_the_run_and_keeps_rollouts_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    sampler: Any = SimpleNamespace(state_dict=dict, epoch=1.5)
    log: Any = parts(path=Path("runs/mine"), take_up=lambda: saved.append("taken up"))
    run: Any = parts()
    monkeypatch.setattr("hybrid_rl.run.crew.SignalWatch", lambda *_: None)
    monkeypatch.setattr("hybrid_rl.run.crew.Scoring", SimpleNamespace(of=lambda _: None))
    crew = Crew(run, log, sampler, Position(max_steps=9, step=2, policy_version=2))
    crew.policy = crew.generating = SimpleNamespace(  # type: ignore[assignment]
        save_rollout=lambda *given, must: saved.append((*given, must)),
        update_weights_again=lambda version: [{"version": float(version)}],
    )
    batch: Any = object()
    crew.keep(batch, 3)
    run.config = load_config({"save_rollouts": True})[0]
    crew.keep(batch, 3)
    assert saved == ["taken up", "taken up", (batch, 3, Path("runs/mine/rollouts"), False)]
    state = crew.state(3)
    assert (state.global_step, state.max_steps, state.epoch) == (3, 9, 1.5)
    crew.publish_again()
    assert crew.handoff == {"version": 2.0}


# --------------------------------------------------------------------------------------------------- views, familiar


def test_a_view_tells_the_step_and_how_to_go_on(tmp_path: Path) -> None:
    data = SimpleNamespace(train=[1, 2])
    rewards = SimpleNamespace(entries=SimpleNamespace(names=[]))
    run = SimpleNamespace(adapters=None, choice=SimpleNamespace(path="m"), data=data, num_parameters=1, rewards=rewards)
    given = parts(
        Position(max_steps=3, step=1),
        run=run,
        folder=tmp_path,
        closed="",
        lost=None,
        guard=SimpleNamespace(is_torn=False),
    )
    view = View(given, given)
    assert "step 1 of 3" in view.text("Mine") and "fit() the 2 that are left" in view.text("Mine")
    (tmp_path / "checkpoint-1").mkdir()
    given.closed = ";"
    assert f"resume={str(tmp_path / 'checkpoint-1')!r}" in view.text("Mine") and "step 1 of 3" in view.html()


def test_names_of_others_work_with_the_run_folder(tmp_path: Path) -> None:
    given = parts(
        Position(max_steps=3, step=2),
        folder=tmp_path,
        run=SimpleNamespace(module=None),
        best=SimpleNamespace(step=2, value=0.5),
        sampler=SimpleNamespace(epoch=1),
        save=lambda target: target,
        saved_folder=tmp_path / "checkpoint-2",
    )
    familiar = Familiar(given, given)
    assert familiar.save_model(tmp_path / "new") == tmp_path / "new"
    familiar.save_metrics("train", {"loss": 1.0})
    assert familiar.save_model(tmp_path) == tmp_path / "checkpoint-2"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert familiar.state.log_history == [{"step": 1}] and familiar.state.best_metric == 0.5
    with pytest.raises(ConfigError, match=f"hf upload USER/NAME {tmp_path / 'checkpoint-2'}"):
        familiar.push_to_hub()
    with pytest.raises(AttributeError):
        _ = familiar.module
