"""Models that cannot be packed on two ranks: the samples, losses and gradients of one."""

import pytest

from hybrid_rl import Trainer
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.tiny import VOCABULARY, build_tokenizer, spread, sums
from tests.unit.models.hybrids import build_hybrid

pytestmark = pytest.mark.slow  # processes are started

# Several micro-batches of several lengths, an uneven number of groups: ranks have unequally much to do.
KEYS = {
    "engine": "hf",
    "prompts_per_step": 3,
    "num_generations": 4,
    "max_completion_length": 9,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "beta": 0.05,
    "tokens_per_micro_batch": 48,
}


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.sweep)])
def test_two_ranks_generate_and_train_as_one_does(name, tmp_path, forked_ranks):
    lines = []
    for num_ranks in (1, 2):
        model = build_hybrid(name, vocab_size=len(VOCABULARY))
        keys = {**KEYS, "num_ranks": num_ranks, "output_dir": str(tmp_path / str(num_ranks))}
        with Trainer(model, spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
            trainer.fit()
        lines.append([line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if "grad_norm" in line])
    assert len(lines[0]) == 2
    for mine, theirs in zip(*lines, strict=True):
        for metric in ("reward", "loss", "grad_norm", "entropy", "kl"):
            assert mine[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric
