"""The clipped surrogate: value and gradient by hand on every side of the clip, token by token and per sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import PolicyLoss, clipped_policy_loss

DAPO = {"epsilon": 0.2, "epsilon_high": 0.28}


def single(ratio: float, advantage: float, **options: Any) -> tuple[PolicyLoss, float, float]:
    """The loss of one token with this ratio: record, value, gradient by its logprob."""
    logprob = torch.tensor([math.log(ratio) - 1.5], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([-1.5], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    one = torch.zeros(1, dtype=torch.int64)
    loss = clipped_policy_loss(logprob, old, advantages, one == 0, one, 1, **{**DAPO, **options})
    loss.per_token.sum().backward()
    assert logprob.grad is not None
    return loss, loss.per_token.item(), logprob.grad.item()


# d(ratio)/d(logprob) = ratio, so an unclipped token has gradient = value.
@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "value", "slope", "clipped"),
    [
        (1.0, 2.0, None, -2.0, -2.0, ""),
        (1.1, 2.0, None, -2.2, -2.2, ""),
        (1.5, 2.0, None, -2.56, 0.0, "high"),
        (1.5, -2.0, None, 3.0, 3.0, ""),
        (0.5, 2.0, None, -1.0, -1.0, ""),
        (0.5, -2.0, None, 1.6, 0.0, "low"),
        (6.0, -2.0, None, 12.0, 12.0, ""),
        (6.0, -2.0, 4.0, 8.0, 0.0, ""),
        (3.0, -2.0, 4.0, 6.0, 6.0, ""),
        (6.0, 2.0, 4.0, -2.56, 0.0, "high"),
        (1.5, 0.0, None, 0.0, 0.0, ""),
    ],
)
def test_one_token(
    ratio: float, advantage: float, delta: float | None, value: float, slope: float, clipped: str
) -> None:
    loss, got_value, got_slope = single(ratio, advantage, delta=delta)
    assert (got_value, got_slope) == pytest.approx((value, slope), rel=1e-12, abs=0)
    assert (bool(loss.clipped_low), bool(loss.clipped_high)) == (clipped == "low", clipped == "high")
    assert float(loss.ratio) == pytest.approx(ratio) and not loss.ratio.requires_grad


def test_at_the_old_policy_the_gradient_is_that_of_reinforce() -> None:
    """Ratio exactly 1 (old = own logprobs, detached): value -A, gradient -A, not half of it at the tie of the min."""
    logprobs = torch.tensor([-0.1, -2.0, -7.0], requires_grad=True)
    advantages, rows = torch.tensor([1.0, -3.0, 0.5]), torch.tensor([0, 0, 1])
    loss = clipped_policy_loss(logprobs, logprobs, advantages, rows >= 0, rows, 2, **DAPO)
    assert loss.ratio.tolist() == [1.0] * 3
    loss.per_token.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 3.0, -0.5]


@pytest.fixture
def sequences() -> dict[str, Tensor]:
    """Row 0: the GSPO example; row 1: three tokens, the middle one masked with a logprob that must not matter."""
    return {
        "logprobs": torch.tensor([-1.0, -2.0, -1.0, -50.0, -3.0], dtype=torch.float64, requires_grad=True),
        "old_logprobs": torch.tensor([-1.2, -2.2, -1.5, -1.0, -2.9], dtype=torch.float64),
        "advantages": torch.tensor([1.0, 1.0, -2.0, -2.0, -2.0], dtype=torch.float64),
        "mask": torch.tensor([True, True, True, False, True]),
        "rows": torch.tensor([0, 0, 1, 1, 1]),
    }


def test_sequence_level_is_gspo(sequences: dict[str, Tensor]) -> None:
    """exp(mean of .2, .2) = 1.221403; exp(mean of .5, -.1) = exp(.2) over the two unmasked tokens of row 1.

    d ratio / d logprob_t = ratio / |y|, and every token of the row carries the ratio: -A ratio |y| / |y| for each
    unmasked token, where the three places of row 1 (one of them masked, weight 0 later) are left out here.
    """
    loss = clipped_policy_loss(
        **sequences, num_rows=2, epsilon=0.5, epsilon_high=0.5, importance_sampling_level="sequence"
    )
    assert loss.ratio.tolist() == pytest.approx([1.221403] * 5, abs=5e-7)
    assert loss.per_token.tolist() == pytest.approx([-1.221403] * 2 + [2 * 1.221403] * 3, abs=1e-6)
    loss.per_token[sequences["mask"]].sum().backward()
    gradient = sequences["logprobs"].grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx([-1.221403, -1.221403, 2.442806, 0.0, 2.442806], abs=1e-6)


def test_sequence_level_clips_whole_sequences(sequences: dict[str, Tensor]) -> None:
    """At GSPO's 4e-4 row 0 (A > 0) is clipped, row 1 (A < 0, ratio above 1) is not."""
    loss = clipped_policy_loss(
        **sequences, num_rows=2, epsilon=3e-4, epsilon_high=4e-4, importance_sampling_level="sequence"
    )
    assert loss.clipped_high.tolist() == [True, True, False, False, False] and not loss.clipped_low.any()
    assert loss.per_token[:2].tolist() == pytest.approx([-1.0004] * 2, rel=1e-12)
    loss.per_token[sequences["mask"]].sum().backward()
    gradient = sequences["logprobs"].grad
    assert gradient is not None and gradient[:2].tolist() == [0.0, 0.0]


def test_levels_agree_on_single_tokens() -> None:
    arguments = (-torch.rand(6), -torch.rand(6), torch.randn(6), torch.ones(6, dtype=torch.bool), torch.arange(6), 6)
    token, sequence = (
        clipped_policy_loss(*arguments, **DAPO, importance_sampling_level=level) for level in ("token", "sequence")
    )
    assert torch.equal(token.per_token, sequence.per_token)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("wild", [-200.0, -math.inf, math.nan])
def test_masked_tokens_cannot_poison_the_gradient(level: str, wild: float) -> None:
    """exp(199) overflows fp32; 0 * inf in the backward pass would make every gradient NaN."""
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.1, wild, -1.0])
    mask, rows = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])
    loss = clipped_policy_loss(logprobs, old, torch.ones(3), mask, rows, 2, **DAPO, importance_sampling_level=level)
    torch.where(mask, loss.per_token, torch.zeros(3)).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1), 0.0, -1.0], rel=1e-6)


def test_gradients_flow_through_logprobs_only() -> None:
    logprobs, old, advantages = (torch.full((2,), -1.0, requires_grad=True) for _ in range(3))
    rows = torch.zeros(2, dtype=torch.int64)
    clipped_policy_loss(logprobs, old, advantages, rows == 0, rows, 1, **DAPO).per_token.sum().backward()
    assert logprobs.grad is not None and old.grad is None and advantages.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(1)}, r"must all be \[T\]"),
        ({"importance_sampling_level": "word"}, "'word' is unknown; use token or sequence"),
    ],
)
def test_bad_arguments(sequences: dict[str, Tensor], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clipped_policy_loss(**{**sequences, "num_rows": 2, **DAPO, **change})
