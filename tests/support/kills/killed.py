"""Runs that lose processes by SIGKILL, held against the run that lost none: the checkpoint that each kill of a driver
leaves, and at the end all samples, metrics, weights and optimizers, to the bit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybrid_rl.batch.jagged import Jagged
from hybrid_rl.batch.rollout_files import load_rollout
from hybrid_rl.checkpoint.manifest import MANIFEST_FILE, STATE_FILE
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.kills.killed_runs import Doing, Starter

# Groups that are held, groups ahead, and both.
HOLDING: dict[str, dict[str, Any]] = {
    "partial": {"rollout.partial": True, "oversample": 3},
    "async_level": {"rollout.async_level": 1},
    "both": {"rollout.partial": True, "rollout.async_level": 1, "oversample": 3},
}
# What a run's own clock, machine and history decide; everything else that it logs must be the same.
BY_CHANCE = (
    *("time", "step_time", "timing/*", "perf/*", "memory/*", "handoff/seconds", "host/*"),
    *("elapsed*", "*seconds*"),
)
# What the number of ranks decides.
OF_RANKS = ("ranks/*", "handoff/*bytes")
# What is counted of losses that the run itself has made good.
RECORDED = (  # and what the engine did not have to compute again
    *("agents/recorded_turns", "agents/recorded_calls", "agents/repeated_calls"),
    *("agents/prefix_hit_share", "agents/open_max", "engine/steps"),
    *("buffer/restarted_trajectories", "buffer/continued_tokens"),
)
COUNTED = {
    "driver": RECORDED,
    "rank": ("restarts", *RECORDED),
    "reward": ("rewards/num_retried",),
}
# Moments of kills: any, while a checkpoint is written in the background, or a phase of the timeline by its name.
ANY, BACKGROUND = "any", "background"
# A process lives for this share of the whole run at most: its first step takes longest, and some two kills come before
# the end is reached.
LONGEST_LIFE = 0.9
LOOK_SECONDS = 0.001
BACKGROUND_SECONDS = 0.02  # less than a checkpoint takes on a slow disk
WARDEN = "hybrid_rl.extras.sandbox.warden"  # on the command line of the process that starts programs, and of its forks
# Another restart would not help if training failed again after the same step, so the next kill of a rank comes later.
STEPS_APART = 2


class Kill(NamedTuple):
    """What a SIGKILL hit. is_saving: a checkpoint was written in the background; is_in_call: the process was calling a
    function."""

    victim: str
    doing: Doing
    is_saving: bool
    is_in_call: bool

    def __str__(self) -> str:
        where = self.doing.phase + (", saving" if self.is_saving else "") + (", in a call" if self.is_in_call else "")
        return f"{self.victim}: {where}"


class Killed:
    """A run in folder / "killed" beside the whole one in folder / "whole". num_ranks: that write its files.

    kills: all of them, in order."""

    def __init__(self, folder: Path, starter: Starter, *, seed: int, num_ranks: int = 1, num_steps: int = 6) -> None:
        self.whole, self.killed = folder / "whole" / "run", folder / "killed" / "run"
        self.kills: list[Kill] = []
        self._starter, self._num_ranks, self._rng = starter, num_ranks, random.Random(seed)
        self._num_steps, self._seconds = num_steps, 0.0

    # ---------------------------------------------------------------------------------------------------------- plays

    def play(self, num_kills: int, moments: Sequence[str] = (ANY,), victim: str = "driver") -> None:
        """Kill so many times, at these moments in turn. A driver is started again, and what it left is looked at; other
        victims are lost to a run that goes on. Whenever the run comes to its end, look at all of it."""
        self.run_whole()
        left, is_whole = [*islice(cycle(moments), num_kills)], False
        while left or not is_whole:
            is_whole = self.live(left, victim)
            if is_whole:
                self._compare_all(COUNTED[victim])
                print(f"{len(self.kills)} of {num_kills} kills: a run has ended as the whole one did", flush=True)
                if left:
                    shutil.rmtree(self.killed.parent)
            else:
                print(f"kill {len(self.kills)}: {self.kills[-1]}; {self._compare_so_far()}", flush=True)

    def play_at(self, steps: Sequence[int]) -> None:
        """Kill the driver as soon as it has the checkpoint of each of these steps, and before it does anything else."""
        self.run_whole()
        for step in steps:
            assert not self.live([], pause_at=step)
            assert self.kills[-1].doing == (step, "paused")
            print(f"kill after step {step}: {self._compare_so_far()}", flush=True)
        assert self.live([])
        self._compare_all()

    def play_ranks(self, sizes: Sequence[int], moments: Sequence[str], tolerance: float) -> None:
        """Go on with other numbers of ranks after each kill, and compare with a run that kept the first of them."""
        self.run_whole({"num_ranks": sizes[0]})
        for place, (num_ranks, moment) in enumerate(zip(sizes, moments, strict=False)):
            step = 1 + (place + 1) * self._num_steps // len(sizes)
            assert not self.live([moment], keys={"num_ranks": num_ranks}, earliest=step, latest=step)
            print(f"kill on {num_ranks} ranks: {self.kills[-1]}", flush=True)
        assert self.live([], keys={"num_ranks": sizes[-1]})
        self._compare_nearly(tolerance)

    def play_tools(self, num_kills: int, moments: Sequence[str], victim: str, words: Sequence[str]) -> int:
        """Kill a process of tools once in each run. If it was in a call, the policy is told so, in one of these words,
        and from then on the run is another one; otherwise nothing may differ. Returns how many runs were told."""
        self.run_whole()
        num_told, left = 0, [*islice(cycle(moments), num_kills)]
        while left:
            before = len(self.kills)
            assert self.live(left[:1], victim)
            if len(self.kills) > before:
                del left[0]
                is_told = self._compare_told(words)
                num_told += is_told
                print(f"kill {len(self.kills)}: {self.kills[-1]}; {'told' if is_told else 'the whole run'}", flush=True)
            shutil.rmtree(self.killed.parent)
        return num_told

    def run_whole(self, keys: Mapping[str, Any] | None = None) -> None:
        """Run without a kill."""
        process = self._starter.start(self.whole.parent, keys or {})
        last = self.whole / f"checkpoint-{self._num_steps}"
        while process.is_alive():
            with contextlib.suppress(psutil.Error):
                self._seconds = self._seconds if last.exists() else max(self._seconds, self._starter.seconds(process))
            process.join(0.01)
        assert process.exitcode == 0

    def tell(self, record_property: Callable[[str, object], None]) -> None:
        """Report how many kills hit what."""
        for what, number in Counter(map(str, self.kills)).items():
            record_property(what, number)
            print(f"{number} x {what}", flush=True)

    # ----------------------------------------------------------------------------------------------------------- life

    def live(
        self,
        left: list[str],
        victim: str = "driver",
        *,
        keys: Mapping[str, Any] | None = None,
        pause_at: int | None = None,
        earliest: int = 1,
        latest: int | None = None,
    ) -> bool:
        """Run until the end, or until the driver is killed; of the moments that are left, those that came are taken.
        Returns whether it came to its end."""
        process = self._starter.start(self.killed.parent, {"save_total_limit": 2, **(keys or {})}, pause_at)
        earliest, latest = max(earliest, self._newest() + 1), latest or self._num_steps
        moment = self._moment(left[0] if left and earliest <= latest else None, pause_at, earliest, latest)
        while process.is_alive():
            if moment(process) and (kill := self._kill(victim, process)) is not None:
                self.kills.append(kill)
                del left[:1]
                if victim == "driver":
                    break
                earliest = kill.doing.step + STEPS_APART
                moment = self._moment(left[0] if left and earliest <= latest else None, None, earliest, latest)
            process.join(LOOK_SECONDS)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode == 0

    def _moment(self, name: str | None, pause_at: int | None, earliest: int, latest: int) -> Callable[[Any], bool]:
        """Return what says, of the process, whether now is the moment."""
        if pause_at is not None:
            return lambda process: self._starter.doing().phase == "paused"
        if name is None:
            return lambda process: False
        if name == ANY:
            due = self._rng.uniform(0, LONGEST_LIFE * self._seconds)
            return lambda process: self._starter.seconds(process) > due
        step = self._rng.randint(earliest, latest)
        delay, began = self._rng.random() * self._usual_seconds(name), None

        def is_now(process: Any) -> bool:
            nonlocal began
            doing = self._starter.doing()
            if began is None and doing.step >= step and name in (doing.phase, self._saving(doing)):
                began = time.monotonic()
            return began is not None and time.monotonic() - began >= delay

        return is_now

    def _usual_seconds(self, phase: str) -> float:
        """The median of the seconds that a phase took in the whole run."""
        if phase == BACKGROUND:
            return BACKGROUND_SECONDS
        records = read_jsonl(self.whole / "timeline.jsonl")
        found = sorted(seconds for record in records for name, _, seconds in record["phases"] if name == phase)
        return float(found[len(found) // 2])

    def _saving(self, doing: Doing) -> str:
        is_saving = doing.phase != "checkpoint" and any(self.killed.glob(".checkpoint-*.tmp"))
        return BACKGROUND if is_saving else ""

    def _kill(self, victim: str, process: Any) -> Kill | None:
        """Kill a process of this kind; None: there is none just now."""
        doing = self._starter.doing()
        try:
            pid, is_in_call = self._find(victim, process)
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return None
        if victim == "driver":
            process.join()
            doing = self._starter.doing()  # what it really did last
        return Kill(victim, doing, bool(self._saving(doing)), is_in_call)

    def _find(self, victim: str, process: Any) -> tuple[int, bool]:
        """The id of a process, and whether it is in a call. Raises ProcessLookupError if there is none."""
        if victim == "driver":
            return process.pid, False
        if victim == "rank":
            log = self._rng.choice(sorted(self.killed.glob("logs/policy-rank*.log")))
            return int(re.findall(r"pid (\d+) on", log.read_text())[-1]), False
        if victim == "sandbox":
            programs = [one.pid for one in psutil.Process(process.pid).children(recursive=True) if WARDEN in told(one)]
        else:
            found = [int(path.name) for path in self._starter.calls.iterdir() if path.name.isdigit()]
            programs = [pid for pid in found if psutil.pid_exists(pid)]
        if not programs:
            raise ProcessLookupError
        pid = self._rng.choice(programs)
        if victim == "sandbox":
            return pid, len(programs) > 1
        is_in_call = (self._starter.calls / f"{pid}.calls").exists()
        return self._rng.choice([pid, psutil.Process(pid).ppid()]), is_in_call  # or the one that keeps it

    # ----------------------------------------------------------------------------------------------------- comparison

    def _newest(self) -> int:
        names = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in self.killed.glob("checkpoint-*")]
        return max((int(name[1]) for name in names if name), default=0)

    def _compare_so_far(self) -> str:
        """Check the newest checkpoint that a kill has left, and every rollout before it. Returns a word about them."""
        step = self._newest()
        if step:
            self._compare_checkpoint(step)
        num_bytes, num_turns = self._compare_rollouts(step), self._look_at_turns()
        turns = f", and {num_turns} turns and calls of agents that had ended were written down once" * bool(num_turns)
        return f"checkpoint {step} and {num_bytes} bytes of rollouts are those of the whole run{turns}"

    def _compare_checkpoint(self, step: int) -> None:
        ours, theirs = (contents(run / f"checkpoint-{step}") for run in (self.whole, self.killed))
        assert not (wrong := [n for n in ours | theirs if ours.get(n) != theirs.get(n)]), (step, wrong)

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

    def _look_at_turns(self) -> int:
        """Check that no answer and no call that had ended was made again: whatever ends is written down. Returns how
        many are there."""
        names = Counter()
        for path in self.killed.glob("turns/step-*/*.jsonl"):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # cut off by a kill
                    trajectory, name, _ = json.loads(line)
                    names[trajectory, name] += 1
        assert all(number == 1 for number in names.values()), [name for name, number in names.items() if number > 1]
        return len(names)

    def _compare_all(self, counted: Sequence[str] = ()) -> None:
        self._compare_checkpoint(self._num_steps)
        self._compare_rollouts(self._num_steps)
        for path in self.whole.glob("samples*.jsonl"):
            assert path.read_text() == (self.killed / path.name).read_text()
        ours, theirs = (last_lines(run / "metrics.jsonl", self._num_steps, counted) for run in self._runs)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == other, {n: (mine.get(n), other.get(n)) for n in mine | other if mine.get(n) != other.get(n)}

    @property
    def _runs(self) -> tuple[Path, Path]:
        return self.whole, self.killed

    def _compare_nearly(self, tolerance: float) -> None:
        """Compare with a run on another number of ranks: tokens are the same, numbers differ by rounding."""
        for step in range(1, self._num_steps + 1):
            ours, theirs = (load_rollout(run / "rollouts", step) for run in self._runs)
            assert {*ours} == {*theirs}, {*ours} ^ {*theirs}
            for name in ours:
                assert_near(name, parts_of(ours[name]), parts_of(theirs[name]), tolerance)
        name = f"checkpoint-{self._num_steps}/model.safetensors"
        ours, theirs = (load_file(run / name) for run in self._runs)
        for name in ours:
            assert_near(name, [ours[name]], [theirs[name]], tolerance)
        ours, theirs = (last_lines(run / "metrics.jsonl", self._num_steps) for run in self._runs)
        for mine, other in zip(ours, theirs, strict=True):
            mine, other = ({n: line[n] for n in line if not is_among(n, OF_RANKS)} for line in (mine, other))
            near = partial(math.isclose, abs_tol=tolerance, rel_tol=tolerance)
            wrong = {n: (mine.get(n), other.get(n)) for n in mine | other}
            wrong = {n: pair for n, pair in wrong.items() if None in pair or not near(*pair)}
            assert not wrong, wrong

    def _compare_told(self, words: Sequence[str]) -> bool:
        """Compare the samples of each step, up to the first in which the policy was told of a lost process. Returns
        whether there is one."""
        # The advantages of a step depend on all of its samples.
        lines = [
            [
                {name: value for name, value in line.items() if name not in ("advantage", "token_values")}
                for line in found
            ]
            for found in (read_jsonl(run / "samples.jsonl") for run in self._runs)
        ]
        for step in range(1, self._num_steps + 1):
            ours, theirs = ([line for line in some if line["step"] == step] for some in lines)
            assert len(ours) == len(theirs)
            others = [json.dumps(b) for a, b in zip(ours, theirs, strict=True) if a != b]
            assert all(any(some in other for some in words) for other in others), (step, others)
            if others:
                return True
        ours, theirs = (contents(run / f"checkpoint-{self._num_steps}") for run in self._runs)
        assert ours == theirs
        return False


def told(process: psutil.Process) -> str:
    """The command line of a process; "" if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def contents(checkpoint: Path) -> dict[str, Any]:
    """All files of a checkpoint by name: models, optimizers, held groups, and the state but for the configuration."""
    found: dict[str, Any] = {}
    for path in (path for path in checkpoint.rglob("*") if path.is_file()):
        name = path.relative_to(checkpoint).as_posix()
        if name == STATE_FILE:
            found[name] = {key: value for key, value in json.loads(path.read_text()).items() if key != "config"}
        elif name != MANIFEST_FILE:  # hashes, of headers too
            found[name] = tensors_of(path) if path.suffix == ".safetensors" else path.read_bytes()
    return found


def tensors_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """What a file of safetensors describes, in whatever order its header has it, and the bytes of its tensors."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def parts_of(column: Any) -> list[Any]:
    """A column as tensors, or as a list of objects."""
    if isinstance(column, Jagged):
        return [column.values, column.offsets]
    return [column]


def assert_near(name: str, ours: Sequence[Any], theirs: Sequence[Any], tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, Tensor) and mine.is_floating_point():
            assert torch.allclose(mine, other, atol=tolerance, rtol=0, equal_nan=True), name
        else:
            assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other, name


def last_lines(path: Path, num_steps: int, counted: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """What is logged of every step, without what chance decides. counted: names that a run with losses alone has."""
    found = {line["step"]: line for line in read_jsonl(path) if line["step"]}
    assert [*found] == [*range(1, num_steps + 1)]
    return [{n: v for n, v in without_chance(line).items() if n not in counted} for line in found.values()]


def without_chance(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is logged of a step, without what its own time and machine decide."""
    return {name: value for name, value in line.items() if not is_among(name, BY_CHANCE)}


def is_among(name: str, patterns: Sequence[str]) -> bool:
    """Whether a metric has such a name."""
    return any(fnmatch(name, pattern) for pattern in patterns)
