"""The faults of `soak.py`: which come in which step, drawn from a seed, and the functions of the run that fail by them.

Reward and tool processes and ranks import this file, so it imports little. What is to fail, and what has failed, lies
in the folder that the variable SOAK_FOLDER names: a fault of a step happens once in the life of a run, however often
the step is trained again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

FOLDER = "SOAK_FOLDER"
CALLS_IN_A_TRAJECTORY = 3
RIGHT = "23"
LONG_SECONDS = 3600.0
# What fails, and after how many steps again, on average.
EVERY = {
    "reward exception": 20,
    "reward hang": 50,
    "reward process killed": 30,
    "tool exception": 20,
    "tool hang": 50,
    "tool process killed": 40,
    "handoff": 120,
    "rank killed": 120,
    "driver killed": 250,
    "disk full": 160,
}
FILLER = "filler"  # the file that fills the disk
DISK_FULL_STEPS = 6  # so that the step of a checkpoint is among them
FIRST_STEP = 3


def draw_schedule(num_steps: int, seed: int, kinds: Sequence[str]) -> dict[int, str]:
    """Draw at most one fault per step: each kind as often as EVERY says, and once at least if there is room."""
    rng = random.Random(seed)
    free = list(range(FIRST_STEP, num_steps - 1))
    rng.shuffle(free)
    wanted = [kind for kind in kinds for _ in range(max(1, round(num_steps / EVERY[kind])))]
    wanted.sort(key=lambda kind: -EVERY[kind])  # the rare ones first, if steps do not suffice for all
    return dict(sorted(zip(free, wanted, strict=False)))


@cache
def schedule() -> dict[int, str]:
    """The faults of this run."""
    path = Path(os.environ[FOLDER]) / "schedule.json"
    return {int(step): kind for step, kind in json.loads(path.read_text()).items()} if path.exists() else {}


def note(kind: str, step: int) -> None:
    """Write down that a fault happened, before it does."""
    with (Path(os.environ[FOLDER]) / "faults.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "step": step, "pid": os.getpid()}) + "\n")


def claim(kind: str, step: int, value: str = "") -> bool:
    """Whether this caller is the first for whom the fault is due, or has the value of that one."""
    if schedule().get(step) != kind:
        return False
    path = Path(os.environ[FOLDER]) / "claims" / f"{step}"
    made = path.with_name(f"{step}.{os.getpid()}.{time.monotonic_ns()}")
    made.write_text(value)
    try:
        os.link(made, path)
    except FileExistsError:
        return bool(value) and path.read_text() == value
    finally:
        made.unlink()
    return True


def step_under_way() -> int:
    """The training step, for functions that are not told it."""
    return int((Path(os.environ[FOLDER]) / "step").read_text())


def right_calls(
    prompts: Sequence[Any], completions: Sequence[Sequence[Mapping[str, Any]]], trainer_state: Any, **_: Any
) -> list[float]:
    """The share of possible tool calls that gave 23. Of a step with a fault one sample always raises or hangs (and what
    says the same in its group), or the process ends, once."""
    step = trainer_state.global_step
    for prompt, said in zip(prompts, completions, strict=True):
        text = json.dumps([prompt, said])
        if claim("reward exception", step, text):
            note("reward exception", step)
            raise ArithmeticError("no reward for this one")
        if claim("reward hang", step, text):
            note("reward hang", step)
            time.sleep(LONG_SECONDS)
        if claim("reward process killed", step):
            note("reward process killed", step)
            os.kill(os.getpid(), signal.SIGKILL)
    return [
        sum(message["role"] == "tool" and message["content"] == RIGHT for message in said) / CALLS_IN_A_TRAJECTORY
        for said in completions
    ]


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: the other
    """
    step = step_under_way()
    if claim("tool exception", step):
        note("tool exception", step)
        raise ArithmeticError("no sums today")
    if claim("tool hang", step):
        note("tool hang", step)
        time.sleep(LONG_SECONDS)
    if claim("tool process killed", step):
        note("tool process killed", step)
        os.kill(os.getpid(), signal.SIGKILL)
    return a + b


def fail_handoffs() -> None:
    """Have handoffs of the last rank of this process fail, or kill it, when that is due."""
    from hybrid_rl.workers.rollout_side import ColocatedSide, EmbeddedSide

    for side in (ColocatedSide, EmbeddedSide):
        side.publish = _failing(side.publish)  # type: ignore[method-assign]


def _failing(publish: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    import torch.distributed as dist

    from hybrid_rl.errors import HandoffError

    @wraps(publish)
    def faulty(side: Any, version: int) -> Any:
        is_one_of_several = dist.is_initialized() and dist.get_world_size() > 1
        if not is_one_of_several or dist.get_rank() == dist.get_world_size() - 1:
            if is_one_of_several and claim("rank killed", version):
                note("rank killed", version)
                os.kill(os.getpid(), signal.SIGKILL)
            if claim("handoff", version):
                note("handoff", version)
                raise HandoffError("asked to fail")
        return publish(side, version)

    return faulty


# A rank imports this file when it gets the tool; processes of rewards and tools have no worker.
if FOLDER in os.environ and "hybrid_rl.workers.hybrid" in sys.modules:
    fail_handoffs()
