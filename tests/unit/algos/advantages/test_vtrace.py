"""V-trace: the paper's sum of products in loops, its limits, and what it must not do."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.advantages import VTrace, generalized_advantages
from hybrid_rl.algos.interface import AdvantageInputs
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.errors import ConfigError


def reference(
    rewards: list[float],
    values: list[float],
    ratios: list[float],
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
) -> tuple[list[float], list[float]]:
    """Eq. 1 as it stands: v_s = V_s + sum over t >= s of gamma^(t - s) (product of c from s to t - 1) delta_t."""
    n = len(rewards)
    following = values[1:] + [0.0]
    rho = [min(rho_clip, ratio) for ratio in ratios]
    c = [lam * min(c_clip, ratio) for ratio in ratios]
    delta = [rho[t] * (rewards[t] + gamma * following[t] - values[t]) for t in range(n)]
    targets = [
        values[s] + math.fsum(gamma ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, n)) for s in range(n)
    ]
    after = targets[1:] + [0.0]
    return [rho[s] * (rewards[s] + gamma * after[s] - values[s]) for s in range(n)], targets


def random_columns(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rewards, values, logprobs, rollout = torch.randn(4, sum(lengths), dtype=torch.float64, generator=generator)
    return rewards, values, logprobs, rollout


def vtrace(rewards: torch.Tensor, *columns: torch.Tensor, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and targets of these rewards of tokens. columns: values, logprobs, rollout_logprobs, mask, rows."""
    values, logprobs, rollout, mask, rows = columns
    total = row_sum(rewards, rows, int(rows.max()) + 1)
    found = VTrace(**options).compute(  # type: ignore[arg-type]
        AdvantageInputs(
            *(total, torch.arange(len(total)), rows, mask, rewards),
            values=values,
            logprobs=logprobs,
            rollout_logprobs=rollout,
        )
    )
    assert found.returns is not None
    return found.advantages, found.returns


LENGTHS = [3, 0, 7, 1]
ROWS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))


@pytest.mark.parametrize(
    ("gamma", "lam", "rho_clip", "c_clip"), [(1.0, 1.0, 1.0, 1.0), (0.9, 0.8, 2.0, 1.5), (0.99, 0.0, 0.7, 0.5)]
)
def test_against_the_sum_of_products(gamma: float, lam: float, rho_clip: float, c_clip: float) -> None:
    columns = random_columns(LENGTHS)
    options = {"gamma": gamma, "lam": lam, "rho_clip": rho_clip, "c_clip": c_clip}
    found = vtrace(*columns, torch.ones(11).bool(), ROWS, **options)
    expected: tuple[list[float], list[float]] = ([], [])
    for r, v, p, q in zip(*(column.split(LENGTHS) for column in columns), strict=True):
        parts = reference(r.tolist(), v.tolist(), (p - q).exp().tolist(), gamma, lam, rho_clip, c_clip)
        for whole, part in zip(expected, parts, strict=True):
            whole.extend(part)
    assert found[0].tolist() == pytest.approx(expected[0], abs=1e-12)
    assert found[1].tolist() == pytest.approx(expected[1], abs=1e-12)


def test_on_policy_it_is_gae() -> None:
    """pi = mu: the targets are GAE's returns with the same lambda; with lambda 1 the advantages are GAE's too."""
    rewards, values, logprobs, _ = random_columns(LENGTHS)
    mask = torch.ones(11).bool()
    for lam in (1.0, 0.7):
        advantages, targets = vtrace(rewards, values, logprobs, logprobs, mask, ROWS, gamma=0.9, lam=lam)
        expected, returns = generalized_advantages(rewards, values, mask, ROWS, 4, gamma=0.9, lam=lam)
        torch.testing.assert_close(targets, returns, rtol=0, atol=1e-12)
        if lam == 1.0:
            torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)


def test_masked_tokens_and_overflow() -> None:
    """What the environment wrote may hold any numbers; a ratio that overflows meets its bound."""
    mask = torch.tensor([True, False, True])
    logprobs, rollout = torch.tensor([0.0, math.nan, 0.0]), torch.tensor([-1e6, 0.0, 0.0])
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, math.inf, 0.25])
    advantages, targets = vtrace(rewards, values, logprobs, rollout, mask, torch.zeros(3).long(), gamma=1.0)
    assert advantages.tolist() == [0.5, 0.0, 0.75] and targets.tolist() == [1.0, 0.0, 1.0]


def test_samples_without_a_reward() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([math.nan, 1.0], dtype=torch.float64),
        groups=torch.arange(2),
        rows=torch.tensor([0, 1]),
        mask=torch.ones(2).bool(),
        token_rewards=torch.zeros(2, dtype=torch.float64),
        values=torch.tensor([0.5, 0.25], dtype=torch.float64),
        logprobs=torch.zeros(2, dtype=torch.float64),
        rollout_logprobs=torch.zeros(2, dtype=torch.float64),
    )
    found = VTrace().compute(inputs)
    assert found.advantages.tolist() == [0.0, 0.75]
    assert found.returns is not None and found.returns.tolist() == [0.5, 1.0]


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most rho_clip=1.0"):
        VTrace(c_clip=2.0)
