"""Lambda-GRPO written out, the gradient of its exponent too."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import WholeMiniBatch
from hybrid_rl.algos.policy_losses import Clip, LambdaGRPO
from hybrid_rl.algos.policy_losses.lambda_grpo import length_bases, length_weights
from tests.unit.algos.policy_losses.samples import (
    GROUPS,
    LENGTHS,
    MASK,
    ROWS,
    Columns,
    assert_is,
    columns,
    loss_and_gradient,
    part,
    samples,
)


def bases_of_samples(given: Columns, scale: float) -> list[float]:
    """h of each sample, None where it has no token in the loss."""
    lengths = [len(places) for places in samples(given)]
    found = []
    for row, length in enumerate(lengths):
        group = [n for other, n in enumerate(lengths) if GROUPS[other] == GROUPS[row] and n > 0]
        spread = statistics.pstdev(group)
        found.append(1 + scale * (length - statistics.mean(group)) / spread if length and spread else 1.0)
    return found


def weight_of(row: int, bases: list[float], exponent: float, given: Columns) -> float:
    """G exp(h_i^lambda) / sum_j exp(h_j^lambda) over the completions of the group that have tokens."""
    group = [j for j, places in enumerate(samples(given)) if GROUPS[j] == GROUPS[row] and places]
    return len(group) * math.exp(bases[row] ** exponent) / sum(math.exp(bases[j] ** exponent) for j in group)


def prepared(given: Columns, record: LambdaGRPO) -> Tensor:
    return record.prepare(
        WholeMiniBatch(
            given["old_logprobs"], given["advantages"], given["mask"], given["rows"], len(LENGTHS), GROUPS, seed=0
        )
    )


@pytest.mark.parametrize("exponent", [0.0, 1.0, -2.5, 7.0])
def test_written_out(exponent: float) -> None:
    given, record = columns(), LambdaGRPO(lambda_length_scale=0.4)
    parameters = torch.tensor([exponent], dtype=torch.float64, requires_grad=True)
    more = {"prepared": prepared(given, record), "parameters": parameters}
    loss, gradient = loss_and_gradient(record, given, **more)
    plain, slopes = loss_and_gradient(Clip(), given)
    bases = bases_of_samples(given, 0.4)
    expected = []
    for row, places in enumerate(samples(given)):
        for t in places:
            weight = weight_of(row, bases, exponent, given)
            expected.append((t, weight * plain.per_token[t].item(), weight * slopes[t].item()))
    assert_is(loss, gradient, expected)
    assert torch.equal(loss.clipped_high, plain.clipped_high) and torch.equal(loss.ratio, plain.ratio)

    # d f_i / d lambda = f_i (h_i^lambda ln h_i - mean over the softmax of h_j^lambda ln h_j)
    slope = 0.0
    for row, places in enumerate(samples(given)):
        group = [j for j, theirs in enumerate(samples(given)) if GROUPS[j] == GROUPS[row] and theirs]
        inner = {j: bases[j] ** exponent * math.log(bases[j]) for j in group}
        mean = sum(weight_of(j, bases, exponent, given) / len(group) * inner[j] for j in group)
        for t in places:
            slope += weight_of(row, bases, exponent, given) * (inner[row] - mean) * plain.per_token[t].item()
    (got,) = torch.autograd.grad(torch.where(MASK, loss.per_token, 0.0).sum(), parameters)
    assert got.item() == pytest.approx(slope, rel=1e-10) and abs(slope) > 1e-3
    assert loss.metrics["lambda_grpo/lambda"][0].item() == exponent


def test_weights_by_hand() -> None:
    """Two completions of 1 and 3 tokens, z = -1 and 1: h = 8/9 and 10/9; lambda 1: 2 / (1 + exp(-+2/9))."""
    rows, groups = torch.tensor([0, 1, 1, 1]), torch.tensor([5, 5])
    bases = length_bases(rows >= 0, rows, 2, groups, length_scale=1 / 9)
    assert bases[0].tolist() == pytest.approx([8 / 9, 8 / 9, 10 / 9], rel=1e-14)
    weights = length_weights(bases, torch.ones(1, dtype=torch.float64))
    assert weights.tolist() == pytest.approx([0.889344, 1.110656, 1.110656, 1.110656], abs=5e-7)
    assert length_weights(bases, torch.zeros(1, dtype=torch.float64)).tolist() == pytest.approx([1.0] * 4, rel=1e-14)


def test_the_weights_of_a_group_have_mean_one() -> None:
    given = columns()
    bases = length_bases(MASK, ROWS, len(LENGTHS), GROUPS, length_scale=0.4)
    weights = length_weights(bases, torch.tensor([3.0], dtype=torch.float64))
    for group in (7, 2):
        theirs = [
            weights[places[0]].item() for row, places in enumerate(samples(given)) if GROUPS[row] == group and places
        ]
        assert sum(theirs) / len(theirs) == pytest.approx(1.0, rel=1e-12) and len(set(theirs)) > 1


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [([3, 3, 3], [0, 0, 0]), ([2, 5], [0, 1]), ([0, 4], [0, 0]), ([7] * 7, [1] * 7), ([0, 0], [3, 3])],
)
def test_equal_lengths_groups_of_one_and_empty_completions_weigh_one(lengths: list[int], groups: list[int]) -> None:
    """Exactly, and without NaN in the gradient of the exponent."""
    counts = torch.tensor(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), counts.clamp(min=1))
    mask = counts[rows] > 0
    exponent = torch.tensor([1.7], dtype=torch.float64, requires_grad=True)
    bases = length_bases(mask, rows, len(lengths), torch.tensor(groups), length_scale=1 / 9)
    weights = length_weights(bases, exponent)
    assert weights.tolist() == pytest.approx([1.0] * len(rows), rel=1e-14)
    (gradient,) = torch.autograd.grad(weights.sum(), exponent)
    assert gradient.isfinite().all()


def test_mini_batches_with_unlike_numbers_of_scored_samples_share_a_column() -> None:
    """One group of four is in the loss whole, of the other only two samples."""
    rows, groups = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    for mask in (rows >= 0, rows < 2):
        assert length_bases(mask, rows, 4, groups, length_scale=0.1).shape == (4, 5)


def test_order_of_samples_changes_nothing() -> None:
    given, order = columns(), [4, 1, 5, 0, 3, 2]
    some, places = part(given, order)
    bases = length_bases(MASK, ROWS, len(LENGTHS), GROUPS, length_scale=0.4)
    again = length_bases(some["mask"], some["rows"], len(LENGTHS), GROUPS[order], length_scale=0.4)
    torch.testing.assert_close(again, bases[places], rtol=1e-14, atol=0, equal_nan=True)


def test_a_base_of_zero_or_less_is_refused() -> None:
    """Lengths 1, 9, 9, ...: the first of G lies sqrt(G - 1) standard deviations below; G = 5: 2, times .5 is 1."""
    rows = torch.repeat_interleave(torch.arange(5), torch.tensor([1, 9, 9, 9, 9]))
    groups = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="lambda_length_scale=0.51 is too large: a completion is 2 standard"):
        length_bases(rows >= 0, rows, 5, groups, length_scale=0.51)
    assert length_bases(rows >= 0, rows, 5, groups, length_scale=0.49).nan_to_num(1.0).min() > 0


def test_bad_arguments() -> None:
    given = columns()
    with pytest.raises(ValueError, match="the column parameters is None"):
        loss_and_gradient(LambdaGRPO(), given)
    with pytest.raises(ValueError, match=r"groups \[num_rows=6\]"):
        length_bases(MASK, ROWS, 6, GROUPS[:2], length_scale=0.1)
    with pytest.raises(ValueError, match=r"exponent \[1\]"):
        length_weights(torch.ones(3, 2), torch.zeros(2))
