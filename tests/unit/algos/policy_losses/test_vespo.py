"""VESPO written out: the kernel is a constant of the whole completion."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import VESPO
from tests.unit.algos.policy_losses.samples import assert_is, columns, loss_and_gradient, loss_of, samples


def test_written_out() -> None:
    """-W^k exp(lambda (1 - W)) A ln p with W the product of the completion's ratios, not their mean."""
    given = columns()
    loss, gradient = loss_and_gradient(VESPO(), given)
    new, old, advantages = (given[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    expected = []
    for places in samples(given):
        weight = math.prod(math.exp(new[t] - old[t]) for t in places)
        for t in places:
            k, decay = (2.0, 3.0) if advantages[t] >= 0 else (3.0, 2.0)
            kernel = weight**k * math.exp(decay * (1 - weight))
            expected.append((t, -kernel * advantages[t] * new[t], -kernel * advantages[t]))
    assert_is(loss, gradient, expected)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "kernel"),
    [
        (0.0, 1.0, 1.0),
        (0.0, -1.0, 1.0),
        (math.log(2.0) / 2, 1.0, 4 * math.exp(-3)),  # two tokens: W = 2; 2^2 e^-3
        (math.log(2.0) / 2, -1.0, 8 * math.exp(-2)),
        (math.log(0.5) / 2, 1.0, 0.25 * math.exp(1.5)),
        (500.0, 1.0, 0.0),  # W = e^1000 overflows, and so does float32 already at the token
        (-500.0, -1.0, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_tokens_by_hand(log_ratio: float, advantage: float, kernel: float, dtype: torch.dtype) -> None:
    logprobs = torch.tensor([-1.0, -3.0], dtype=dtype, requires_grad=True)
    loss = loss_of(
        VESPO(),
        logprobs,
        logprobs.detach() - log_ratio,
        torch.full((2,), advantage, dtype=dtype),
        torch.tensor([True, True]),
        torch.tensor([0, 0]),
        1,
    )
    loss.per_token.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-kernel * advantage] * 2, rel=1e-6, abs=1e-30)
    assert loss.per_token.tolist() == pytest.approx([kernel * advantage, 3 * kernel * advantage], rel=1e-6, abs=1e-30)


def test_a_long_completion_in_float32_is_as_exact_as_its_ratios() -> None:
    """4096 ratios of either sign: the sum of their logarithms is not rounded to float32 on the way."""
    logprobs = (-torch.rand(4096, generator=torch.Generator().manual_seed(3))).requires_grad_()
    old = logprobs.detach() + torch.linspace(-2, 2.001, 4096)
    mask = torch.ones(4096, dtype=torch.bool)
    loss = loss_of(VESPO(), logprobs, old, torch.ones(4096), mask, mask.long() * 0, 1)
    log_weight = math.fsum((logprobs.detach() - old).tolist())
    kernel = math.exp(2 * log_weight - 3 * math.expm1(log_weight))
    assert 0.5 < abs(log_weight) < 4
    assert loss.metrics["vespo/kernel"][0].item() == pytest.approx(kernel, rel=3e-7)
