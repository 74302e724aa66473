"""Partial rollouts on real ranks: as many ranks, or fewer, go on with what was held."""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl import Trainer
from tests.distributed import test_rollout_ranks as rollout_ranks
from tests.distributed.conftest import wait_until
from tests.distributed.test_rollout_ranks import loaded, numbers, weights_at
from tests.support.engines.replayed import gaps_by_version
from tests.support.tiny import build_model, build_tokenizer, sums

pytestmark = pytest.mark.slow  # processes are started

KEYS = {name: value for name, value in rollout_ranks.KEYS.items() if name != "rollout_ranks"} | {
    "oversample": 3,
    "run_name": "run",
    "resume": "auto",
    "rollout.partial": True,
}


def long(completion_ids, trainer_state, **_):
    """If a file says so, it is slow in the third step."""
    mark = Path(os.environ.get("MARK", "none"))
    if trainer_state.global_step == 3 and mark.exists():
        mark.unlink()
        time.sleep(4)
    return rollout_ranks.long(completion_ids, trainer_state)


def make(folder: Path, **keys) -> Trainer:
    keys = {**KEYS, "output_dir": str(folder), **keys}
    rows = [row | {"number": number} for number, row in enumerate(sums(60))]
    return Trainer(build_model(), long, rows, tokenizer=build_tokenizer(), **keys)


def test_two_ranks_hold_and_resume_as_two_and_as_one(forked_ranks, tmp_path):
    """Versions are those of the weights. Resumed on two ranks, with a Ctrl-C, the run is the whole one; on one rank
    every prompt is still there once."""
    ages = Counter[int]()
    with make(tmp_path / "whole", num_ranks=2) as whole:
        steps = [loaded(whole.step().batch) for _ in range(4)]
    weights = {step: weights_at(whole, step) for step in range(4)}
    for version, batch in enumerate(steps):
        gap, _, found = gaps_by_version(build_model(), weights, batch, version)
        assert gap < 1e-5
        ages.update(found)
    assert ages[1] > 50 and max(ages) == 1
    checkpoint = tmp_path / "whole" / "run" / "checkpoint-2"
    assert len(list(checkpoint.glob("held-*.json"))) == 2
    before = [row for batch in steps[:2] for row in numbers(batch)]
    for num_ranks in (2, 1):
        mark = tmp_path / "mark"
        keys: dict[str, Any] = {"num_ranks": num_ranks, "resume": str(checkpoint)}
        if num_ranks == 2:
            keys["ray.env_vars"] = {"MARK": str(mark)}
        with make(tmp_path / f"on-{num_ranks}", **keys) as resumed:
            if num_ranks == 2:
                interrupt(resumed, mark)
            again = [loaded(resumed.step().batch) for _ in range(2)]
            held = resumed.generating.held_prompts(4).values()
        after = [row for batch in again for row in numbers(batch)]
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
