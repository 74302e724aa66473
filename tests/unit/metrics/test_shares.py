"""pass@k and majority@k against the enumeration of all subsets; intervals against published numbers and simulation."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from hybrid_rl.errors import DataError
from hybrid_rl.metrics.intervals import share
from hybrid_rl.metrics.solved_shares import majority_at_k, pass_at_k, sizes


def test_pass_at_k_by_hand():
    """3 of 5 are right: of the 10 pairs one has none, C(2, 2)."""
    assert pass_at_k(5, 3, 1) == pytest.approx(0.6)
    assert pass_at_k(5, 3, 2) == pytest.approx(0.9)
    assert pass_at_k(5, 3, 3) == 1.0 and pass_at_k(5, 0, 5) == 0.0 and pass_at_k(5, 1, 5) == 1.0


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [1] * right + [0] * (n - right)
        subsets = [max(subset) for subset in itertools.combinations(samples, k)]
        assert pass_at_k(n, right, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-14)


def test_pass_at_k_of_many_samples_keeps_its_digits():
    """Against whole numbers, which are exact; the products of factorials would overflow."""
    for n, right, k in [(128, 1, 64), (128, 64, 2), (10_000, 3, 128), (200_000, 1, 100)]:
        exact = (math.comb(n, k) - math.comb(n - right, k)) / math.comb(n, k)
        assert pass_at_k(n, right, k) == pytest.approx(exact, rel=1e-10)


def test_k_beyond_the_samples_is_refused():
    message = "k=5 needs 5 samples of every prompt, but there are 4.*num_generations_eval"
    for call in (lambda: pass_at_k(4, 2, 5), lambda: majority_at_k(["a"] * 4, [1] * 4, [5])):
        with pytest.raises(DataError, match=message):
            call()
    with pytest.raises(DataError, match="k=0"):
        pass_at_k(4, 2, 0)
    with pytest.raises(DataError, match="5 of 4 samples"):
        pass_at_k(4, 5, 1)


def elected(answers, scores):
    """The score of the vote of these samples, written down plainly: the mean over the answers with most votes."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer in votes if votes[answer] == most]
    means = [np.mean([s for a, s in zip(answers, scores, strict=True) if a == winner]) for winner in winners]
    return float(np.mean(means))


def test_majority_by_hand():
    """a a b: of the three pairs aa elects a, and the two ab are ties."""
    answers, right = ["a", "a", "b"], [1.0, 1.0, 0.0]
    assert majority_at_k(answers, right, [1, 2, 3]) == pytest.approx([2 / 3, (1 + 0.5 + 0.5) / 3, 1.0])
    assert majority_at_k([None, None], [0.0, 0.0], [1, 2]) == [0.0, 0.0]
    assert majority_at_k(["a", None], [1.0, 0.0], [1, 2]) == [0.5, 1.0]  # who gives no answer does not vote


def test_majority_is_the_mean_over_all_subsets():
    """Random answers of up to 8 samples: ties, abstentions, several right answers, an answer scored both ways."""
    generator = random.Random(3)
    for _ in range(60):
        n = generator.randint(1, 8)
        answers = [generator.choice(["1", "1", "2", "3", "0.5", None]) for _ in range(n)]
        is_right = {"1": 1.0, "2": 0.0, "3": 0.0, "0.5": 1.0}
        right = [0.0 if answer is None else is_right[answer] for answer in answers]
        for k, found in zip(range(1, n + 1), majority_at_k(answers, right, range(1, n + 1)), strict=True):
            subsets = list(itertools.combinations(range(n), k))
            mean = np.mean([elected([answers[i] for i in s], [right[i] for i in s]) for s in subsets])
            assert found == pytest.approx(mean, abs=1e-12), (answers, k)
    mixed = ["a", "a", "a", "b"], [1.0, 1.0, 0.0, 0.0]  # of the same answer two were right: 2/3
    assert majority_at_k(*mixed, [4]) == pytest.approx([2 / 3])


def test_majority_of_128():
    """All alike, and all different, where a vote is a draw; and the largest k of a clear majority."""
    alike = majority_at_k(["a"] * 128, [1.0] * 128, sizes(128))
    assert alike == pytest.approx([1.0] * 8)
    different = majority_at_k([str(n) for n in range(128)], [1.0] + [0.0] * 127, sizes(128))
    assert different == pytest.approx([1 / 128] * 8)
    answers = ["a"] * 50 + ["b"] * 40 + [str(n) for n in range(38)]
    found = majority_at_k(answers, [1.0] * 50 + [0.0] * 78, sizes(128))
    assert found[0] == pytest.approx(50 / 128) and found[-1] == pytest.approx(1.0)
    assert found == sorted(found)


def test_sizes():
    assert (sizes(1), sizes(8), sizes(10), sizes(0)) == ([1], [1, 2, 4, 8], [1, 2, 4, 8, 10], [])


def test_one_sample_per_prompt_has_wilsons_interval():
    """Newcombe 1998, Statistics in Medicine 17:857, table I: 81/263, 15/148 and 0/20 by method 3."""
    for right, n, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)]:
        found = share([1.0] * right + [0.0] * (n - right))
        assert (found.value, found.num_prompts) == (pytest.approx(right / n), n)
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert share([1.0] * 29 + [0.0], 1).high == pytest.approx(1 - share([0.0] * 29 + [1.0]).low)


def test_samples_of_a_prompt_count_between_one_and_all():
    """Alike within each prompt they are one draw, spread evenly they are all draws, as many prompts would be."""
    alike = share([1.0, 0.0] * 20, 8)
    assert alike == share([1.0, 0.0] * 20)
    even, single = share([0.5] * 40, 8), share([1.0, 0.0] * 160)
    assert (even.low, even.high) == (pytest.approx(single.low), pytest.approx(single.high))


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.3, 2.0), (8.0, 2.0)])
def test_intervals_hold_the_truth_as_often_as_they_say(alpha, beta):
    """100 prompts of different difficulty, 8 samples each, 600 evaluations: 95 % less three standard errors, 2.7."""
    generator = np.random.default_rng(5)
    chances = generator.beta(alpha, beta, (600, 100))
    rates = generator.binomial(8, chances) / 8
    found = [share(row, 8) for row in rates]
    covered = np.mean([one.low <= alpha / (alpha + beta) <= one.high for one in found])
    assert 0.923 <= covered <= 0.985


def test_no_prompt_and_no_share_are_refused():
    with pytest.raises(DataError, match="no prompt"):
        share([])
    for wrong in ([0.5, 1.2], [float("nan")], [-0.1]):
        with pytest.raises(DataError, match="from 0 to 1"):
            share(wrong)
