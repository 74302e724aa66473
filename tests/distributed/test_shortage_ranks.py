"""Memory that runs out on one of two ranks, of which the other is in the middle of a collective."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl import Trainer
from hybrid_rl.errors import WorkerError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.run import restarts
from tests.support.tiny import build_model, build_tokenizer, spread, sums

pytestmark = pytest.mark.slow  # processes are started

KEY = "optimizer.tokens_per_micro_batch"
# An update that is proportional to the gradient: Adam's own would make noise of the smallest ones as large as the rest.
LEARNING = {"learning_rate": 0.1, "adam_epsilon": 1.0, "max_grad_norm": 1e6}
KEYS = LEARNING | {"old_logprobs": "recompute", "prompts_per_step": 4, "num_generations": 4, "max_completion_length": 5}


def narrow(completion_ids, trainer_state, **columns):
    """A reward which, from step 2 on, makes the memory of rank 1 too small for larger passes of a phase: rewards run on
    the ranks. PHASES: such as "update=30 rollout=6"."""
    import torch.distributed as dist

    from tests.support.memory.small_memory import SmallMemory

    if trainer_state.global_step == 2 and dist.get_rank() == 1 and not hasattr(narrow, "is_done"):
        narrow.is_done = True
        for phase, most in (part.split("=") for part in os.environ["PHASES"].split()):
            SmallMemory(phase, int(most), at_end=phase == "update").install(pytest.MonkeyPatch())
    return spread(completion_ids)


@pytest.fixture
def make(tmp_path: Path, forked_ranks, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.0)
    made = []

    def trainer(phases: str = "", **keys) -> Trainer:
        own = {"num_ranks": 2, "ray": {"env_vars": {"PHASES": phases}}} if phases else {}
        keys = {"output_dir": str(tmp_path), "max_steps": 3, "save_steps": 1, **KEYS, **own, **keys}
        reward = narrow if phases else spread
        made.append(Trainer(build_model(), reward, sums(12), tokenizer=build_tokenizer(), **keys))
        return made[-1]

    yield trainer
    for each in made:
        each.close()


def assert_learned_the_same(trainer: Trainer, straight: Trainer) -> None:
    mine, theirs = (load_file(run.run_folder / "checkpoint-3" / "model.safetensors") for run in (trainer, straight))
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("phase", ["update", pytest.param("scoring", marks=pytest.mark.sweep)])
def test_a_shortage_on_one_rank_costs_the_steps_since_the_checkpoint_and_half_the_micro_batch(make, phase, caplog):
    straight = make()
    straight.fit()
    trainer = make(f"{phase}=30 rollout=6", max_restarts=1)
    assert trainer.fit()["restarts"] == 1.0
    assert_learned_the_same(trainer, straight)
    (told,) = (text for text in caplog.messages if f"{KEY}=" in text)
    tokens = int(re.search(rf"{KEY}=(\d+)", told)[1])
    assert "memory ran out in a pass of one of several ranks" in told and 15 <= tokens <= 30
    doing = {"update": "update()", "scoring": "score()"}[phase]
    restart = next(text for text in caplog.messages if "Restart 1 of at most 1" in text)
    assert f"after training step 1: policy rank 1 of 2 failed in {doing}" in restart and "checkpoint-1" in restart
    assert f"tokens_per_micro_batch: {tokens}\n" in (trainer.run_folder / "config.yaml").read_text()
    lines = read_jsonl(trainer.run_folder / "metrics.jsonl")
    assert [line.get("set/tokens_per_micro_batch") for line in lines if line["step"]] == [None, tokens, tokens]
    # The engine of a rank does not wait for others within its passes, so that it goes on by itself.
    assert any("policy rank 1" in text and "memory ran out in a pass of the engine" in text for text in caplog.messages)


def test_without_restarts_the_error_of_a_rank_says_what_to_set(make):
    trainer = make("scoring=30")
    with pytest.raises(WorkerError, match=r"policy rank 1 of 2 failed in score\(\) at training step 2") as raised:
        trainer.fit()
    tokens = int(re.search(r"the largest of this rank had (\d+) tokens", str(raised.value))[1])
    assert any(note.startswith(f"set {KEY}={tokens // 2}: passes are smaller") for note in raised.value.__notes__)
