"""GRPO learns: from random weights to nearly always right, through the public Trainer alone."""

import pytest

from hybrid_rl import Trainer
from tests.support.tiny import EOS_ID, build_model, build_tokenizer, ids_of

LETTERS, DIGITS = "abcdef", "012345"


def copies_or_ends(prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """Right: a letter is repeated, behind a digit there is nothing to say (the end of sequence at once)."""
    wanted = [EOS_ID if prompt[-1] in DIGITS else ids_of(prompt[-1])[0] for prompt in prompts]
    return [float(ids[0] == token) for ids, token in zip(completion_ids, wanted, strict=True)]


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_grpo_learns_from_random_weights(tmp_path, seed: int) -> None:
    """One of 45 tokens is right. Learning twelve answers needs every sign of the loop to be right: advantages, loss,
    the end of sequence in the loss, and an engine that samples from the weights of the last update."""
    rows = [{"prompt": f"={char}"} for char in LETTERS + DIGITS]
    with Trainer(
        build_model(seed, hidden_size=32, intermediate_size=64, initializer_range=0.1),
        copies_or_ends,
        rows,
        eval_dataset=rows,
        tokenizer=build_tokenizer(),
        seed=seed,
        output_dir=str(tmp_path),
        prompts_per_step=12,
        num_generations=16,
        max_completion_length=1,
        learning_rate=3e-3,
        max_steps=80,
    ) as trainer:
        before = trainer.evaluate()
        first = trainer.step().metrics
        last = trainer.fit()
    assert before["eval/accuracy"] <= 0.25
    assert first["reward"] < 0.2
    assert last["eval/accuracy"] >= 0.9
    assert last["reward"] > 0.85
    assert last["completions/clipped_ratio"] == pytest.approx(0.5, abs=0.1)
    assert (trainer.run_folder / "curves.png").stat().st_size > 10_000
    assert last["sampling/sampling_logp_difference/mean"] < 1e-4
