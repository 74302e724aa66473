"""Runs as processes of their own, which tell what they are doing, so that they can be killed in the middle of it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from hybrid_rl import Callback, Trainer
from tests.distributed.conftest import SETUP_WORKER
from tests.distributed.ranks import forking
from tests.support.kills.killed_functions import CALLS, long
from tests.support.libraries.ray_names import start_ranks_with
from tests.support.libraries.vllm_names import inspect_here
from tests.support.plugins.no_pictures import draw_nothing
from tests.support.tiny import build_model, build_tokenizer, sums

KEYS: dict[str, Any] = {
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 40,
    "stop_token_ids": [6, 7],  # so that completions end by chance, after some 14 tokens
    "learning_rate": 2e-2,
    "max_steps": 6,
    "save_steps": 1,
    "save_rollouts": True,  # so that files tell all that a step was made of
    "handoff.probe_steps": 1,  # otherwise the first handoffs of a process are probed
    "run_name": "run",
    "resume": "auto",
}
# Of one file of a checkpoint in the background: a disk that takes its time, so that training has gone on meanwhile.
SYNC_SECONDS = 0.01
BETWEEN = "between"  # what a run does outside of the phases of its timeline


@dataclass
class Program:
    """What is run. environment: of ranks that are forks; model, tokenizer: the tiny ones unless given; make_tools:
    called in the process. is_slow_disk: whether SYNC_SECONDS hold, in a run of one process."""

    keys: Mapping[str, Any]
    reward: Any = long
    rows: Sequence[Any] = field(default_factory=lambda: sums(60))
    model: Any = field(default_factory=build_model)
    tokenizer: Any = field(default_factory=build_tokenizer)
    make_tools: Callable[[], Sequence[Any]] | None = None
    make_environment: Callable[[], Any] | None = None
    environment: Mapping[str, str] | None = None
    is_vllm: bool = False
    is_slow_disk: bool = False


class Doing(NamedTuple):
    """What a run is doing: a phase of its timeline in a step."""

    step: int
    phase: str


class Starter:
    """Starts processes of a program, all with the same model, and knows when they began to train.

    calls: the folder in which functions tell of their processes."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.program, self.calls = program, folder / "calls"
        self._doing, self._model = folder / "doing", folder / "model"
        program.model.save_pretrained(self._model)
        program.model = None
        self._began = 0.0

    def start(self, folder: Path, keys: Mapping[str, Any], pause_at: int | None = None) -> Any:
        """Begin or go on with the run in a folder, and return its process when it begins to train. pause_at: the step
        after whose checkpoint it waits until it is killed."""
        self._doing.unlink(missing_ok=True)
        shutil.rmtree(self.calls, ignore_errors=True)
        self.calls.mkdir()
        keys = {**KEYS, **self.program.keys, "output_dir": str(folder), **keys}
        arguments = (self.program, str(self._model), keys, self._doing, self.calls, pause_at)
        process = forking().Process(target=train, args=arguments, daemon=True)
        process.start()
        while process.is_alive() and not self._doing.exists():
            process.join(0.01)
        self._began = 0.0
        self._began = self.seconds(process)
        return process

    def seconds(self, process: Any) -> float:
        """Since it began to train: CPU time of one process that does all the work, for which others change nothing;
        with ranks the clock's."""
        if self.program.environment is not None:
            return time.monotonic() - self._began
        if not process.is_alive():
            return 0.0
        return sum(psutil.Process(process.pid).cpu_times()[:2]) - self._began

    def doing(self) -> Doing:
        """What the process does, or did when it was killed."""
        step, _, phase = self._doing.read_text().strip().partition(" ")
        return Doing(int(step), phase)


class Pause(Callback):
    """Waits to be killed after a step, once its checkpoint is there."""

    def __init__(self, step: int | None, tell: Callable[[int, str], None]) -> None:
        self._step, self._tell = step, tell

    def on_step_end(self, trainer: Any, step: int, batch: Any, metrics: Any) -> None:
        if step != self._step:
            return
        while not (trainer.run_folder / f"checkpoint-{step}").exists():
            time.sleep(0.001)
        self._tell(step, "paused")
        time.sleep(600)


def train(program: Program, model: str, keys: dict[str, Any], doing: Path, calls: Path, pause_at: int | None) -> None:
    """The whole life of a process that may be killed."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        patch.setenv(CALLS, str(calls))
        patch.setattr("hybrid_rl.run.restarts.FIRST_DELAY_SECONDS", 0.0)
        if program.is_vllm:
            inspect_here(patch)  # as `inspected_here`
        if program.environment is not None:
            start_ranks_with(SETUP_WORKER, patch)
            for name, value in program.environment.items():
                patch.setenv(name, value)
        if program.is_slow_disk:
            slow_down(patch)
        tell = telling(doing, patch)
        tools = None if program.make_tools is None else program.make_tools()
        arguments = {"tokenizer": program.tokenizer, "tools": tools, "callbacks": [Pause(pause_at, tell)]}
        arguments["environment_factory"] = program.make_environment
        with Trainer(model, program.reward, program.rows, **arguments, **keys) as trainer:
            tell(trainer.global_step, BETWEEN)
            trainer.fit()


def slow_down(patch: pytest.MonkeyPatch) -> None:
    """Have checkpoints in the background take longer."""
    from hybrid_rl.checkpoint import snapshot

    original = snapshot.sync

    def sync(path: Path) -> None:
        time.sleep(SYNC_SECONDS)
        original(path)

    patch.setattr(snapshot, "sync", sync)


def telling(path: Path, patch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """Have a run write what it does into a file, which stays if it is killed."""
    from hybrid_rl.run.timeline import Timeline

    file, now = -1, Doing(0, "")

    def tell(step: int, phase: str) -> None:
        nonlocal file, now
        now = Doing(step, phase)
        text = f"{step} {phase}".ljust(64)
        if file < 0:
            made = path.with_name(f"{path.name}.new")
            made.write_text(text)
            made.rename(path)
            file = os.open(path, os.O_WRONLY)
        os.pwrite(file, text.encode(), 0)

    step_of, phase_of = Timeline.step, Timeline.phase

    @contextlib.contextmanager
    def step(self: Any, number: int) -> Iterator[None]:
        tell(number, BETWEEN)
        with step_of(self, number):
            yield

    @contextlib.contextmanager
    def phase(self: Any, name: str) -> Iterator[None]:
        before = now.phase
        tell(now.step, name)
        with phase_of(self, name):
            yield
        tell(now.step, before)

    patch.setattr(Timeline, "step", functools.wraps(step_of)(step))
    patch.setattr(Timeline, "phase", functools.wraps(phase_of)(phase))
    return tell
