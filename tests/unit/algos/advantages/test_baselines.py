"""RLOO, GPG, MaxRL, OPO and ReMax: hand-computed numbers, the definitions in loops, and what each is there for."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.algos import AdvantageInputs
from hybrid_rl.algos.advantages import GPG, OPO, RLOO, STD_FLOOR, MaxRL, ReMax

NAN = math.nan
GROUPED = st.lists(
    st.tuples(st.sampled_from([-1, 0, 2**40]), st.sampled_from([0.0, 1.0, 0.1, 2.5, NAN]), st.integers(0, 5)),
    min_size=1,
    max_size=16,
)


def tensors(samples: list[tuple[int, float, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, rewards, lengths = zip(*samples, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)


def length_weighted(rewards: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """OPO's advantage of each sample, from completions of these lengths and a token that is not the policy's."""
    rows = torch.arange(len(rewards)).repeat_interleave(lengths + 1)
    mask = rows.diff(append=torch.tensor([-1])) == 0  # all but the last token of a sample
    found = OPO().compute(AdvantageInputs(rewards, groups, rows, mask, torch.zeros(len(rows)))).advantages
    assert not found[~mask].any()
    return torch.zeros(len(rewards)).double().index_copy(0, rows[mask], found[mask])


def compared(samples: list[tuple[int, float, int]], i: int) -> list[int]:
    """Scored samples of the group of i, where they differ and i is one of them; else none."""
    mates = [j for j, (g, r, _) in enumerate(samples) if g == samples[i][0] and not math.isnan(r)]
    return mates if i in mates and len({samples[j][1] for j in mates}) > 1 else []


def test_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long()
    assert RLOO().of_samples(rewards, groups).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-15)
    assert MaxRL().of_samples(rewards, groups).tolist() == [3.0, -1.0, -1.0, -1.0]
    # Lengths 1 1 2 4: the baseline is 1/8, not 1/4.
    lengths = torch.tensor([1, 1, 2, 4])
    assert length_weighted(rewards, groups, lengths).tolist() == [0.875, -0.125, -0.125, -0.125]


def test_gpg_makes_up_for_groups_without_signal() -> None:
    """Of eight samples four lie in a group of equal rewards, one has none: 7 / 3. Rewards of 0 are no matter."""
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 3.0, 0.0, NAN])
    groups = torch.tensor([0, 0, 0, 0, 5, 5, 5, 5])
    expected = [0.0] * 4 + [-7 / 3, 14 / 3, -7 / 3, 0.0]
    assert GPG().of_samples(rewards, groups).tolist() == pytest.approx(expected, rel=1e-15)
    scaled = GPG(scale_rewards="group").of_samples(rewards, groups)
    divisor = math.sqrt(3) + STD_FLOOR
    assert scaled.tolist() == pytest.approx([value / divisor for value in expected], rel=1e-14)
    assert GPG().of_samples(rewards[:4], groups[:4]).tolist() == [0.0] * 4


@given(samples=GROUPED)
def test_leave_one_out_against_the_definition(samples: list[tuple[int, float, int]]) -> None:
    rewards, groups, _ = tensors(samples)
    expected = []
    for i, (_, reward, _) in enumerate(samples):
        others = [samples[j][1] for j in compared(samples, i) if j != i]
        expected.append(reward - statistics.fmean(others) if others else 0.0)
    assert RLOO().of_samples(rewards, groups).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(samples=GROUPED)
def test_length_weighted_against_the_definition(samples: list[tuple[int, float, int]]) -> None:
    rewards, groups, lengths = tensors(samples)
    expected = []
    for i, (_, reward, own) in enumerate(samples):
        mates = [samples[j] for j in compared(samples, i)]
        total = sum(length for *_, length in mates)  # a sample without tokens has nowhere to show its advantage
        expected.append(reward - sum(length * r for _, r, length in mates) / total if total and own else 0.0)
    found = length_weighted(rewards, groups, lengths).tolist()
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(samples=GROUPED)
def test_gpg_and_maxrl_against_the_definition(samples: list[tuple[int, float, int]]) -> None:
    rewards, groups, _ = tensors(samples)
    with_signal = [i for i in range(len(samples)) if compared(samples, i)]
    num_scored = sum(not math.isnan(reward) for _, reward, _ in samples)
    gpg, maxrl = [], []
    for i, (_, reward, _) in enumerate(samples):
        mean = statistics.fmean(samples[j][1] for j in compared(samples, i)) if i in with_signal else 0.0
        gpg.append(num_scored / len(with_signal) * (reward - mean) if i in with_signal else 0.0)
        maxrl.append((reward - mean) / mean if i in with_signal else 0.0)
    assert GPG().of_samples(rewards, groups).tolist() == pytest.approx(gpg, rel=1e-12, abs=1e-12)
    assert MaxRL().of_samples(rewards, groups).tolist() == pytest.approx(maxrl, rel=1e-12, abs=1e-12)


def expected_gradient(estimate: object, size: int, p: float) -> float:
    """Of a Bernoulli policy, over every outcome of a group: E[mean of A grad ln p]."""
    outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)
    groups = torch.arange(len(outcomes)).repeat_interleave(size)
    advantages = estimate(outcomes.flatten(), groups).view_as(outcomes)  # type: ignore[operator]
    probability = (p * outcomes + (1 - p) * (1 - outcomes)).prod(1)
    return float((probability * (advantages * (outcomes - p)).mean(1)).sum())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_leave_one_out_is_unbiased(size: int) -> None:
    """The true gradient p (1 - p), where a mean with the own sample in it gives 1 - 1/n of that."""
    assert expected_gradient(RLOO().of_samples, size, 0.3) == pytest.approx(0.3 * 0.7, rel=1e-12)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_maxrl_climbs_the_likelihood_of_success(size: int) -> None:
    """The gradient in the logit of the first n - 1 terms of ln p = - sum over k of (1 - p)^k / k."""
    p = 0.3
    assert expected_gradient(MaxRL().of_samples, size, p) == pytest.approx(
        (1 - p) * (1 - (1 - p) ** (size - 1)), rel=1e-12
    )


@pytest.mark.parametrize("estimate", [RLOO().of_samples, GPG().of_samples, MaxRL().of_samples])
def test_equal_rewards_are_exactly_zero(estimate: object) -> None:
    rewards, groups = torch.tensor([0.1] * 49 + [0.0, 1.0], dtype=torch.float64), torch.tensor([5] * 49 + [6, 6])
    result = estimate(rewards, groups)  # type: ignore[operator]
    assert result[:49].tolist() == [0.0] * 49 and bool((result[49:] != 0).all())
    lengths = torch.arange(51) + 1
    assert length_weighted(rewards, groups, lengths)[:49].tolist() == [0.0] * 49


def remax(rewards: torch.Tensor, baseline: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    tokens, mask, rows = columns
    inputs = AdvantageInputs(rewards, torch.arange(len(rewards)), rows, mask, tokens, baseline_rewards=baseline)
    return ReMax().compute(inputs).advantages


def test_greedy_baseline() -> None:
    """Rewards of tokens .5 and 2 of a total of 3, against a greedy 1: what lies ahead less 1, at own tokens only."""
    rewards, greedy = torch.tensor([3.0, 1.0, NAN, 1.0]), torch.tensor([1.0, NAN, 1.0, 0.25])
    tokens = torch.tensor([0.5, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    mask, rows = torch.tensor([True, True, False, True, True, True, True]), torch.tensor([0, 0, 0, 1, 2, 3, 3])
    result = remax(rewards, greedy, tokens, mask, rows)
    assert result.tolist() == [2.0, 1.5, 0.0, 0.0, 0.0, 0.75, 0.75]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="a reward is -0.5"):
        MaxRL().of_samples(torch.tensor([1.0, -0.5]), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        RLOO().of_samples(torch.zeros(2), torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"baseline_rewards must be \[N\]"):
        remax(torch.zeros(2), torch.zeros(1), torch.zeros(1), torch.ones(1).bool(), torch.zeros(1))
