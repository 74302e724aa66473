"""Partial rollouts on real ranks, and runs that are killed: as many ranks, or fewer, go on with what was held."""

import contextlib
import math
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.batch import BatchRef
from hybrid_rl.logging.report import read_jsonl
from tests.distributed.conftest import SETUP_WORKER, wait_until
from tests.distributed.ranks import forking
from tests.no_pictures import draw_nothing
from tests.replayed import gaps_by_version
from tests.tiny import build_model, build_tokenizer, sums

pytestmark = pytest.mark.slow  # processes are started

KEYS = {
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 40,
    "stop_token_ids": [6, 7],  # so that completions end by chance, after some 14 tokens
    "learning_rate": 2e-2,
    "max_steps": 4,
    "save_steps": 1,
    "oversample": 3,
    "run_name": "run",
    "resume": "auto",
    "rollout.partial": True,
}


def long(completion_ids, trainer_state, **_):
    """Depends on the step that it is told. If a file says so, it is slow in the third one."""
    mark = Path(os.environ.get("MARK", "none"))
    if trainer_state.global_step == 3 and mark.exists():
        mark.unlink()
        time.sleep(4)
    return [len(ids) + trainer_state.global_step / 64 for ids in completion_ids]


def make(folder: Path, **keys) -> Trainer:
    keys = {**KEYS, "output_dir": str(folder), **keys}
    rows = [row | {"number": number} for number, row in enumerate(sums(60))]
    return Trainer(build_model(), long, rows, tokenizer=build_tokenizer(), **keys)


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a policy version, as the checkpoint of that step has them."""
    if not step:
        return build_model().state_dict()
    return AutoModelForCausalLM.from_pretrained(folder / "run" / f"checkpoint-{step}").state_dict()


def rows_of(batch) -> list[int]:
    """The rows of the dataset of the groups of a batch, one for each."""
    return [row["number"] for row in batch["row"][:: KEYS["num_generations"]]]


def loaded(batch):
    return batch.load() if isinstance(batch, BatchRef) else batch


def test_two_ranks_hold_and_resume_as_two_and_as_one(forked_ranks, tmp_path, monkeypatch):
    """Versions are those of the weights. Resumed on two ranks, with a Ctrl-C, the run is the whole one; on one rank
    every prompt is still there once."""
    draw_nothing(monkeypatch)
    ages = Counter[int]()
    with make(tmp_path / "whole", num_ranks=2) as whole:
        steps = [loaded(whole.step().batch) for _ in range(4)]
    weights = {step: weights_at(tmp_path / "whole", step) for step in range(4)}
    for version, batch in enumerate(steps):
        gap, _, found = gaps_by_version(build_model(), weights, batch, version)
        assert gap < 1e-5
        ages.update(found)
    assert ages[1] > 50 and max(ages) == 1
    checkpoint = tmp_path / "whole" / "run" / "checkpoint-2"
    assert len(list(checkpoint.glob("held-*.json"))) == 2
    before = [row for batch in steps[:2] for row in rows_of(batch)]
    for num_ranks in (2, 1):
        mark = tmp_path / "mark"
        keys: dict[str, Any] = {"num_ranks": num_ranks, "resume": str(checkpoint)}
        if num_ranks == 2:
            keys["env_vars"] = {"MARK": str(mark)}
        with make(tmp_path / f"on-{num_ranks}", **keys) as resumed:
            if num_ranks == 2:
                interrupt(resumed, mark)
            again = [loaded(resumed.step().batch) for _ in range(2)]
            held = resumed.policy.held_prompts(4).values()
        after = [row for batch in again for row in rows_of(batch)]
        everything = before + after + [prompt.row.columns["number"] for prompt in held]
        assert len(set(everything)) == len(everything) == 4 * 4 + 3
        if num_ranks == 2:
            for mine, theirs in zip(again, steps[2:], strict=True):
                for name in ("completion_ids", "policy_version", "rollout_logprobs"):
                    assert torch.equal(mine[name].values, theirs[name].values)


def interrupt(trainer: Trainer, mark: Path) -> None:
    """Press Ctrl-C in a step as soon as a group is whole: while others are generated, or rewards awaited."""
    mark.touch()

    def press() -> None:
        wait_until(lambda: not mark.exists(), "the slow reward is never called")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    thread.join()
    assert trainer.global_step == 2


def train(
    folder: Path, keys: dict[str, Any], mark: Path | None = None, environment: dict[str, str] | None = None
) -> None:
    """The whole program of a process that may be killed. mark: made when training begins; environment: of ranks that
    are forks."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        if environment is not None:
            import ray._private.ray_constants

            patch.setattr(ray._private.ray_constants, "SETUP_WORKER_FILENAME", str(SETUP_WORKER))
            for name, value in environment.items():
                patch.setenv(name, value)
        with make(folder, **keys) as trainer:
            if mark is not None:
                mark.touch()
            trainer.fit()


KILLED: dict[str, Any] = {
    "rollout.async_level": 1,
    "max_steps": 6,
    "save_total_limit": 2,
}  # held groups, and some ahead
ALIKE = ("loss", "grad_norm", "reward", "staleness/mean_age", "buffer/held_tokens", "engine/idle_share", "epoch")


@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(30, marks=[pytest.mark.sweep, pytest.mark.timeout(1800)])], ids=str
)
def test_a_run_that_is_killed_at_random_moments_is_the_uninterrupted_one(num_kills, tmp_path):
    """SIGKILL after a random part of the CPU time of the whole run, with groups held and groups ahead."""
    context, rng = forking(), random.Random(num_kills)

    def start(name: str) -> tuple[Any, psutil.Process]:
        process = context.Process(target=train, args=(tmp_path / name, KILLED), daemon=True)
        process.start()
        return process, psutil.Process(process.pid)

    process, its = start("whole")
    used = 0.0
    while process.is_alive():
        with contextlib.suppress(psutil.Error):
            used = max(used, sum(its.cpu_times()[:2]))
        process.join(0.01)
    assert process.exitcode == 0

    def run(*, is_killed: bool) -> int:
        process, its = start("killed")
        moment = rng.uniform(0, used) if is_killed else math.inf
        while process.is_alive():
            with contextlib.suppress(psutil.Error):
                if sum(its.cpu_times()[:2]) > moment:
                    process.kill()
                    break
            process.join(0.005)
        process.join()
        return process.exitcode

    kill_and_resume(run, num_kills, tmp_path / "killed")
    assert_alike(tmp_path, num_ranks=1)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_kills", [3, 30])
def test_a_run_on_two_ranks_that_is_killed_at_random_moments_is_the_uninterrupted_one(forks, num_kills, tmp_path):
    """SIGKILL of the driver, a random part of the seconds that the whole run trained after it has begun to train."""
    context, rng = forking(), random.Random(num_kills)
    keys, mark = {**KILLED, "num_ranks": 2}, tmp_path / "mark"

    def start(name: str) -> Any:
        mark.unlink(missing_ok=True)
        process = context.Process(target=train, args=(tmp_path / name, keys, mark, forks.environment()), daemon=True)
        process.start()
        while process.is_alive() and not mark.exists():
            process.join(0.01)
        return process

    with forks.used():
        process, begun = start("whole"), time.monotonic()
        process.join()
        seconds = time.monotonic() - begun
        assert process.exitcode == 0

        def run(*, is_killed: bool) -> int:
            process = start("killed")
            process.join(rng.uniform(0, seconds) if is_killed else None)
            if process.is_alive():
                process.kill()
                process.join()
            return process.exitcode

        kill_and_resume(run, num_kills, tmp_path / "killed")
    assert_alike(tmp_path, num_ranks=2)


def kill_and_resume(run: Callable[..., int], num_kills: int, folder: Path) -> None:
    """Run and kill so many times, and once to the end. run: returns the exit status of one more process, which goes on
    in the folder; what was done before its moment came begins from the start."""
    num_killed = 0
    for _ in range(num_kills * 5):
        status = run(is_killed=num_killed < num_kills)
        assert status in (0, -signal.SIGKILL)
        if status:
            num_killed += 1
        elif num_killed >= num_kills:
            return
        else:
            shutil.rmtree(folder)
    pytest.fail(f"only {num_killed} of {num_kills} processes were killed before they were done")


def assert_alike(folder: Path, num_ranks: int) -> None:
    """The weights, what is held, the records of all samples, and the metrics of all steps are the same to the bit."""
    whole, killed = (folder / name / "run" for name in ("whole", "killed"))
    samples = ["samples.jsonl"] if num_ranks == 1 else [f"samples-rank{rank}.jsonl" for rank in range(num_ranks)]
    for name in samples:
        assert (whole / name).read_text() == (killed / name).read_text()
    files = ["model.safetensors", *(f"held-{rank:04d}.json" for rank in range(num_ranks))]
    for name in files:
        ours, theirs = ((one / "checkpoint-6" / name).read_bytes() for one in (whole, killed))
        assert ours == theirs, name
    lines = [read_jsonl(one / "metrics.jsonl") for one in (whole, killed)]
    assert [line["step"] for line in lines[1]][-6:] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(*(one[-6:] for one in lines), strict=True):
        assert {name: ours[name] for name in ALIKE} == {name: theirs[name] for name in ALIKE}
