"""Decoupled PPO and A-3PO, written out; the field's number for the log-linear proximal policy."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import A3PO, Clip, Decoupled
from hybrid_rl.algos.policy_losses.decoupled import log_linear_proximal
from tests.unit.algos.policy_losses.samples import (
    MASK,
    VERSION,
    Columns,
    assert_is,
    columns,
    loss_and_gradient,
    loss_of,
    samples,
)


def written_out(given: Columns, proximal: list[float]) -> list[tuple[int, float, float]]:
    """-(p_prox / p_behav) min(r A, clip(r) A) with r = p / p_prox, epsilon 0.2 and 0.28, token by token."""
    new, behavior, advantages = (given[name].tolist() for name in ("logprobs", "rollout_logprobs", "advantages"))
    expected = []
    for places in samples(given):
        for t in places:
            weight, ratio = math.exp(proximal[t] - behavior[t]), math.exp(new[t] - proximal[t])
            bounded = min(max(ratio, 0.8), 1.28)
            objective = min(ratio * advantages[t], bounded * advantages[t])
            is_free = ratio * advantages[t] <= bounded * advantages[t]
            expected.append((t, -weight * objective, -weight * ratio * advantages[t] if is_free else 0.0))
    assert 0 < sum(slope == 0 for _, _, slope in expected) < len(expected)
    return expected


def test_decoupled_written_out() -> None:
    given = columns()
    loss, gradient = loss_and_gradient(Decoupled(epsilon_high=0.28), given)
    assert_is(loss, gradient, written_out(given, given["old_logprobs"].tolist()))
    assert "weight" not in loss.metrics and not loss.metrics["behavior_weight"].requires_grad


def test_a3po_written_out() -> None:
    """Ages 3, 1 and 0 of version 6: shares 2/3, 0 and 0 of the way from the engine's policy to the learner's."""
    given = columns(spread=1.2)
    behavior, new = given["rollout_logprobs"].tolist(), given["logprobs"].tolist()
    ages = [VERSION - version for version in given["token_versions"].tolist()]
    assert set(ages) == {3, 1, 0}
    proximal = [b + {3: 2 / 3, 1: 0.0, 0: 0.0}[age] * (n - b) for age, b, n in zip(ages, behavior, new, strict=True)]
    loss, gradient = loss_and_gradient(A3PO(epsilon_high=0.28), given)
    assert_is(loss, gradient, written_out(given, proximal))


def test_the_behavior_policy_as_proximal_is_plain_clipping() -> None:
    given = columns()
    given["old_logprobs"] = given["rollout_logprobs"]
    for ours, theirs in zip(loss_and_gradient(Decoupled(), given), loss_and_gradient(Clip(), given), strict=True):
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs)  # type: ignore[arg-type]
        else:
            assert torch.equal(ours.per_token, theirs.per_token)  # type: ignore[union-attr]


def test_weight_is_the_ratio_to_the_policy_that_made_the_tokens() -> None:
    """What an importance-weighted KL term needs; the proximal policy cancels."""
    given = columns()
    loss, _ = loss_and_gradient(Decoupled(), given)
    expected = (given["logprobs"] - given["rollout_logprobs"]).exp()
    torch.testing.assert_close(loss.weight[MASK], expected[MASK], rtol=1e-12, atol=0)
    assert loss.weight.requires_grad and torch.equal(loss.ratio, loss.weight.detach())


def test_log_linear_proximal_by_hand() -> None:
    """Versions 3, 6 and 7, ln p -2 and -1: a = (6 - 3) / (7 - 3) = .75, so -2 + .75 = -1.25."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    proximal = log_linear_proximal(logprobs, torch.tensor([-2.0], dtype=torch.float64), torch.tensor([3]), version=7)
    assert proximal.item() == -1.25 and not proximal.requires_grad


@pytest.mark.parametrize(("version_of_token", "proximal"), [(7, -2.0), (6, -2.0), (5, -1.5), (3, -1.25), (-1, -2.0)])
def test_ages(version_of_token: int, proximal: float) -> None:
    """d = v - v_behav = 0 and 1: the engine's policy; d = 2: half way; unknown: the engine's."""
    got = log_linear_proximal(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([version_of_token]), version=7)
    assert got.item() == proximal


def test_proximal_lies_between_the_two() -> None:
    given, ages = columns(), torch.arange(len(MASK)) % 50
    new, behavior = given["logprobs"].detach(), given["rollout_logprobs"]
    proximal = log_linear_proximal(new, behavior, 60 - ages, version=60)
    assert (proximal >= torch.minimum(new, behavior) - 1e-12)[MASK].all()
    assert (proximal <= torch.maximum(new, behavior) + 1e-12)[MASK].all()


def test_bad_arguments() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="version 8, but the learner is at version=7"):
        log_linear_proximal(one, one, torch.tensor([8]), version=7)
    with pytest.raises(ValueError, match=r"versions must all be \[T\]"):
        log_linear_proximal(one, one, torch.tensor([8, 8]), version=9)
    with pytest.raises(ValueError, match=r"rollout_logprobs must all be \[T\]"):
        loss_of(Decoupled(), one, one, one, one == 0, one.long(), 1, rollout_logprobs=torch.zeros(2))
    given = columns()
    del given["token_versions"]
    with pytest.raises(ValueError, match="the column token_versions is None"):
        loss_and_gradient(A3PO(), given)
