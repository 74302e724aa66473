"""KL estimates: their values, and what their gradients are in expectation over a small categorical distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import clipped_policy_loss, kl_estimate

ESTIMATORS = ["k1", "k2", "k3"]
REFERENCE = torch.tensor([0.4, 0.1, 0.2, 0.25, 0.05], dtype=torch.float64).log()


@pytest.fixture
def logits() -> Tensor:
    return torch.tensor([0.3, -1.2, 0.9, 0.0, 1.5], dtype=torch.float64, requires_grad=True)


def exact_kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum()


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)])
def test_values_at_two_to_one(estimator: str, value: float) -> None:
    """pi = .2, reference = .1; the inverted ratio would give k3 = .306853."""
    policy, reference = torch.tensor([0.2], dtype=torch.float64).log(), torch.tensor([0.1], dtype=torch.float64).log()
    assert float(kl_estimate(policy, reference, estimator)) == pytest.approx(value, abs=5e-7)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str, logits: Tensor) -> None:
    policy = logits.log_softmax(0)
    mean = (policy.exp() * kl_estimate(policy, REFERENCE, estimator)).sum()
    assert mean.item() == pytest.approx(exact_kl(policy, REFERENCE).item(), rel=1e-13)


def test_k2_and_k3_are_never_negative() -> None:
    policy, reference = -5 * torch.rand(1000), -5 * torch.rand(1000)
    for estimator in ("k2", "k3"):
        assert bool((kl_estimate(policy, reference, estimator) >= 0).all())
        assert not kl_estimate(policy, policy, estimator).any()


def test_k3_of_a_tiny_difference_is_not_rounded_away() -> None:
    """5.0017e-7 at ln r = 1e-3, where r - 1 - ln r computed as written is off by 6e-8 in fp32."""
    value = float(kl_estimate(torch.zeros(1), torch.tensor([1e-3]), "k3"))
    assert value == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", lambda policy: 0 * policy.sum()),
        ("k2", lambda policy: exact_kl(policy, REFERENCE)),
        ("k3", lambda policy: exact_kl(REFERENCE, policy)),
    ],
)
def test_expected_gradient_as_a_loss_on_own_samples(estimator: str, expected: object, logits: Tensor) -> None:
    """k1: zero; k2: that of KL(policy || reference); k3: that of KL(reference || policy)."""
    policy = logits.log_softmax(0)
    loss = (policy.detach().exp() * kl_estimate(policy, REFERENCE, estimator)).sum()
    torch.testing.assert_close(
        gradient(loss, logits),
        gradient(expected(policy), logits),  # type: ignore[operator]
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_weight_makes_old_samples_right(estimator: str, logits: Tensor) -> None:
    """Samples of an older policy, weighted by policy / old with its gradient: the gradient of KL(policy || reference)
    for every unbiased estimate."""
    policy = logits.log_softmax(0)
    old = torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25], dtype=torch.float64).log()
    tokens = torch.arange(5)
    weight = clipped_policy_loss(
        policy, old, torch.zeros_like(old), tokens >= 0, tokens, 5, epsilon=0.2, epsilon_high=0.2
    ).weight
    loss = (old.exp() * weight * kl_estimate(policy, REFERENCE, estimator)).sum()
    torch.testing.assert_close(
        gradient(loss, logits), gradient(exact_kl(policy, REFERENCE), logits), rtol=1e-12, atol=1e-14
    )


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="'k4' is unknown; use k1, k2 or k3"):
        kl_estimate(REFERENCE, REFERENCE, "k4")
