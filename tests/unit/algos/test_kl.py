"""KL estimates: their values, and what their gradients are in expectation over a small categorical distribution; the
exact KL against autograd of its definition; the penalty in the reward."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import Clip, KLInLoss, KLInReward, LossInputs, kl_estimate
from hybrid_rl.algos.kl import exact_kl, kl_reward

REFERENCE = torch.tensor([0.4, 0.1, 0.2, 0.25, 0.05], dtype=torch.float64).log()
OLD = torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25], dtype=torch.float64).log()


@pytest.fixture
def logits() -> Tensor:
    return torch.tensor([0.3, -1.2, 0.9, 0.0, 1.5], dtype=torch.float64, requires_grad=True)


def kl(left: Tensor, right: Tensor) -> Tensor:
    """The definition."""
    return (left.exp() * (left - right)).sum()


def mean(policy: Tensor, estimator: str) -> Tensor:
    """An estimate's mean over the policy, both of which follow the policy."""
    return (policy.exp() * kl_estimate(policy, REFERENCE, estimator)).sum()


def l1(policy: Tensor) -> Tensor:
    """Twice the total variation."""
    return (policy.exp() - REFERENCE.exp()).abs().sum()


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def assert_same_gradient(left: Tensor, right: Tensor, logits: Tensor) -> None:
    torch.testing.assert_close(gradient(left, logits), gradient(right, logits), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("estimator", "values"),
    [
        ("k1", [0.693147, -0.693147]),
        ("k2", [0.240227, 0.240227]),
        ("k3", [0.193147, 0.306853]),
        ("abs", [0.693147, 0.693147]),
    ],
)
def test_values_at_two_to_one_and_at_one_to_two(estimator: str, values: list[float]) -> None:
    """pi = .2 against a reference of .1, and the other way round."""
    policy, reference = torch.tensor([[0.2, 0.1], [0.1, 0.2]], dtype=torch.float64).log()
    assert kl_estimate(policy, reference, estimator).tolist() == pytest.approx(values, abs=5e-7)


def test_the_loss_offers_no_estimate_without_a_gradient() -> None:
    """k1's is zero in expectation."""
    offered = [set(typing.get_args(typing.get_type_hints(term)["kl_estimator"])) for term in (KLInLoss, KLInReward)]
    assert offered == [{"k2", "k3", "abs", "exact"}, {"k1", "k2", "k3", "abs"}]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str, logits: Tensor) -> None:
    policy = logits.log_softmax(0)
    assert mean(policy, estimator).item() == pytest.approx(kl(policy, REFERENCE).item(), rel=1e-13)


def test_abs_is_an_upper_bound(logits: Tensor) -> None:
    policy = logits.log_softmax(0)
    assert mean(policy, "abs") > kl(policy, REFERENCE)


def test_all_but_k1_are_never_negative() -> None:
    policy, reference = -5 * torch.rand(1000), -5 * torch.rand(1000)
    for estimator in ("k2", "k3", "abs"):
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
        ("k2", lambda policy: kl(policy, REFERENCE)),
        ("k3", lambda policy: kl(REFERENCE, policy)),
        ("abs", l1),
    ],
)
def test_expected_gradient_as_a_loss_on_own_samples(
    estimator: str, expected: Callable[[Tensor], Tensor], logits: Tensor
) -> None:
    """k1: zero; k2: that of KL(policy || reference); k3: that of KL(reference || policy); abs: that of the L1 norm."""
    policy = logits.log_softmax(0)
    loss = (policy.detach().exp() * kl_estimate(policy, REFERENCE, estimator)).sum()
    assert_same_gradient(loss, expected(policy), logits)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_importance_weight_makes_old_samples_right(estimator: str, logits: Tensor) -> None:
    """Samples of an older policy, weighted by policy / old with its gradient: the gradient of the estimate's own mean,
    which is KL(policy || reference) for the unbiased ones."""
    policy = logits.log_softmax(0)
    tokens = torch.arange(5)
    weight = Clip().loss(LossInputs(policy, OLD, torch.zeros_like(OLD), tokens >= 0, tokens, 5)).weight
    loss = (OLD.exp() * weight * kl_estimate(policy, REFERENCE, estimator)).sum()
    assert_same_gradient(loss, mean(policy, estimator), logits)
    if estimator in ("k1", "k3"):
        assert_same_gradient(loss, kl(policy, REFERENCE), logits)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", lambda policy: kl(policy, REFERENCE)),
        ("k3", lambda policy: kl(policy, REFERENCE) - kl(REFERENCE, policy)),
        ("abs", lambda policy: mean(policy, "abs") - l1(policy)),
    ],
)
def test_expected_gradient_as_a_reward(estimator: str, expected: Callable[[Tensor], Tensor], logits: Tensor) -> None:
    """Only k1 pulls towards the reference by KL(policy || reference)."""
    policy = logits.log_softmax(0)
    reward = kl_reward(policy, REFERENCE, torch.ones(5, dtype=torch.bool), 1.0, estimator)
    objective = (policy.detach().exp() * reward * policy).sum()  # REINFORCE
    assert_same_gradient(-objective, expected(policy), logits)


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="'k4' is unknown; use k1, k2, k3 or abs"):
        kl_estimate(REFERENCE, REFERENCE, "k4")


@pytest.mark.parametrize("shape", [(1,), (4,), (5, 1)])
def test_unlike_shapes_do_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must all be"):
        kl_estimate(REFERENCE, torch.zeros(shape), "k1")
    with pytest.raises(ValueError, match="must all be"):
        kl_reward(REFERENCE, REFERENCE, torch.ones(shape, dtype=torch.bool), 0.1, "k1")
    with pytest.raises(ValueError, match="the whole vocabulary"):
        exact_kl(REFERENCE[None], torch.zeros(shape))


def test_exact_kl_of_every_token_by_loops(logits: Tensor) -> None:
    """ln p = ln [.5, .25, .25] against [.25, .25, .5]: .5 ln 2 - .25 ln 2 = .173287; and another place."""
    log_probs = torch.stack((torch.tensor([0.5, 0.25, 0.25]).double().log(), logits[:3].detach().log_softmax(0)))
    reference = torch.tensor([[0.25, 0.25, 0.5], [0.7, 0.2, 0.1]], dtype=torch.float64).log()
    found = exact_kl(log_probs, reference)
    assert float(found[0]) == pytest.approx(0.25 * math.log(2), rel=1e-14)
    for place in range(2):
        pairs = zip(log_probs[place].tolist(), reference[place].tolist(), strict=True)
        assert float(found[place]) == pytest.approx(sum(math.exp(p) * (p - q) for p, q in pairs), rel=1e-14)


def test_gradient_of_the_exact_kl(logits: Tensor) -> None:
    """That of the definition, and by hand d KL / d logit_i = p_i (ln p_i - ln ref_i - KL)."""
    policy = logits.log_softmax(0)
    reference = REFERENCE.clone().requires_grad_()
    found = exact_kl(policy[None], reference[None]).sum()
    assert_same_gradient(found, kl(policy, REFERENCE), logits)
    probabilities = policy.detach().exp()
    by_hand = probabilities * (policy.detach() - REFERENCE - found.detach())
    torch.testing.assert_close(gradient(found, logits), by_hand, rtol=1e-12, atol=1e-14)
    assert torch.autograd.grad(found, reference, allow_unused=True) == (None,)


def test_gradient_of_the_exact_kl_by_the_log_probs() -> None:
    """p (ln p - ln ref + 1), before it meets the softmax, which takes the 1 away."""
    log_probs = OLD.clone().requires_grad_()
    by_hand = OLD.exp() * (OLD - REFERENCE + 1)
    found = gradient(exact_kl(log_probs[None], REFERENCE[None]).sum(), log_probs)
    torch.testing.assert_close(found, by_hand, rtol=1e-13, atol=0)


def test_tokens_that_the_policy_cannot_make_count_nothing() -> None:
    """p = [.5, .5, 0] on a support of two, reference [.25, .25, .5] or itself without the third: ln 2 and 0, gradients
    finite; what the reference alone excludes costs inf."""
    scores = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    excluded = torch.full((1,), -math.inf, dtype=torch.float64)
    policy = torch.cat((scores.log_softmax(0), excluded))[None]
    reference = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    found = exact_kl(policy, reference)
    assert found.item() == pytest.approx(math.log(2), rel=1e-14)
    assert bool(gradient(found.sum(), scores).isfinite().all())
    assert exact_kl(policy, policy).item() == 0
    assert math.isinf(exact_kl(reference, policy).item())


def test_penalty_in_the_reward() -> None:
    """-beta ln(policy / reference) per token whatever the length, summing to that of the completion; 0 where masked,
    even a value that is no number."""
    logprobs = torch.tensor([-1.0, -2.0, math.nan, -0.5], requires_grad=True)
    reference = torch.tensor([-1.5, -1.8, -1.0, -0.5])
    mask = torch.tensor([True, True, False, True])
    found = kl_reward(logprobs, reference, mask, 0.1, "k1")
    assert found.dtype == torch.float64 and not found.requires_grad
    assert found.tolist() == pytest.approx([-0.05, 0.02, 0.0, 0.0], abs=1e-7)
    assert float(kl_reward(logprobs, reference, mask, 0.1, "k3")[0]) == pytest.approx(
        -0.1 * (math.exp(-0.5) - 1 + 0.5), rel=1e-7
    )


def test_defaults_are_the_papers() -> None:
    """k3 with beta .04 in the loss (DeepSeekMath), k1 in the reward (PPO for language models), a fixed weight."""
    assert (KLInLoss().kl_estimator, KLInLoss().beta) == ("k3", 0.04)
    assert (KLInReward().kl_estimator, KLInReward().kl_target, KLInReward().kl_horizon) == ("k1", None, 10000)
