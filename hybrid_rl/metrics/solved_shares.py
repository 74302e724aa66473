"""Shares of solved prompts: pass@k and majority@k, as exact expectations over the samples that were drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybrid_rl.errors import DataError


def sizes(num_samples: int) -> list[int]:
    """Return the k that are reported for so many samples per prompt: 1, 2, 4 ..., and num_samples itself."""
    return sorted({*(2**power for power in range(num_samples.bit_length())), num_samples} - {0})


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that k of these samples, drawn without replacement, hold at least one that is right.

    Over samples of a policy this is an unbiased estimate of its pass@k (Chen et al. 2021, arXiv:2107.03374, eq. 1),
    1 - C(n - c, k) / C(n, k), here as a product of numbers below 1, which neither overflows nor cancels.

    Raises DataError for k above num_samples, and for impossible counts.
    """
    _check_counts(num_samples, num_right, k)
    if num_samples - num_right < k:
        return 1.0
    wrong = np.arange(num_samples - num_right + 1, num_samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(1.0 - k / wrong))


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[float], ks: Sequence[int]) -> list[float]:
    """Return for each k the expected score of the answer that most of k samples give, drawn without replacement.

    answers: one per sample of a prompt, None = it gives none and does not vote. right: their scores, 0 or 1. Answers
    that get equally many votes win with equal probability; without any vote the prompt is wrong. If samples with the
    same answer have different scores, their mean is the answer's.

    This is the mean over all C(n, k) subsets, computed exactly by counting, with no random numbers: for every answer j
    and number of votes t, the subsets in which j has t votes and no other has more, divided by the number of those that
    have as many. Every term is positive, so that nothing cancels.

    Raises DataError for k above the number of samples.
    """
    n = len(answers)
    for k in ks:
        _check_counts(n, 0, k)
    votes = Counter(answer for answer in answers if answer is not None)
    scores: dict[Hashable, float] = {}
    for answer, score in zip(answers, right, strict=True):
        if answer is not None:
            scores[answer] = scores.get(answer, 0.0) + score / votes[answer]
    abstained = n - votes.total()
    totals = np.zeros(max(ks) + 1)
    # Answers with equally many votes stand in the same place: each is counted once, for all of them.
    for own in {votes[answer] for answer, score in scores.items() if score > 0}:
        others = list(votes.values())
        others.remove(own)
        weight = sum(score for answer, score in scores.items() if votes[answer] == own)
        totals += weight * _times_elected(own, others, abstained, max(ks))
    return [float(totals[k] / math.comb(n, k)) for k in ks]


def _times_elected(own: int, others: Sequence[int], abstained: int, largest: int) -> NDArray[np.float64]:
    """Count for every k up to `largest` the subsets of k samples in which an answer that `own` samples give is elected,
    those with a tie in parts. others: samples of each other answer. Returns [largest + 1]."""
    times = np.zeros(largest + 1)
    for t in range(1, min(own, largest) + 1):
        # A polynomial by the samples of others in the subset (axis 0) and the number of answers with t votes (axis 1).
        room = largest - t
        ways = np.zeros((room + 1, room // t + 1))
        ways[0, 0] = 1.0
        for size in others:
            grown = ways.copy()  # no sample of this answer
            for votes in range(1, min(size, t, room) + 1):
                count = math.comb(size, votes)
                if votes < t:
                    grown[votes:] += count * ways[:-votes]
                else:
                    grown[votes:, 1:] += count * ways[:-votes, :-1]
            ways = grown
        of_others = ways @ (1.0 / np.arange(1, ways.shape[1] + 1))
        silent = np.array([math.comb(abstained, number) for number in range(min(abstained, room) + 1)], dtype=float)
        times[t:] += math.comb(own, t) * np.convolve(of_others, silent)[: room + 1]
    return times


def _check_counts(num_samples: int, num_right: int, k: int) -> None:
    if not 0 <= num_right <= num_samples:
        raise DataError(f"{num_right} of {num_samples} samples cannot be right")
    if not 1 <= k <= num_samples:
        raise DataError(
            f"k={k} needs {k} samples of every prompt, but there {'is' if num_samples == 1 else 'are'} {num_samples}; "
            f"choose k from 1 to {num_samples}, or sample more (num_generations_eval)"
        )
