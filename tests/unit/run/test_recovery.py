"""Runs in one process that lose their engine and go on from their last checkpoint, or are told to stop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import RunStopped, Trainer
from hybrid_rl.checkpoint.background import Progress
from hybrid_rl.checkpoint.reading import read_state
from hybrid_rl.errors import ConfigError, HybridRLError, RewardError, StorageError, WorkerError
from hybrid_rl.process.stopping import SIGNALS, own_process
from hybrid_rl.run import recovery, restarts
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.evaluator import RunEvaluator
from hybrid_rl.workers.groups import PolicyGroup
from tests.support.engines.engine_faults import InjectedFault
from tests.support.inside.trainers import position_of, saver_of, stopper_of, wrap_keep_aside
from tests.support.inside.workers import worker_of
from tests.support.tiny import sums

pytestmark = pytest.mark.slow
STEPS = {"max_steps": 5, "save_steps": 2, "run_name": "run"}


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.0)


@contextlib.contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, method: str, *steps: int) -> Iterator[list[int]]:
    """The worker's method fails in these steps: once for each time that a step is named. Gives the steps tried."""
    from hybrid_rl.workers.hybrid import HybridWorker

    original, left, tried = getattr(HybridWorker, method), list(steps), []

    def fails(self: Any, *arguments: Any) -> Any:
        call = next((one for one in arguments if hasattr(one, "state")), None)
        step = call.state.global_step if call is not None else arguments[-1]
        tried.append(step)
        if step in left:
            left.remove(step)
            raise InjectedFault("the engine is dead")
        return original(self, *arguments)

    vars(fails).update(vars(original))
    fails.__name__ = method
    with monkeypatch.context() as patch:
        patch.setattr(HybridWorker, method, fails)
        yield tried


def weights(run: Trainer | Path, step: int) -> bytes:
    folder = run if isinstance(run, Path) else run.run_folder
    return (folder / f"checkpoint-{step}" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["rollout", "update", "update_weights"])
def test_a_dead_engine_costs_the_steps_since_the_last_checkpoint(
    make_trainer, straight_run, records, monkeypatch, caplog, capsys, model_folder: Path, method: str
) -> None:
    """A model by name, with a reference (beta): records, samples and weights are those of a run that nothing befell."""
    keys = STEPS | {"beta": 0.05, "eval_dataset": sums(2), "eval_steps": 2}
    straight = straight_run(**keys)
    calls: list[str] = []

    class Noted(Callback):
        def on_fit_start(self, trainer):
            calls.append("start")

        def on_step_end(self, trainer, step, batch, metrics):
            calls.append(f"step {step}")

        def on_fit_end(self, trainer):
            calls.append("end")

    trainer = make_trainer(model=str(model_folder), **keys, max_restarts=2, callbacks=[Noted()])
    capsys.readouterr()
    with dying(monkeypatch, method, 4), caplog.at_level(logging.WARNING, "hybrid_rl"):
        last = trainer.fit()
    assert "trained 5 steps in" in capsys.readouterr().err
    assert calls == ["start", "step 1", "step 2", "step 3", "step 3", "step 4", "step 5", "end"]
    assert last["restarts"] == 1.0
    told = next(text for text in caplog.messages if "Restart" in text)
    for part in (
        "after training step 3",
        "InjectedFault: the engine is dead",
        "Restart 1 of at most 2",
        "checkpoint-2",
    ):
        assert part in told
    found = records(trainer, comparable=True)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4, 5]
    assert [line.pop("restarts", None) for line in found] == [None, 0, 0, 1, 1, 1]
    assert found == records(straight, comparable=True)
    for name in ("samples.jsonl", "eval-samples.jsonl"):
        assert records(trainer, name=name) == records(straight, name=name)
    assert weights(trainer, 5) == weights(straight, 5)


def test_a_module_trained_in_place_goes_on_from_a_checkpoint_only(make_trainer, straight_run, monkeypatch) -> None:
    straight, trainer = straight_run(**STEPS), make_trainer(**STEPS, max_restarts=1)
    with dying(monkeypatch, "update", 3):
        trainer.fit()
    assert weights(trainer, 5) == weights(straight, 5)
    assert trainer.module is not None and trainer.generate("1+2=")
    # Before the first update the module is still as it was passed.
    early = make_trainer(**STEPS | {"run_name": "early"}, max_restarts=1)
    with dying(monkeypatch, "rollout", 1):
        early.fit()
    assert weights(early, 5) == weights(straight, 5)
    late = make_trainer(**STEPS | {"run_name": "late"}, max_restarts=1)
    with dying(monkeypatch, "rollout", 2), pytest.raises(HybridRLError, match="first weights are gone") as raised:
        late.fit()
    assert "InjectedFault: the engine is dead" in str(raised.value)


def test_a_loss_before_the_first_checkpoint_begins_again(
    make_trainer, straight_run, records, monkeypatch, model_folder
) -> None:
    straight = straight_run(**STEPS)
    trainer = make_trainer(model=str(model_folder), **STEPS, max_restarts=1)
    with dying(monkeypatch, "update", 2):
        trainer.fit()
    assert [line["step"] for line in records(trainer)] == [0, 1, 2, 3, 4, 5]
    assert weights(trainer, 5) == weights(straight, 5)


def lost(error: Exception, **attributes: Any) -> Exception:
    vars(error).update(attributes, _is_of_ranks=True)
    return error


def test_a_kill_may_come_twice_after_the_same_step_but_not_three_times() -> None:
    """Any error in between, or a kill after another step, begins a new row."""
    kills = [lost(WorkerError(f"rank 1 is gone: pid {pid}"), is_kill=True) for pid in range(3)]
    counted = restarts.Restarts(99)
    for step in (3, 3, 4, 4, 3, 3):
        counted.admit(kills[0], step)
    counted.admit(lost(RuntimeError("a link is down")), 3)
    for kill in kills[:2]:
        counted.admit(kill, 3)
    with pytest.raises(WorkerError, match="killed 3 times in a row after step 3.*make the step smaller") as raised:
        counted.admit(kills[2], 3)
    assert "Failure 3 of 3: rank 1 is gone: pid 2" in str(raised.value) and raised.value.__cause__ is kills[2]


def test_errors_of_another_kind_after_the_same_step_do_not_end_a_run() -> None:
    counted = restarts.Restarts(99)
    for error in (RuntimeError("a link is down"), OSError("a link is down"), RuntimeError("no memory")):
        counted.admit(lost(error), 3)
    with pytest.raises(WorkerError, match="with the same error again after step 3") as raised:
        counted.admit(lost(RuntimeError("no memory. Tried to get 7 bytes")), 3)
    assert str(raised.value).count("RuntimeError: no memory") == 4  # the causes and tracebacks of both
    counted = restarts.Restarts(1)
    counted.admit(lost(RuntimeError("a link is down")), 2)
    with pytest.raises(RuntimeError) as raised:
        counted.admit(lost(RuntimeError("a link is down")), 4)
    assert "there were 1 restarts, and max_restarts=1; the failure before came after step 2" in str(
        raised.value.__notes__
    )


def test_the_same_error_may_come_again_if_the_next_try_takes_less_memory() -> None:
    counted = restarts.Restarts(3)
    for _ in range(3):
        counted.admit(lost(RuntimeError("no memory")), 3, is_eased=True)
    with pytest.raises(RuntimeError, match="no memory") as raised:
        counted.admit(lost(RuntimeError("no memory")), 3, is_eased=True)
    assert "there were 3 restarts, and max_restarts=3" in str(raised.value.__notes__)


def test_a_full_disk_at_a_restart_is_waited_for(make_trainer, straight_run, records, monkeypatch) -> None:
    straight = straight_run(**STEPS)
    trainer, stuck = (make_trainer(**STEPS | {"max_restarts": 3, "run_name": name}) for name in "ab")
    num_left = [2]

    def full(keep: Any, self: Any, path: Path, dropped: bytes) -> None:
        num_left[0] -= 1
        if num_left[0] >= 0:
            raise StorageError("cannot write: No space left on device")
        keep(self, path, dropped)

    wrap_keep_aside(monkeypatch, full)
    with dying(monkeypatch, "update", 4):
        assert trainer.fit()["restarts"] == 3.0
    assert [line["step"] for line in records(trainer)] == [0, 1, 2, 3, 4, 5]
    assert weights(trainer, 5) == weights(straight, 5)
    num_left[0] = 9
    with dying(monkeypatch, "update", 4), pytest.raises(StorageError) as raised:
        stuck.fit()
    assert "there were 3 restarts, and max_restarts=3" in str(raised.value.__notes__) and num_left[0] == 6


class Faulty(Callback):
    def on_step_end(self, trainer, step, batch, metrics):
        raise LookupError("of the user")


def unfair(completion_ids, **_):
    raise ZeroDivisionError("of the user")


@pytest.mark.parametrize(
    ("keys", "error"), [({"callbacks": [Faulty()]}, LookupError), ({"reward_funcs": unfair}, RewardError)]
)
def test_errors_of_the_users_functions_end_the_run(make_trainer, caplog, keys, error) -> None:
    trainer = make_trainer(**STEPS, max_restarts=3, **keys)
    with pytest.raises(error):
        trainer.fit()
    assert not any("Restart" in text for text in caplog.messages)


class Stopping(Callback):
    def on_step_end(self, trainer, step, batch, metrics):
        if step == 3:
            trainer.stop()


def test_a_run_that_was_stopped_trains_again_what_a_restart_has_lost(make_trainer, monkeypatch) -> None:
    """stop() in step 3, whose checkpoint the engine does not outlive; the one before is that of step 2."""
    trainer = make_trainer(max_steps=5, save_steps=2, max_restarts=1, callbacks=[Stopping()])
    save = saver_of(trainer).keep_last_step
    failures = [True]

    def fails() -> None:
        if failures.pop() if failures else False:
            error = InjectedFault("gone")
            vars(error)["_is_of_ranks"] = True
            raise error
        save()

    monkeypatch.setattr(saver_of(trainer), "keep_last_step", fails)
    trainer.fit()
    assert trainer.global_step == 3 and (trainer.run_folder / "checkpoint-3").is_dir()


class StoppingAtCheckpoint(Callback):
    def on_step_end(self, trainer, step, batch, metrics):
        saver_of(trainer).wait()
        if step == 2:
            trainer.stop()


def test_a_run_that_was_stopped_at_its_last_checkpoint_stays_stopped(make_trainer, monkeypatch) -> None:
    """And what was set on the live Trainer stays set."""
    trainer = make_trainer(**STEPS, max_restarts=1, callbacks=[StoppingAtCheckpoint()])
    failures = [lost(InjectedFault("gone"))]
    monkeypatch.setattr(saver_of(trainer), "end", lambda **_: (_ for _ in ()).throw(failures.pop()) if failures else 0)
    trainer.temperature = 0.5
    trainer.fit()
    assert trainer.global_step == 2 and trainer.temperature == 0.5 and not failures


@pytest.mark.parametrize("method", ["rollout", "update"])
def test_fit_makes_the_ranks_again_after_a_ctrl_c_in_the_wait_before_a_restart(
    make_trainer, straight_run, monkeypatch, capsys, method: str
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    straight, trainer = straight_run(**STEPS), make_trainer(**STEPS, max_restarts=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), dying(patch, method, 4):
        patch.setattr(recovery, "wait", interrupted)
        trainer.fit()
    assert "the ranks have ended: fit() makes them again" in capsys.readouterr().err
    for call in (trainer.step, trainer.save, trainer.evaluate, lambda: trainer.generate("1+2=")):
        with pytest.raises(HybridRLError, match=r"ended after training step 3 \(Injected.*: fit\(\) makes them again"):
            call()
    assert "fit() makes them again" in repr(trainer)
    trainer.fit(steps=1)
    assert trainer.global_step == 3
    trainer.fit()
    assert weights(trainer, 5) == weights(straight, 5)
    trainer.close()
    with pytest.raises(HybridRLError, match="this Trainer is closed"):
        trainer.fit()


def test_restarts_that_could_not_work_are_refused(make_trainer) -> None:
    with pytest.raises(ConfigError, match="max_restarts=1: a restart goes on from the last checkpoint, and none"):
        make_trainer(max_restarts=1)
    with pytest.raises(ConfigError, match="pass the model by its name or folder"):
        make_trainer(**STEPS, max_restarts=1, beta=0.1)


def test_the_wait_doubles_until_training_gets_further(monkeypatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 5.0)
    counted = restarts.Restarts(99)
    error = InjectedFault("gone")
    vars(error)["_is_of_ranks"] = True
    waits = []
    for step in (4, 3, 5):
        counted.admit(error, step)
        waits.append(counted.delay_seconds)
    for _ in range(8):
        counted.admit(error, 5, at_start=True)
        waits.append(counted.delay_seconds)
    assert waits == [5, 10, 5, 10, 20, 40, 80, 160, 300, 300, 300] and counted.number == 11


def test_the_weights_of_a_dead_worker_are_let_go(make_trainer, monkeypatch, model_folder) -> None:
    """What the error's frames held would else stay in memory beside what is loaded again."""
    import weakref

    trainer = make_trainer(model=str(model_folder), **STEPS, max_restarts=1)
    worker = weakref.ref(worker_of(trainer))
    with dying(monkeypatch, "update", 3):
        trainer.fit()
    assert worker() is None


# --------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    ("method", "saved"),
    [("rollout", 1), ("update", 2), ("begin_save", 2), ("evaluate", 2)],
    ids=lambda value: str(value),
)
def test_a_signal_saves_the_last_step_and_a_resumed_run_is_the_same(
    make_trainer, straight_run, records, monkeypatch, method: str, saved: int
) -> None:
    """In step 2: before the update the step is taken back, from the update on it is completed. Without save_steps."""
    from hybrid_rl.workers.hybrid import HybridWorker

    keys = {"max_steps": 3, "run_name": "run", "eval_dataset": sums(2), "eval_steps": 1}
    if method == "begin_save":
        keys |= {"save_steps": 2}
    stopped = make_trainer(**keys, enable_jit_checkpoint=True)
    owner = RunEvaluator if method == "evaluate" else HybridWorker
    original = getattr(owner, method)

    def signalled(self: Any, *arguments: Any) -> Any:
        step = next((one.state.global_step for one in arguments if hasattr(one, "state")), stopped.global_step + 1)
        if step == (3 if method in ("begin_save", "evaluate") else 2):  # they come after their step is counted
            signal.raise_signal(signal.SIGTERM)
        return original(self, *arguments)

    vars(signalled).update(vars(original))
    signalled.__name__ = method
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, signalled)
        with pytest.raises(RunStopped) as raised:
            stopped.fit()
    assert (raised.value.reason, raised.value.code, stopped.global_step) == ("SIGTERM", 75, saved)
    assert [path.name for path in stopped.run_folder.glob("*checkpoint-*")] == [f"checkpoint-{saved}"]
    stopped.close()
    resumed = make_trainer(**keys | {"save_steps": 3}, resume="auto")
    resumed.fit()
    assert [line["step"] for line in records(resumed)] == [0, 1, 2, 3]
    assert weights(resumed, 3) == weights(straight_run(**keys | {"save_steps": 3}), 3)


def test_an_evaluation_that_has_begun_is_made_before_a_run_stops(make_trainer, records, monkeypatch) -> None:
    """A resumed run begins after that step, and would never evaluate it."""
    trainer = make_trainer(
        max_steps=3, save_steps=1, eval_dataset=sums(2), eval_steps=1, run_name="run", enable_jit_checkpoint=True
    )
    rollout = type(trainer.collector).rollout

    def signalled(self: Any, *arguments: Any, **named: Any) -> Any:
        if trainer.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
        return rollout(self, *arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(RunStopped):
        patch.setattr(type(trainer.collector), "rollout", signalled)
        trainer.fit()
    assert trainer.global_step == 2
    assert ["eval/reward" in line for line in records(trainer)] == [True, True, True]


def test_an_engine_that_dies_in_an_evaluation_costs_no_evaluation(make_trainer, records, monkeypatch) -> None:
    trainer = make_trainer(**STEPS | {"save_steps": 1}, max_restarts=1, eval_dataset=sums(2), eval_steps=1)
    rollout, failures = type(trainer.collector).rollout, [True]

    def dying(self: Any, *arguments: Any, **named: Any) -> Any:
        if trainer.global_step == 2 and failures and failures.pop():
            error = InjectedFault("gone")
            vars(error)["_is_of_ranks"] = True
            raise error
        return rollout(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.collector), "rollout", dying)
        trainer.fit()
    assert trainer.global_step == 5 and not failures
    assert ["eval/reward" in line for line in records(trainer)] == [True] * 6


def test_an_error_of_on_save_is_not_told_as_a_lost_checkpoint(make_trainer, caplog) -> None:
    class Faulty(Callback):
        def on_save(self, *_: Any) -> None:
            raise LookupError("mine")

    trainer = make_trainer(max_steps=3, save_steps=2, callbacks=[Faulty()])
    with pytest.raises(LookupError):
        trainer.fit()
    trainer.close()
    assert (trainer.run_folder / "checkpoint-2").is_dir() and "is not there" not in caplog.text


@pytest.mark.parametrize("is_polled", [True, False])
def test_an_error_of_on_save_costs_no_checkpoint(make_trainer, monkeypatch, is_polled: bool) -> None:
    """The checkpoint of step 1 is noticed after step 2: by a look at it, or by waiting for it to write the next."""

    class Faulty(Callback):
        def on_save(self, trainer: Any, step: int, folder: Path) -> None:
            if step == 1:
                raise LookupError("mine")

    trainer = make_trainer(max_steps=4, save_steps=1, callbacks=[Faulty()])
    progress = PolicyGroup.save_progress

    def noticed(self: PolicyGroup, wait_seconds: float = 0.0) -> list[Progress]:
        if not wait_seconds and not (is_polled and trainer.global_step == 2):
            return [Progress(False, "", 0.0)]
        return progress(self, 60.0)

    monkeypatch.setattr(PolicyGroup, "save_progress", noticed)
    with pytest.raises(LookupError, match="mine"):
        trainer.fit()
    assert trainer.global_step == 2
    trainer.close()
    assert (trainer.run_folder / "checkpoint-2").is_dir()


def test_a_deadline_before_the_first_step_is_an_error(make_trainer) -> None:
    """Or a script that takes 75 for "try again" would start it for ever. pytest is older than a second."""
    keys = {"max_steps": 2, "save_steps": 1, "run_name": "run"}
    trainer = make_trainer(**keys, save_before="00:00:01")
    for _ in range(2):
        with pytest.raises(ConfigError, match="save_before='00:00:01' was over .* no training step was complete until"):
            trainer.fit()
    assert trainer.global_step == 0 and not list(trainer.run_folder.glob("checkpoint-*"))
    trainer.step()
    with pytest.raises(RunStopped) as raised:
        trainer.fit()
    assert (raised.value.reason, raised.value.code) == ("save_before", 75)
    trainer.close()
    with pytest.raises(ConfigError, match="no training step was complete"):
        make_trainer(**keys, resume="auto", save_before=1e0).fit()
    make_trainer(**keys, resume="auto").fit()
    make_trainer(**keys, resume="auto", save_before=1).fit()  # there is nothing to do


def test_a_stop_without_a_checkpoint_says_so_by_its_status(make_trainer, capsys) -> None:
    """As a shell has it: 128 and the number of SIGTERM, 15."""
    unsent = [signal.SIGTERM] * 2  # once a run: rewards of its other groups may be called when nothing listens any more

    def stopping(completion_ids, trainer_state, **_):
        if trainer_state.global_step == 2 and len(unsent) == 2:
            signal.raise_signal(unsent.pop())
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(reward_funcs=stopping)
    with pytest.raises(RunStopped) as raised, own_process():
        trainer.fit()
    assert (raised.value.reason, raised.value.code, trainer.global_step) == ("SIGTERM", 143, 1)
    told = capsys.readouterr().err
    assert "stopped by SIGTERM after training step 1: nothing was saved, because save_steps is not set" in told
    assert "there is no checkpoint to go on from (status 143)" in told and "status 75" not in told

    def at_once(completion_ids, **_):
        if unsent:
            signal.raise_signal(unsent.pop())
        return [0.0] * len(completion_ids)

    early = make_trainer(reward_funcs=at_once, save_steps=1, enable_jit_checkpoint=True)
    with pytest.raises(RunStopped) as raised:
        early.fit()
    assert raised.value.code == 143
    told = capsys.readouterr().err
    assert "step 0; nothing was trained since the start of this process; there is no checkpoint yet" in told


def test_a_second_ctrl_c_in_an_evaluation_leaves_it_to_a_later_fit(make_trainer, records, monkeypatch) -> None:
    keys = {"max_steps": 3, "save_steps": 1, "eval_dataset": sums(2), "eval_steps": 1, "run_name": "run"}
    straight = make_trainer(**keys | {"run_name": "straight"})
    straight.fit()

    def interrupted(trainer: Trainer) -> None:
        rollout = type(trainer.collector).rollout

        def twice(self: Any, *arguments: Any, **named: Any) -> Any:
            if trainer.global_step == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return rollout(self, *arguments, **named)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(trainer.collector), "rollout", twice)
            trainer.fit()
        assert trainer.global_step == 2 and "eval/reward" not in records(trainer)[-1]

    same = make_trainer(**keys | {"run_name": "same"})
    interrupted(same)
    same.fit()
    other = make_trainer(**keys)
    interrupted(other)
    other.close()
    resumed = make_trainer(**keys, resume="auto")
    resumed.fit()
    for trainer in (same, resumed):
        found = {line["step"]: line for line in records(trainer, comparable=True)}
        for name in ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high"):
            found[2].pop(name, None)  # a process that has seen no reward but 0 and 1 yet takes 1 for a success
        assert list(found.values()) == records(straight, comparable=True)  # the last record of a step counts
        assert weights(trainer, 3) == weights(straight, 3)
        assert "owed" not in read_state(trainer.run_folder / "checkpoint-2")


def test_an_evaluation_that_is_owed_is_left_out_by_a_run_without_its_data(make_trainer, monkeypatch, caplog) -> None:
    trainer = make_trainer(max_steps=3, save_steps=1, run_name="run")
    trainer.step()
    position_of(trainer).owed = {"reward": 1.0}  # as a second Ctrl-C leaves it
    trainer.save()
    trainer.close()
    resumed = make_trainer(max_steps=3, save_steps=1, run_name="run", resume="auto")
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        resumed.fit()
    assert resumed.global_step == 3 and "the evaluation after step 1 was broken off" in caplog.text


def test_an_error_of_processes_that_the_signal_ended_too_is_a_stop(make_trainer) -> None:
    """The signal goes to all processes of a job: those of rewards end by it, and their samples have no reward."""

    def broken(completion_ids, trainer_state, **_):
        if trainer_state.global_step == 2:
            stopper_of(trainer).stop.reason = "SIGTERM"
            raise LookupError("its process has ended")
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(reward_funcs=broken, enable_jit_checkpoint=True)
    with pytest.raises(RunStopped):
        trainer.fit()
    assert (trainer.run_folder / "checkpoint-1").is_dir()


def test_no_handler_is_installed_unasked(make_trainer) -> None:
    found: list[Any] = []

    class Look(Callback):
        def on_step_end(self, trainer, step, batch, metrics):
            found.append([signal.getsignal(number) for number in SIGNALS])

    before = [signal.getsignal(number) for number in SIGNALS]
    make_trainer(callbacks=[Look()], max_steps=1, save_steps=1).fit()
    make_trainer(callbacks=[Look()], max_steps=1, enable_jit_checkpoint=True).fit()
    with own_process():
        make_trainer(callbacks=[Look()], max_steps=1, save_steps=1).fit()
    assert found[0] == before and found[1] != before and found[2] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


REWARD = """
import os, signal
from pathlib import Path
from tests.support.tiny import spread

def score(completion_ids, trainer_state, **_):
    for name in ("SIGKILL", "SIGTERM"):
        mark = Path(__file__).with_name(name)
        if trainer_state.global_step == 2 and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), getattr(signal, name))
    return spread(completion_ids)
"""


def test_the_same_command_started_again_and_again(
    forked, make_trainer, records, model_folder: Path, tmp_path: Path
) -> None:
    """What a supervisor does: it is killed before the first checkpoint, told to stop, and started after the end."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(12)))
    keys = STEPS | {"max_steps": 3, "save_steps": 3, "prompts_per_step": 4, "num_generations": 2}
    keys |= {"max_completion_length": 5, "learning_rate": 1e-2}
    run = {"model.path": str(model_folder), "data.train_path": str(tmp_path / "data.jsonl")}
    config = keys | run | {"output_dir": str(tmp_path), "resume": "auto"}
    (tmp_path / "run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in config.items()))
    command = ["-m", "hybrid_rl", "train", f"config={tmp_path / 'run.yaml'}", f"reward={tmp_path / 'rewards.py'}:score"]

    def again() -> Any:
        return forked.run(*command, environment=os.environ | {"OMP_NUM_THREADS": "1"})

    for name in ("SIGKILL", "SIGTERM"):
        (tmp_path / name).touch()
    folder = tmp_path / "run"
    killed = again()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (folder / ".lock").exists() and not list(folder.glob("checkpoint-*"))
    stopped = again()
    assert stopped.returncode == 75, stopped.stderr
    assert "stopped by SIGTERM after training step 1; resume from" in stopped.stdout + stopped.stderr
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    for said in ("resuming", "nothing to do: step 3, max_steps=3"):
        done = again()
        assert done.returncode == 0 and said in done.stdout + done.stderr, done.stderr
    assert [line["step"] for line in records(folder)] == [0, 1, 2, 3]
    straight = make_trainer(model=str(model_folder), **keys)
    straight.fit()
    assert weights(straight, 3) == (folder / "checkpoint-3" / "model.safetensors").read_bytes()


def test_an_error_that_comes_again_after_the_same_step_ends_the_run_with_both_tracebacks(
    make_trainer, monkeypatch
) -> None:
    trainer = make_trainer(**STEPS, max_restarts=9)
    with (
        dying(monkeypatch, "update", 4, 4) as tried,
        pytest.raises(WorkerError, match="with the same error again after step 3") as raised,
    ):
        trainer.fit()
    assert str(raised.value).count("raise InjectedFault") == 2 and tried == [1, 2, 3, 4, 3, 4]


def test_losses_after_other_steps_end_the_run_when_there_were_enough(make_trainer, monkeypatch) -> None:
    trainer = make_trainer(**STEPS, max_restarts=1)
    with dying(monkeypatch, "update", 3, 5), pytest.raises(InjectedFault) as raised:
        trainer.fit()
    assert "there were 1 restarts, and max_restarts=1; the failure before came after step 2" in str(
        raised.value.__notes__
    )
    with pytest.raises(HybridRLError, match="make a new Trainer"):
        trainer.step()
