"""Runs that are killed at random moments and go on from their checkpoints, held against the run that was not: the
checkpoint that each kill leaves, and at the end all samples, metrics and weights, to the bit."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil

from hybrid_rl.logging.report import read_jsonl

NUM_STEPS = 6
# Groups that are held, groups ahead, and both. Every rollout is saved, so that files tell all that a step was made of.
HOLDING: dict[str, dict[str, Any]] = {
    "partial": {"rollout.partial": True, "oversample": 3},
    "async_level": {"rollout.async_level": 1},
    "both": {"rollout.partial": True, "rollout.async_level": 1, "oversample": 3},
}
KEYS: dict[str, Any] = {
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 40,
    "stop_token_ids": [6, 7],  # so that completions end by chance, after some 14 tokens
    "learning_rate": 2e-2,
    "max_steps": NUM_STEPS,
    "save_steps": 1,
    "save_rollouts": True,
    "probe_steps": 1,  # otherwise the first handoffs of a process are probed
    "run_name": "run",
    "resume": "auto",
}
# What a run's own clock, machine and history decide; everything else that it logs must be the same.
BY_CHANCE = (
    *("time", "step_time", "timing/*", "perf/*", "memory/*", "handoff/seconds", "host/*"),
    *("elapsed*", "*seconds*"),
)
# A process lives for this share of the whole run at most: its first step takes longest, and some two kills come before
# the end is reached.
LONGEST_LIFE = 0.9


def long(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
    """A reward that depends on the step that it is told."""
    return [len(ids) + trainer_state.global_step / 64 for ids in completion_ids]


class Killed:
    """A run in folder / "killed" beside the whole one in folder / "whole". start: begins or goes on with the run in a
    folder, with further keys, and returns its process when it begins to train; clock: seconds of it since then."""

    def __init__(
        self,
        folder: Path,
        start: Callable[[Path, dict[str, Any]], Any],
        clock: Callable[[Any], float],
        *,
        seed: int,
        num_ranks: int = 1,
    ) -> None:
        self.whole, self.killed = folder / "whole" / "run", folder / "killed" / "run"
        self._start, self._clock, self._num_ranks = start, clock, num_ranks
        self._rng = random.Random(seed)

    def play(self, num_kills: int) -> None:
        """Kill so many times, and look after each; whenever the run comes to its end, look at all of it."""
        seconds, status = self._live(self.whole)
        assert status == 0
        num_killed, is_whole = 0, False
        while num_killed < num_kills or not is_whole:
            moment = self._rng.uniform(0, LONGEST_LIFE * seconds) if num_killed < num_kills else None
            _, status = self._live(self.killed, moment)
            assert status in (0, -signal.SIGKILL)
            is_whole = status == 0
            if is_whole:
                self._compare_all()
                print(f"after {num_killed} of {num_kills} kills a run has ended as the whole one did", flush=True)
                if num_killed < num_kills:
                    shutil.rmtree(self.killed.parent)
                continue
            num_killed += 1
            print(f"kill {num_killed} after {moment:.2f} s of {seconds:.2f}: {self._compare_so_far()}", flush=True)

    def _live(self, run_folder: Path, moment: float | None = None) -> tuple[float, int]:
        """Run until the end, or until SIGKILL at this moment. Returns seconds, and the exit status."""
        keys = {} if run_folder is self.whole else {"save_total_limit": 2}
        process, seconds = self._start(run_folder.parent, keys), 0.0
        while process.is_alive():
            with contextlib.suppress(psutil.Error):
                seconds = max(seconds, self._clock(process))
                if moment is not None and seconds > moment:
                    process.kill()
                    break
            process.join(0.003)
        process.join()
        return seconds, process.exitcode

    def _compare_so_far(self) -> str:
        """Check the newest checkpoint that a kill has left, and every rollout before it. Returns a word about them."""
        names = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in self.killed.glob("checkpoint-*")]
        step = max((int(name[1]) for name in names if name), default=0)
        if step:
            self._compare_checkpoint(step)
        num_bytes = self._compare_rollouts(step)
        is_collected = len([*self.killed.glob(f"rollouts/step-{step + 1:06d}-*.safetensors")]) == self._num_ranks
        doing = (
            "trained, or was saved" if is_collected else "generated, or began" if step < NUM_STEPS else "was not there"
        )
        return (
            f"step {step + 1} {doing}; checkpoint {step} and {num_bytes} bytes of rollouts are those of the whole run"
        )

    def _compare_checkpoint(self, step: int) -> None:
        held = [f"held-{rank:04d}.json" for rank in range(self._num_ranks)]
        for name in ("model.safetensors", *held):
            ours, theirs = ((run / f"checkpoint-{step}" / name).read_bytes() for run in (self.whole, self.killed))
            assert ours == theirs, (step, name)

    def _compare_rollouts(self, last: int) -> int:
        """Compare tokens, versions, logprobs, rewards and all else that was saved of the samples of each step."""
        num_bytes = 0
        for step in range(1, last + 1):
            names = {path.name for path in self.whole.glob(f"rollouts/step-{step:06d}-*.safetensors")}
            assert len(names) == self._num_ranks
            for name in names:
                ours, theirs = (tensors_of(run / "rollouts" / name) for run in (self.whole, self.killed))
                assert ours == theirs, name
                num_bytes += len(ours[1])
        return num_bytes

    def _compare_all(self) -> None:
        self._compare_checkpoint(NUM_STEPS)
        self._compare_rollouts(NUM_STEPS)
        for path in self.whole.glob("samples*.jsonl"):
            assert path.read_text() == (self.killed / path.name).read_text()
        ours, theirs = (last_lines(run / "metrics.jsonl") for run in (self.whole, self.killed))
        assert ours == theirs


def tensors_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """What a file of safetensors describes, in whatever order its header has it, and the bytes of its tensors."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def last_lines(path: Path) -> list[Mapping[str, Any]]:
    """What is logged of every step, without what chance decides."""
    found = {line["step"]: line for line in read_jsonl(path) if line["step"]}
    assert [*found] == [*range(1, NUM_STEPS + 1)]
    return [without_chance(line) for line in found.values()]


def without_chance(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is logged of a step, without what its own time and machine decide."""
    return {name: value for name, value in line.items() if not any(fnmatch(name, pattern) for pattern in BY_CHANCE)}
