"""Ctrl-C and a full disk, in processes of their own: what was asked for is saved, and the run can go on."""

import json
import os
import signal
import threading
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from hybrid_rl import Trainer
from hybrid_rl.errors import CheckpointError, HybridRLError
from hybrid_rl.process import stopping
from tests.support.inside.trainers import evaluator_of
from tests.support.inside.workers import client_of, engine_of, worker_of
from tests.support.kills.forked import Forked
from tests.support.tiny import spread, sums

pytestmark = pytest.mark.slow  # the file as a whole

LIMIT_SECONDS = 60.0  # for what takes moments
KEYS = {
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 5,
    "learning_rate": 1e-2,
    "max_steps": 5,
    "run_name": "run",
    "save_steps": 2,
}
# Sends itself SIGINT once, in the main thread, where Ctrl-C arrives: at a given call of a method of the worker, or step
# of its engine in a rollout (the probe of a handoff is one request).
PROGRAM = """
import functools, json, os, signal, sys
import torch
torch.set_num_threads(1)
from hybrid_rl import Trainer
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.workers.hybrid import HybridWorker
from tests.support.tiny import build_model, build_tokenizer, spread, sums

where, when, keys = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
calls = {"num": 0}
owner = InPlaceEngine if where == "step" else HybridWorker
original = getattr(owner, where)


def interrupted(self, *args, **kwargs):
    calls["num"] += where != "step" or self.num_unfinished > 1
    if calls["num"] == when:
        calls["num"] += 1000
        os.kill(os.getpid(), signal.SIGINT)
    return original(self, *args, **kwargs)


functools.update_wrapper(interrupted, original)
setattr(owner, where, interrupted)
with Trainer(build_model(), spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
    trainer.fit()
"""


def run_program(forked: Forked, text: str, folder: Path, *arguments: str) -> CompletedProcess[str]:
    """The text as a script, as users run theirs."""
    (folder / "program.py").write_text(text)
    settings = json.dumps(KEYS | {"output_dir": str(folder)})
    return forked.run(str(folder / "program.py"), *arguments, settings, environment=os.environ)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "when", "steps_done"), [("step", 13, 2), ("update", 3, 3)], ids=["step", "update"])
def test_ctrl_c_ends_a_process_cleanly(
    forked, tmp_path, make_trainer, straight_run, records, where: str, when: int, steps_done: int
) -> None:
    """Before the update the step is taken back; from the update on it is completed, logged and saved. A resumed run
    then equals, bit for bit, the run that nobody disturbed."""
    broken = run_program(forked, PROGRAM, tmp_path, where, str(when))
    # Python's own end, by the signal or with code 1: which of them depends on torch's hooks at exit.
    assert broken.returncode in (-signal.SIGINT, 1), broken.stderr
    assert broken.stderr.rstrip().endswith("KeyboardInterrupt")
    assert f"interrupted after training step {steps_done}" in broken.stderr
    assert "During handling of the above exception" not in broken.stderr
    folder = tmp_path / "run"
    assert [line["step"] for line in records(folder)] == list(range(steps_done + 1))
    assert f"checkpoint-{steps_done}" in {path.name for path in folder.iterdir()}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]

    resumed = make_trainer(**KEYS, output_dir=str(tmp_path), resume="auto")
    assert resumed.run_folder == folder
    resumed.fit()
    straight = straight_run(**KEYS)
    assert_same_run(records, resumed, straight)
    weights = [folder / "checkpoint-5" / "model.safetensors" for folder in (resumed.run_folder, straight)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def assert_same_run(records, first: Trainer, second: Trainer | Path) -> None:
    assert records(first, comparable=True) == records(second, comparable=True)
    assert records(first, name="samples.jsonl") == records(second, name="samples.jsonl")


def interrupt_once(trainer: Trainer, method: str, when: int, monkeypatch) -> None:
    """SIGINT to this process at the given call of a method of the worker, or of its engine in a rollout (the probe of a
    handoff is one request)."""
    worker = worker_of(trainer)
    engine, calls = engine_of(worker), []
    owner = engine if method == "step" else worker
    original = getattr(owner, method)

    def interrupted(*args, **kwargs):
        if method != "step" or engine.num_unfinished > 1:
            calls.append(1)
            if len(calls) == when:
                signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, interrupted)


@pytest.mark.parametrize(
    ("method", "when", "step"),
    [("step", 8, 1), ("score", 2, 1), ("update_weights", 2, 2)],
)
def test_fit_in_a_notebook_goes_on_after_ctrl_c(
    make_trainer, straight_run, records, monkeypatch, method: str, when: int, step: int
) -> None:
    keys = {"max_steps": 4, "old_logprobs": "recompute"}  # with old logprobs to compute, so that `score` is called
    trainer = make_trainer(**keys)
    interrupt_once(trainer, method, when, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.global_step == step
    stats = client_of(trainer).stats()
    assert stats.num_running == stats.num_waiting == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not list(trainer.run_folder.glob("checkpoint-*"))  # none was asked for
    trainer.fit()
    assert_same_run(records, trainer, straight_run(**keys))


class Slow:
    """`spread`, which waits for `released` once; `begun` says that it does."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, completion_ids, **_):
        self.begun.set()
        self.released.wait(LIMIT_SECONDS)
        return spread(completion_ids)


def test_ctrl_c_while_a_reward_takes_long(make_trainer, records) -> None:
    """Everything is generated and the step waits for its rewards: it ends at once, and can be made again."""
    slow, fast = Slow(), Slow()
    fast.released.set()
    trainer, straight = make_trainer(reward_funcs=slow), make_trainer(reward_funcs=fast)

    def interrupt() -> None:
        slow.begun.wait(LIMIT_SECONDS)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert slow.begun.is_set() and not slow.released.is_set()
    assert trainer.global_step == 0
    slow.released.set()
    for one in (trainer, straight):
        one.fit()
    assert_same_run(records, trainer, straight)


def test_a_keyboard_interrupt_of_a_reward_function_ends_the_run_like_a_ctrl_c(make_trainer, records) -> None:
    def impatient(completion_ids, trainer_state, **_):
        if trainer_state.global_step == 2:
            raise KeyboardInterrupt
        return spread(completion_ids)

    trainer = make_trainer(reward_funcs=impatient, max_steps=3)
    with pytest.raises(KeyboardInterrupt, match="step 2: reward function 'impatient' raised KeyboardInterrupt"):
        trainer.fit()
    assert trainer.global_step == 1 and [line["step"] for line in records(trainer)] == [0, 1]


def test_ctrl_c_in_an_evaluation_loses_no_step(make_trainer, records, monkeypatch) -> None:
    trainer = make_trainer(max_steps=3, eval_dataset=sums(2), eval_steps=1, eval_on_start=False)
    evaluate = evaluator_of(trainer).evaluate

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return evaluate()

    monkeypatch.setattr(evaluator_of(trainer), "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert [line["step"] for line in records(trainer)] == [0, 1]
    monkeypatch.undo()
    trainer.fit()
    assert [line["step"] for line in records(trainer)] == [0, 1, 2, 3]


def test_ctrl_c_before_the_first_step(make_trainer, records, monkeypatch) -> None:
    """In the first evaluation: a later fit() makes it again."""
    trainer = make_trainer(eval_dataset=sums(2), save_steps=1)
    interrupt_once(trainer, "step", 2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert not list(trainer.run_folder.glob("checkpoint-*"))
    trainer.fit()
    assert ["eval/reward" in line for line in records(trainer)] == [True, False, True]


def test_second_ctrl_c_breaks_the_update_off_and_saves_nothing_torn(make_trainer, monkeypatch) -> None:
    keys = {"max_steps": 3, "save_steps": 1, "run_name": "run"}
    trainer = make_trainer(**keys)
    trainer.step()
    good = (trainer.run_folder / "checkpoint-1" / "model.safetensors").read_bytes()
    publish = worker_of(trainer).update_weights

    def twice(version: int):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return publish(version)

    monkeypatch.setattr(worker_of(trainer), "update_weights", twice)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    for call in (trainer.fit, trainer.step, trainer.save, lambda: trainer.generate("1")):
        with pytest.raises(HybridRLError, match="was interrupted"):
            call()
    assert [path.name for path in trainer.run_folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert (trainer.run_folder / "checkpoint-1" / "model.safetensors").read_bytes() == good
    assert make_trainer(**keys, resume="auto").global_step == 1


FULL_DISK = """
import resource, sys, json, signal
import torch
torch.set_num_threads(1)
from hybrid_rl import Trainer
from tests.support.tiny import build_model, build_tokenizer, spread, sums

trainer = Trainer(build_model(), spread, sums(12), tokenizer=build_tokenizer(), **json.loads(sys.argv[1]))
trainer.step()
trainer.step()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit then fails like one on a full disk
limit = (trainer.run_folder / "metrics.jsonl").stat().st_size + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
trainer.fit()
"""


@pytest.mark.slow
def test_full_disk_is_a_clear_error_and_leaves_the_earlier_checkpoint(forked, tmp_path, make_trainer, records) -> None:
    done = run_program(forked, FULL_DISK, tmp_path)
    assert done.returncode == 1
    assert "earlier checkpoints are untouched" in done.stderr
    assert "cannot write" in done.stderr
    folder = tmp_path / "run"
    assert [path.name for path in folder.glob("*checkpoint*")] == ["checkpoint-2"]
    assert [line["step"] for line in records(folder)] == [1, 2]  # no line is cut short
    resumed = make_trainer(**KEYS, output_dir=str(tmp_path), resume="auto")
    assert resumed.global_step == 2
    resumed.fit()


WRITER = "hybrid_rl.resharding.folders.write_shards"  # of the optimizer's state, after the weights


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_checkpoint_is_tried_again_after_the_next_step(make_trainer, monkeypatch) -> None:
    trainer = make_trainer(max_steps=4, save_steps=2)
    trainer.step()
    with monkeypatch.context() as patch:
        patch.setattr(WRITER, full)
        trainer.step()
        assert not list(trainer.run_folder.glob("*checkpoint*"))
    trainer.step()
    assert (trainer.run_folder / "checkpoint-3").is_dir()


def test_last_checkpoint_that_cannot_be_written_is_an_error(make_trainer, monkeypatch) -> None:
    trainer = make_trainer(save_steps=2)
    monkeypatch.setattr(WRITER, full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.fit()
    assert trainer.generate("1+2=")  # the model in memory is whole: it can be saved elsewhere
    monkeypatch.undo()
    assert trainer.save().is_dir()


def test_a_run_that_ignores_ctrl_c_goes_on_and_says_what_ends_it(make_trainer, monkeypatch, capsys) -> None:
    """As in the background of a script; once in a process, for which `fit()` may be called again and again."""
    monkeypatch.setattr(stopping, "_has_said_ignored", False)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = make_trainer()
        interrupt_once(trainer, "step", 2, monkeypatch)
        trainer.fit(steps=1)
        trainer.fit()
        assert trainer.global_step == 2 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert " ".join(capsys.readouterr().err.split()).count(f"kill {os.getpid()} (SIGTERM) ends the run at once") == 1
