"""Runs with several ranks that lose one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.run import restarts
from tests.support.tiny import build_model, build_tokenizer, spread, sums

pytestmark = pytest.mark.slow
CLOCK = ("timing/", "perf/", "memory/", "step_time", "handoff/", "restarts")


@pytest.fixture
def make(tmp_path: Path, forked_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainer]]:
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.0)
    made = []

    def trainer(reward: Any, **keys: Any) -> Trainer:
        keys = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 4, **keys}
        keys = {"output_dir": str(tmp_path / "runs"), "num_ranks": 2, "save_steps": 2, "learning_rate": 1e-2, **keys}
        made.append(Trainer(build_model(), reward, sums(12), tokenizer=build_tokenizer(), **keys))
        return made[-1]

    yield trainer
    for one in made:
        one.close()


def mortal(completion_ids, trainer_state, **columns):
    """Kills rank 1 in step 4, once."""
    import torch.distributed as dist

    mark = Path(os.environ["MARK"])
    if dist.get_rank() == 1 and trainer_state.global_step == 4 and mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return spread(completion_ids)


def test_a_lost_rank_costs_the_steps_since_the_last_checkpoint(make, tmp_path: Path, caplog) -> None:
    straight = make(spread)
    straight.fit()
    mark = tmp_path / "mark"
    mark.touch()
    trainer = make(mortal, max_restarts=1, ray={"env_vars": {"MARK": str(mark)}})
    assert trainer.fit()["restarts"] == 1.0 and not mark.exists()
    told = next(text for text in caplog.messages if "Restart 1 of at most 1" in text)
    assert "after training step 3: policy rank 1 of 2 failed in rollout()" in told and "checkpoint-2" in told
    records = [
        [
            {name: value for name, value in line.items() if not name.startswith((*CLOCK, "rewards/"))}
            for line in read_jsonl(one.run_folder / "metrics.jsonl")
        ]
        for one in (straight, trainer)
    ]
    assert [line["step"] for line in records[1]] == [0, 1, 2, 3, 4] and records[0] == records[1]
    weights = [(one.run_folder / "checkpoint-4" / "model.safetensors").read_bytes() for one in (straight, trainer)]
    assert weights[0] == weights[1]
