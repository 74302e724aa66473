"""Tokens as steps: against loops over samples and tokens, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.algos.advantages import Steps, step_rewards

# A sample: per token, whether the policy made it, and two numbers.
SAMPLES = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(0, 1)), max_size=7), min_size=1, max_size=6
)


def columns(samples: list[list[tuple[bool, float, float]]]) -> tuple[torch.Tensor, ...]:
    flat = [token for sample in samples for token in sample]
    rows = torch.tensor([i for i, sample in enumerate(samples) for _ in sample], dtype=torch.int64)
    mask = torch.tensor([made for made, *_ in flat], dtype=torch.bool)
    first = torch.tensor([a for _, a, _ in flat], dtype=torch.float64)
    second = torch.tensor([b for *_, b in flat], dtype=torch.float64)
    return mask, rows, first, second


@given(samples=SAMPLES)
def test_sums_and_next_values_against_loops(samples: list[list[tuple[bool, float, float]]]) -> None:
    mask, rows, terms, decay = columns(samples)
    ahead, following, so_far = [], [], []
    for sample in samples:
        own = [(t, d) for made, t, d in sample if made]
        sums, carry = [], 0.0
        for t, d in reversed(own):
            carry = t + d * carry
            sums.insert(0, carry)
        values = iter(sums)
        nexts = iter([t for t, _ in own[1:]] + [0.0])
        running = iter([math.fsum(t for t, _ in own[: i + 1]) for i in range(len(own))])
        for made, *_ in sample:
            ahead.append(next(values) if made else 0.0)
            following.append(next(nexts) if made else 0.0)
            so_far.append(next(running) if made else 0.0)
    steps = Steps.of(mask, rows, len(samples))
    taken = steps.take(terms)
    assert steps.spread(steps.discounted(taken, steps.take(decay))).tolist() == pytest.approx(ahead, abs=1e-12)
    assert steps.spread(steps.next(taken)).tolist() == following
    assert steps.spread(steps.accumulated(taken)).tolist() == pytest.approx(so_far, abs=1e-12)


def test_one_decay_for_all() -> None:
    """1 + .5 (2 + .5 * 4) = 3 beside a shorter sample that does not see it."""
    steps = Steps.of(torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 1, 1]), 2)
    result = steps.discounted(torch.tensor([7.0, 1.0, 2.0, 4.0], dtype=torch.float64), 0.5)
    assert result.tolist() == [7.0, 3.0, 4.0, 4.0]


def test_outcome_falls_on_the_last_step_of_the_policy() -> None:
    """A total of 3 with .5 and 1 at tokens leaves 1.5, at the last token that the policy made, not the last one."""
    mask = torch.tensor([False, True, True, False])
    result = step_rewards(torch.tensor([3.0]), torch.tensor([0.0, 0.5, 1.0, 0.0]), mask, torch.zeros(4).long())
    assert result.tolist() == [0.0, 0.5, 2.5, 0.0]


def test_rewards_at_tokens_of_the_environment() -> None:
    """They belong to the step before; before the first step, to none; and never to another sample."""
    mask = torch.tensor([False, True, False, False, True, False, True])
    tokens = torch.tensor([0.25, 0.0, 1.0, 2.0, 0.0, 4.0, 0.0])
    rows = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    result = step_rewards(torch.tensor([10.25, 4.5]), tokens, mask, rows)
    assert result.tolist() == [0.0, 3.0, 0.0, 0.0, 7.0, 0.0, 0.5]


def test_samples_without_a_reward_have_none_anywhere() -> None:
    rewards, tokens = torch.tensor([math.nan, 1.0]), torch.tensor([0.5, math.nan, 0.25])
    result = step_rewards(rewards, tokens, torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1]))
    assert result.tolist() == [0.0, 0.0, 1.0]


def test_samples_without_tokens() -> None:
    nothing = torch.zeros(0)
    assert step_rewards(torch.tensor([1.0, 2.0]), nothing, nothing.bool(), nothing.long()).tolist() == []
    result = step_rewards(torch.tensor([1.0, 2.0]), torch.zeros(2), torch.zeros(2).bool(), torch.tensor([1, 1]))
    assert result.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "rows", "message"),
    [
        (torch.zeros(3), torch.tensor([0, 0]), r"must all be \[T\]"),
        (torch.zeros(2, 1), torch.tensor([[0], [0]]), r"must all be \[T\]"),
        (torch.zeros(2), torch.tensor([1, 0]), "sort the tokens by sample"),
        (torch.zeros(2), torch.tensor([0, 2]), r"within 0\.\.1"),
    ],
)
def test_bad_columns(tokens: torch.Tensor, rows: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_rewards(torch.zeros(2), tokens, torch.ones_like(rows, dtype=torch.bool), rows)
