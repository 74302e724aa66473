"""The work is what it says: lengths, prompts and rewards."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import workload
from benchmarks.workload import EOS_ID, Work

pytestmark = pytest.mark.slow

SMALL = Work("small", hidden_size=32, num_layers=1, mean_length=5.0, max_completion_length=24)


@functools.cache
def fitted(work: Work) -> Any:
    model = workload.build_model(work, seed=0)
    workload.fit_lengths(model, work.end_probability, num_steps=300)  # a narrow model takes longer to learn it
    return model


def test_fitted_model_ends_completions_with_the_same_probability_everywhere() -> None:
    found = workload.end_probabilities(fitted(SMALL), prompt_length=6, num_tokens=24)
    assert found.shape == (8, 24)
    torch.testing.assert_close(found, torch.full_like(found, 1 / 5), rtol=0.03, atol=0)


def test_generated_lengths_have_the_mean_of_the_work() -> None:
    """By sampling, which knows nothing of the fit: geometric lengths of mean 5, cut at 24, mean 5 (1 - 0.8^24)."""
    torch.manual_seed(0)
    model = fitted(SMALL)
    prompts = torch.randint(3, 18, (512, 6))
    output = model.generate(prompts, max_new_tokens=24, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=EOS_ID)
    completions = output[:, 6:]
    lengths = (completions != 0).sum(1)
    # The standard deviation of a geometric length is 4.5; of the mean of 512, 0.2.
    assert float(lengths.double().mean()) == pytest.approx(5 * (1 - 0.8**24), abs=0.8)
    assert not (completions == 2).any()


def test_completions_that_never_end_are_told_from_those_that_do() -> None:
    endless = Work("endless", hidden_size=32, num_layers=1, mean_length=None, max_completion_length=24)
    model = fitted(endless)
    assert workload.check_lengths(model, endless) < 1e-5
    with pytest.raises(ValueError, match="mean length .* instead of 5.0"):
        workload.check_lengths(model, SMALL)
    with pytest.raises(ValueError, match="would end early"):
        workload.check_lengths(workload.build_model(endless, seed=0), endless)


def test_wanted_probabilities_sum_to_one() -> None:
    targets = workload.token_targets(0.25)
    assert float(targets.sum()) == pytest.approx(1.0)
    assert float(targets[EOS_ID]) == 0.25
    assert targets[3:].unique().numel() == 1


def test_saved_model_is_the_same_for_everybody(tmp_path: Path) -> None:
    model = workload.build_model(SMALL, seed=3)
    workload.save_model(model, tmp_path)
    first, tokenizer = workload.load(tmp_path)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert tokenizer.encode("12+7= ") == [4, 5, 13, 10, 16, 17]
    assert tokenizer.decode([4, 5, EOS_ID], skip_special_tokens=True) == "12"


def test_a_sum_in_words() -> None:
    (row,) = workload.rows(workload.CHAT_SUMS, 1, seed=1)
    (message,) = row["prompt"]
    first, second = map(int, re.findall(r"\d+", message["content"]))
    assert message["role"] == "user" and row["answer"] == str(first + second)


@pytest.mark.parametrize("name", [name for name, work in workload.WORKS.items() if not work.is_chat])
def test_prompts_are_of_the_asked_length_and_fit_the_positions(name: str) -> None:
    work = workload.WORKS[name]
    rows = workload.rows(work, 20, seed=1)
    assert rows == workload.rows(work, 20, seed=1) != workload.rows(work, 20, seed=2)
    lengths = {len(row["prompt"]) for row in rows}
    assert lengths == {256} if work.prompt_length else lengths <= {4, 5, 6}
    assert max(lengths) + work.max_completion_length <= workload.MAX_POSITIONS


def test_pages_hold_every_sequence_at_its_longest() -> None:
    # 6 + 128 tokens are 5 pages of 32, 256 + 128 are 12; 128 samples.
    assert workload.continuous_batching(workload.WORKS["heavy-tail"])["num_blocks"] == 5 * 128
    assert workload.continuous_batching(workload.WORKS["shared-prompt"])["num_blocks"] == 12 * 128


def test_sums_and_their_reward() -> None:
    rows = workload.all_sums(4)
    assert len(rows) == len({row["prompt"] for row in rows}) == 25
    assert {"prompt": "3+4=", "answer": "7"} in rows
    assert all(row in rows for row in workload.rows(Work("sums", max_operand=4), 50, seed=0))
    # "12": right. "17": one of two in place. "1": one of two. "123": two of three. "": none.
    found = workload.right_sum(["12", "17", "1", "123", ""], ["12"] * 5)
    assert found == pytest.approx([2.0, 0.5, 0.5, 2 / 3, 0.0])
    # Spread tells completions apart: 1*4 + 4*5 = 24; 1*5 + 4*4 = 21.
    assert workload.spread([[4, 5], [5, 4]]) == pytest.approx([24 / 97, 21 / 97])
