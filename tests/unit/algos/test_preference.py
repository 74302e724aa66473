"""DPO by hand: a margin of ln 4."""

import math

import pytest
import torch

from hybrid_rl.algos.preference import dpo_loss

MARGIN = 1.386294


@pytest.mark.parametrize(("beta", "expected"), [(0.1, 0.626233), (0.5, 0.405465)])
def test_a_margin_of_ln_4(beta: float, expected: float) -> None:
    chosen = torch.tensor([-3.0 + MARGIN], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-5.0], dtype=torch.float64, requires_grad=True)
    loss = dpo_loss(chosen, rejected, torch.tensor([-3.0]).double(), rejected.detach(), beta=beta)
    assert loss.item() == pytest.approx(expected, abs=5e-7)
    loss.sum().backward()
    slope = -beta * (1 - 1 / (1 + math.exp(-beta * MARGIN)))
    assert chosen.grad.item() == pytest.approx(slope, rel=1e-6) and rejected.grad.item() == pytest.approx(
        -slope, rel=1e-6
    )


def test_a_larger_beta_stays_closer_to_the_reference() -> None:
    """Policies over two answers, of which the first is preferred in 9 of 10 comparisons: the best margin falls as 1 /
    beta."""
    margins = {}
    for beta in (0.1, 0.5):
        margin = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        zero = torch.zeros(1, dtype=torch.float64)
        for _ in range(400):
            loss = 0.9 * dpo_loss(margin, zero, zero, zero, beta=beta) + 0.1 * dpo_loss(
                zero, margin, zero, zero, beta=beta
            )
            (gradient,) = torch.autograd.grad(loss.sum(), margin)
            margin = (margin - gradient / (beta * beta) * 2).detach().requires_grad_()
        margins[beta] = margin.item()
        assert margins[beta] == pytest.approx(math.log(9) / beta, rel=1e-4)
    assert margins[0.5] < margins[0.1]


def test_refusals() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"must be \[N\]"):
        dpo_loss(one, torch.zeros(2), one, one, beta=0.1)
    with pytest.raises(ValueError, match="beta=0"):
        dpo_loss(one, one, one, one, beta=0)
