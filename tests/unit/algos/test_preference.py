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


def test_refusals() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"must be \[N\]"):
        dpo_loss(one, torch.zeros(2), one, one, beta=0.1)
    with pytest.raises(ValueError, match="beta=0"):
        dpo_loss(one, one, one, one, beta=0)
