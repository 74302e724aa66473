"""Tokens that the policy loss leaves out: recorded answers of TRL's own functions, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.masked import entropy_quantile, off_policy_mask

# Four completions, None = masked: ln p of the policy and of the engine.
NOW = [[-1.0, -2.0, -0.5, None], [-0.3, -1.2, None, None], [-2.0, -1.0, -0.7, -0.1], [-0.6, None, None, None]]
ENGINE = [[-0.8, -1.9, -0.5, None], [-0.4, -1.0, None, None], [-2.2, -1.2, -0.2, -0.3], [-0.1, None, None, None]]
MASK = torch.tensor([[value is not None for value in row] for row in NOW]).flatten()
ROWS = torch.arange(4).repeat_interleave(4)


def column(rows: list[list[float | None]]) -> torch.Tensor:
    return torch.tensor([math.nan if value is None else value for row in rows for value in row])


def kept(advantages: list[list[float]], threshold: float, now: torch.Tensor | None = None) -> list[int]:
    given = torch.tensor(advantages).expand(4, 4).flatten()
    now = column(NOW) if now is None else now
    found = off_policy_mask(now, column(ENGINE), given, MASK, ROWS, 4, threshold=threshold)
    return found[MASK].int().tolist()


# By GRPOTrainer.get_off_policy_mask of TRL 1.16.0, for the advantages -1, -.5, -.2 and 2; the mean
# gaps are .1, .05, -.025 and .5.
@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.02, [0, 0, 1, 1]), (0.06, [0, 1, 1, 1]), (0.2, [1, 1, 1, 1])], ids=str
)
def test_completions_are_those_that_trl_keeps(threshold: float, expected: list[int]) -> None:
    found = kept([[-1.0], [-0.5], [-0.2], [2.0]], threshold)
    assert found == [flag for flag, length in zip(expected, (3, 2, 4, 1), strict=True) for _ in range(length)]


def test_each_token_has_its_own_advantage() -> None:
    """As in TRL where a subclass gives advantages of tokens (recorded likewise)."""
    advantages = [[-1.0, 1, 0, 1], [-0.5, 0.5, 0, 0], [-0.2, 0.1, -0.1, 0.1], [-2.0, 0, 0, 0]]
    assert kept(advantages, 0.09) == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]


def test_a_gap_that_is_no_number_counts_as_too_large() -> None:
    now = column(NOW)
    now[4] = math.nan
    assert kept([[-1.0]] * 4, 10.0, now) == [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    assert kept([[1.0]] * 4, 10.0, now) == [1] * 10


def test_it_computes_in_float32() -> None:
    """A gap of 1 + 2^-8 in half of 1024 tokens, 0 in the others: (1 + 2^-8) / 2 = 0.50195 on average. In bfloat16 it
    would be 0.5, as 1 + 2^-8 takes nine bits, or 1, as sum and count of the tokens would both stand still at 256."""
    now = torch.full((1024,), -1.0078125, dtype=torch.bfloat16)  # 1 + 2^-7
    engine, on = torch.full_like(now, -0.00390625), torch.ones(1024, dtype=torch.bool)
    engine[512:] = now[512:]
    rows = torch.zeros(1024, dtype=torch.int64)
    found = [off_policy_mask(now, engine, -on.float(), on, rows, 1, threshold=limit) for limit in (0.501, 0.503)]
    assert not found[0].any() and found[1].all()


# --------------------------------------------------------------------------------------------------- by entropy

ENTROPY = torch.tensor([0.1, 0.9, 0.4, 9.0, 0.7, 0.7, 9.0, 9.0, 0.2, 0.05, 1.1, 0.3, 0.6, 9.0, 9.0, 9.0])


# By GRPOTrainer.get_high_entropy_mask of TRL 1.16.0, and torch.quantile.
@pytest.mark.parametrize(
    ("share", "quantile", "expected"),
    [
        (0.0, 1.1, [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]),
        (0.2, 0.74, [0, 1, 0, 0, 0, 0, 0, 1, 0, 0]),
        (0.35, 0.685, [0, 1, 0, 1, 1, 0, 0, 1, 0, 0]),
        (0.5, 0.5, [0, 1, 0, 1, 1, 0, 0, 1, 0, 1]),
        (0.9, 0.095, [1, 1, 1, 1, 1, 1, 0, 1, 1, 1]),
        (1.0, 0.05, [1] * 10),
    ],
    ids=str,
)
def test_tokens_are_those_that_trl_keeps(share: float, quantile: float, expected: list[int]) -> None:
    found = entropy_quantile(ENTROPY, MASK, share, num_tokens=10)
    assert float(found) == pytest.approx(quantile, abs=1e-6)
    assert (ENTROPY.double() >= found)[MASK].int().tolist() == expected


def test_a_mini_batch_without_tokens_has_no_quantile() -> None:
    none = torch.zeros_like(MASK)
    assert float(entropy_quantile(ENTROPY, none, 0.2, num_tokens=0)) == -math.inf
    with pytest.raises(ValueError, match="share=1.5 is not a share of tokens; use 0 to 1"):
        entropy_quantile(ENTROPY, MASK, 1.5, num_tokens=10)
