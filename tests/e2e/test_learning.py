"""GRPO learns: from random weights to nearly always right, through the public Trainer alone."""

import math

import pytest

from hybrid_rl import Trainer
from tests.tiny import EOS_ID, build_model, build_tokenizer


def copies(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """The prompt's letter and nothing behind it: half the reward for the letter, half for the end in second place."""
    return [
        0.5 * (text[:1] == prompt[0]) + 0.5 * (len(ids) == 2 and ids[1] == EOS_ID)
        for prompt, text, ids in zip(prompts, completions, completion_ids, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_learns_to_copy_a_letter(tmp_path, seed: int) -> None:
    """Ten letters; a random model is right once in 45 * 45 samples, and the reward of the best policy is 1."""
    rows = [{"prompt": f"{letter}="} for letter in "abcdefghij"]
    with Trainer(
        build_model(seed, hidden_size=32, intermediate_size=64),
        copies,
        rows,
        eval_dataset=rows,
        tokenizer=build_tokenizer(),
        seed=seed,
        output_dir=str(tmp_path),
        prompts_per_step=10,
        num_generations=16,
        max_completion_length=3,
        learning_rate=1e-2,
        max_steps=120,
    ) as trainer:
        before = trainer.evaluate()
        last = trainer.fit()
    assert before["eval/accuracy"] <= 0.1
    assert last["eval/accuracy"] >= 0.9
    assert last["reward"] > 0.8
    # The engine samples from the policy that is trained, to the last step.
    assert last["sampling/sampling_logp_difference/mean"] < 1e-4
    assert math.isfinite(last["loss"])
