"""What is set between steps reaches every rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl import Trainer
from tests.support.tiny import build_model, build_tokenizer, spread, sums
from tests.unit.run.test_settings import logprobs_of

pytestmark = pytest.mark.slow  # processes are started


def test_ranks_learn_score_and_sample_as_was_set(tmp_path: Path, forked_ranks) -> None:
    """The first update of AdamW is the learning rate itself, wherever the gradient is far above its epsilon."""
    model, values = build_model(), [7.0]

    def score(completion_ids, **_):
        return [values[0] + value for value in spread(completion_ids)]

    keys = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 3, "num_ranks": 2}
    keys |= {"learning_rate": 1e-2, "output_dir": str(tmp_path), "tokenizer": build_tokenizer()}
    with Trainer(model, spread, sums(12), **keys) as trainer:
        trainer.set(learning_rate=1e-4, temperature=0.25)
        trainer.reward_funcs = [score]
        batch, metrics = trainer.step()
        batch = batch.load()
        expected = logprobs_of(model, batch, 0.25)
        torch.testing.assert_close(batch["rollout_logprobs"].values.double(), expected, rtol=0, atol=1e-5)
        assert metrics["learning_rate"] == 1e-4 and 7 < metrics["rewards/score/mean"] < 8
        after = load_file(trainer.save() / "model.safetensors")
        moves = [(after[name] - value).abs() for name, value in model.state_dict().items() if name in after]
        moved = torch.cat([move.flatten() for move in moves])
        assert moved.max() < 1.01e-4 and (moved > 0.99e-4).float().mean() > 0.5
        values[0] = 70.0  # ranks have copies, so the function must be set again
        assert trainer.step().metrics["rewards/score/mean"] < 8
        trainer.reward_funcs = score
        assert 70 < trainer.step().metrics["rewards/score/mean"] < 71
