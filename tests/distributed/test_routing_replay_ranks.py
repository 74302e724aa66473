"""Routing replay on two ranks: the engine decodes from an unsharded copy, the update gathers its shards, and tokens go
to the same experts in both."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.batch.rollout_files import load_rollout
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.tiny import VOCABULARY, build_tokenizer, spread, sums
from tests.unit.models.families import build

pytestmark = pytest.mark.slow  # processes are started

KEYS: dict[str, Any] = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "tokens_per_micro_batch": 48,
    "max_steps": 2,
    "routing_replay": "rollout",
    "old_logprobs": "recompute",
    "save_rollouts": True,
}


@pytest.fixture
def train(tmp_path: Path, forked_ranks: Any) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(num_ranks: int, **keys: Any) -> Trainer:
        model = build("qwen3-moe", vocab_size=len(VOCABULARY))
        keys = {**KEYS, "output_dir": str(tmp_path / "runs"), "tokenizer": build_tokenizer(), **keys}
        made.append(Trainer(model, spread, sums(12), num_ranks=num_ranks, **keys))
        made[-1].fit()
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def test_two_ranks_record_and_repeat_what_one_does(train: Callable[..., Trainer]) -> None:
    alone, together = train(1), train(2)
    replayed = train(2, mode="train", rollouts_path=str(alone.run_folder / "rollouts"), save_rollouts=False)
    lines = [read_jsonl(trainer.run_folder / "metrics.jsonl") for trainer in (alone, together, replayed)]
    for first, *others in zip(*([line for line in run if line["step"]] for run in lines), strict=True):
        assert first["routing/changed_share"] == 0 and first["routing/unrecorded_share"] == 0
        for other in others:
            assert other["routing/changed_share"] == 0
            for name in ("loss", "grad_norm", "entropy", "reward"):
                assert other[name] == pytest.approx(first[name], rel=1e-5, abs=1e-7), (first["step"], name)
    for step in (1, 2):
        mine, theirs = (load_rollout(trainer.run_folder / "rollouts", step) for trainer in (alone, together))
        assert torch.equal(mine["completion_ids"].values, theirs["completion_ids"].values)
        same = [batch["routed_experts"].values.sort().values for batch in (mine, theirs)]
        assert torch.equal(same[0], same[1])
