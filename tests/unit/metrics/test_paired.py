"""The paired test against enumeration and the binomial distribution."""

import itertools
import math

import numpy as np
import pytest

from hybrid_rl.errors import DataError
from hybrid_rl.metrics import paired
from hybrid_rl.metrics.eval_samples import EvalSamples, Evaluations, grouped
from hybrid_rl.metrics.paired import paired_test


def mcnemar(better, worse):
    """The two-sided binomial test of the prompts on which they differ."""
    n, extreme = better + worse, max(better, worse)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(extreme, n + 1)) / 2**n)


@pytest.mark.parametrize(("better", "worse", "same"), [(9, 1, 30), (5, 5, 2), (0, 6, 4), (40, 20, 100), (1, 0, 0)])
def test_one_sample_each_is_mcnemars_test(better, worse, same):
    a = [0.0] * better + [1.0] * worse + [1.0] * same
    b = [1.0] * better + [0.0] * worse + [1.0] * same
    found = paired_test(a, b)
    assert found.p_value == pytest.approx(mcnemar(better, worse))
    assert (found.num_better, found.num_worse, found.num_prompts) == (better, worse, better + worse + same)
    assert found.difference == pytest.approx((better - worse) / found.num_prompts)
    assert "McNemar" in found.test


def test_several_samples_against_all_signs():
    generator = np.random.default_rng(0)
    for _ in range(5):
        a, b = generator.integers(0, 5, (2, 9)) / 4
        signs = np.array(list(itertools.product([1, -1], repeat=9)))
        differences = b - a
        extreme = np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9
        found = paired_test(a, b, num_samples=(4, 4))
        assert found.p_value == pytest.approx(extreme.mean()) and "exact" in found.test
    other = paired_test([1 / 3, 2 / 3, 0], [1.0, 1.0, 1.0], num_samples=(3, 8))
    assert other.p_value == pytest.approx(2 / 8) and "exact" in other.test


def test_random_signs_agree_with_all_of_them(monkeypatch):
    generator = np.random.default_rng(1)
    a, b = generator.integers(0, 5, 30) / 4, generator.integers(1, 6, 30) / 5
    exact = paired_test(a, b, num_samples=(4, 5))
    monkeypatch.setattr(paired, "MOST_STEPS", 0)
    sampled = paired_test(a, b, num_samples=(4, 5))
    assert "exact" in exact.test and "100,000 random flips" in sampled.test
    assert sampled.p_value == pytest.approx(exact.p_value, abs=4 * math.sqrt(0.25 / 100_000))
    assert sampled == paired_test(a, b, num_samples=(4, 5))  # the seed is fixed


def test_the_interval_by_hand():
    """Bonett and Price's form: (f12 + 1) / (n + 2) and (f21 + 1) / (n + 2), here 10/42 and 2/42."""
    found = paired_test([0.0] * 9 + [1.0] + [1.0] * 30, [1.0] * 9 + [0.0] + [1.0] * 30)
    p, q = 10 / 42, 2 / 42
    half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / 42)
    assert (found.low, found.high) == (pytest.approx(p - q - half), pytest.approx(p - q + half))


def test_the_same_policy_is_called_different_as_often_as_it_should():
    """Two policies that are equally good on every prompt: p below 0.05 in at most 5 % of 400 comparisons, and the
    interval holds 0 in at least 95 %, each within three standard errors."""
    generator = np.random.default_rng(2)
    chances = generator.beta(0.5, 0.5, (400, 60))
    a, b = (generator.binomial(4, chances) / 4 for _ in range(2))
    found = [paired_test(*rows, num_samples=(4, 4)) for rows in zip(a, b, strict=True)]
    assert np.mean([not one.is_noise for one in found]) <= 0.05 + 0.033
    assert np.mean([one.low <= 0 <= one.high for one in found]) >= 0.95 - 0.033


def test_the_verdict_in_words():
    better = paired_test([0.0] * 20 + [1.0] * 20, [1.0] * 40)
    assert better.verdict("old", "new").startswith("new is better than old by 50.0 points (95 % interval ")
    worse = paired_test([1.0] * 40, [0.0] * 20 + [1.0] * 20).verdict("old", "new")
    assert worse.startswith("old is better than new by 50.0 points (95 % interval ")
    assert "better on 20, worse on 0 of 40" in worse and "interval -" not in worse
    noise = paired_test([0.0, 1.0, 1.0], [1.0, 1.0, 1.0]).verdict()
    assert noise.startswith("This may be noise") and "p = 1.000" in noise
    assert paired_test([1.0] * 3, [1.0] * 3).p_value == 1.0


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(DataError, match="one number per prompt from each"):
        paired_test([1.0], [1.0, 0.0])
    with pytest.raises(DataError, match="one number per prompt"):
        paired_test([], [])
    with pytest.raises(DataError, match="shares"):
        paired_test([0.0], [3.0])


def samples(right, prompts=None, answers=None, lengths=None, finished=None, budget=64):
    size = len(right[0])
    return EvalSamples(
        prompts or [str(n) for n in range(len(right))],
        right,
        lengths or [[10] * size] * len(right),
        finished or [[True] * size] * len(right),
        answers,
        budget,
    )


def test_other_prompts_are_refused():
    one = samples([[1.0], [0.0]])
    assert one.against(samples([[1.0], [1.0]])).num_worse == 1  # this one is worse than that baseline
    with pytest.raises(DataError, match="different prompts: 2 and 2, of which 1 are"):
        one.against(samples([[1.0], [1.0]], ["0", "7"]))


def test_estimates_of_a_set():
    right, answers = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], [["a", "b", "a", None], ["b", "b", None, None]]
    found = samples(right, answers=answers).estimates()
    assert list(found) == ["accuracy", "pass@2", "pass@4", "maj@4"]
    assert [round(one.value, 6) for one in found.values()] == [0.25, round(5 / 12, 6), 0.5, 0.5]
    assert list(samples(right).estimates()) == ["accuracy", "pass@2", "pass@4"]
    assert samples([[1.0], [1.0], [0.0]]).estimates()["accuracy"].value == pytest.approx(2 / 3)


def test_what_cannot_be_counted_is_said():
    unknown = EvalSamples(["0"], None, [[1]], [[True]], None, 8)
    assert unknown.estimates() == {}
    for call in (lambda: unknown.passes(1), unknown.within, lambda: unknown.against(unknown)):
        with pytest.raises(DataError, match="other than 0 and 1, or no number at all. Set success_reward"):
            call()
    with pytest.raises(DataError, match="no answers to vote on.*extracted_answer"):
        samples([[1.0]]).votes(1)
    with pytest.raises(DataError, match="k=2 needs 2"):
        samples([[1.0]]).passes(2)
    nothing = EvalSamples([], [], [], [], None, 8)
    assert nothing.estimates() == {}
    with pytest.raises(DataError, match="applies to no prompt"):
        nothing.within()


def test_accuracy_by_budget_by_hand():
    """Five samples: right at 10 tokens, right at 40, wrong at 5, right but cut off at the limit of 64, and right but
    cut off after 12, by a limit of time."""
    finished = [[True, True, True, False, False]]
    one = samples([[1.0, 1.0, 0.0, 1.0, 1.0]], lengths=[[10, 40, 5, 64, 12]], finished=finished)
    curve = one.within()
    assert {budget: found.value for budget, found in curve.items()} == {16: 0.2, 32: 0.2, 64: 0.8}
    assert one.within([9, 10, 40, 63])[40].value == 0.4 == one.within([63])[63].value
    assert one.within([9])[9].value == 0.0 and one.within([10])[10].value == 0.2
    for budget in (0, 65):
        with pytest.raises(DataError, match=f"budget of {budget} tokens cannot be judged"):
            one.within([budget])


def test_samples_are_grouped_by_prompt_and_survive_a_file():
    nan = math.nan
    made = grouped([1, 0, 1, 0, 2], [1.0, 0.0, 0.0, 1.0, nan], [5, 6, 7, 8, 9], [True] * 5, list("abcde"), "xyz", 9)
    assert (made.prompts, made.right) == (["x", "y"], [[0.0, 1.0], [1.0, 0.0]])
    assert (made.lengths, made.answers) == ([[6, 8], [5, 7]], [["b", "d"], ["a", "c"]])
    assert EvalSamples.of_json(made.to_json()) == made
    with pytest.raises(DataError, match="not the samples of an evaluation: KeyError"):
        EvalSamples.of_json({})


def test_evaluations_print_as_a_table() -> None:
    """2 of 3 samples are right: 100 % of one prompt, half of the other. Lengths 1, 2 and 6, of which two ended."""
    one = EvalSamples(["a" * 16, "b"], [[1.0], [1.0, 0.0]], [[1], [2, 6]], [[True], [True, False]], None, 8)
    unknown = EvalSamples(["0"], None, [[1]], [[True]], None, 8)
    lines = repr(Evaluations({"": one, "hard": unknown})).splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["set", "prompts", "samples", "accuracy"],
        ["eval", "2", "3", "75.0"],
        ["hard", "1", "1", "-"],
    ]
    assert lines[1].split()[-3:] == ["3.0", "67", "%"]
    assert repr(Evaluations()) == "Evaluations(): nothing was evaluated yet"
    assert repr(one).startswith("EvalSamples(2 prompts, 3 samples, accuracy 75.0 %") and "aaaa" not in repr(one)
