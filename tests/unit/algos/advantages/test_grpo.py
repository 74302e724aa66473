"""Group-relative advantages: the published numbers, Python's own statistics, exact zeros, and step by step."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.algos import GRPO, AdvantageInputs, group_has_signal, group_relative_advantages
from hybrid_rl.algos.advantages import STD_FLOOR
from hybrid_rl.algos.advantages.grpo import reward_decoupled_advantages
from hybrid_rl.errors import ConfigError

NAN = math.nan
SCALES = ["group", "batch", "mad", "none"]


def advantages(rewards: list[float], groups: list[int], scale: str = "group") -> list[float]:
    result = group_relative_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), scale_rewards=scale
    )
    assert result.dtype == torch.float64
    return result.tolist()


def reference(rewards: list[float], groups: list[int], scale: str) -> list[float]:
    """The definition, sample by sample, in exact fractions where Python has them."""
    scored = [r for r in rewards if not math.isnan(r)]
    batch_std = statistics.stdev(scored) if len(scored) > 1 else 0.0
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward) or len(mates) < 2 or max(mates) == min(mates):
            result.append(0.0)
            continue
        divisor = {
            "group": statistics.stdev(mates) + STD_FLOOR,
            "batch": batch_std + STD_FLOOR,
            "mad": robust_std(mates) + STD_FLOOR,
            "none": 1.0,
        }[scale]
        result.append((reward - statistics.mean(mates)) / divisor)
    return result


def robust_std(values: list[float]) -> float:
    deviations = [abs(value - statistics.median(values)) for value in values]
    return 1.4826 * statistics.median(deviations) or 1.253314 * statistics.mean(deviations)


def test_one_success_of_eight() -> None:
    """Sample standard deviation sqrt(1/8): 2.4749 and -.3536, which the floor of 1e-4 lowers by 0.03 %."""
    won, *lost = advantages([1.0] + [0.0] * 7, [0] * 8)
    assert won == pytest.approx(2.4749, rel=5e-4) and lost == pytest.approx([-0.3536] * 7, rel=5e-4)
    assert won == pytest.approx(0.875 / (math.sqrt(1 / 8) + 1e-4), rel=1e-14)
    assert advantages([1.0] + [0.0] * 7, [0] * 8, "none") == [0.875] + [-0.125] * 7


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 49])
def test_equal_rewards_are_exactly_zero(scale: str, dtype: torch.dtype, size: int) -> None:
    """A naive centring of .1 in fp32 over a std floor of 1e-8 yields -.415. A group with signal stands beside it, so
    that the batch's deviation is not zero."""
    rewards = torch.tensor([0.1] * size + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([5] * size + [6, 6])
    result = group_relative_advantages(rewards, groups, scale_rewards=scale)
    assert result[:size].tolist() == [0.0] * size and bool((result[size:] != 0).all())


def test_batch_scale_by_hand() -> None:
    """Rewards 0 1 | 2 4: centred -.5 .5 -1 1; deviation of all four sqrt(8.75 / 3)."""
    divisor = math.sqrt(8.75 / 3) + 1e-4
    expected = [-0.5 / divisor, 0.5 / divisor, -1 / divisor, 1 / divisor]
    assert advantages([0, 1, 2, 4], [0, 0, 1, 1], "batch") == pytest.approx(expected, rel=1e-14)


def test_robust_scale_by_hand() -> None:
    """1 2 3 4 100: median 3, deviations 2 1 0 1 97 with median 1; one outlier does not hide the others, as it does
    where the standard deviation, 43.6, divides."""
    *mild, _ = advantages([1, 2, 3, 4, 100], [0] * 5, "mad")
    assert mild == pytest.approx([(r - 22) / (1.4826 + 1e-4) for r in (1, 2, 3, 4)], rel=1e-14)
    # One success of eight: more than half are equal, so that the mean deviation 1/8 takes over from a median of 0.
    won, *_ = advantages([1.0] + [0.0] * 7, [0] * 8, "mad")
    assert won == pytest.approx(0.875 / (1.253314 / 8 + 1e-4), rel=1e-14)


def test_unscored_samples_count_nowhere() -> None:
    """[1, 0] with and without an unscored third: the same, and 0 for it."""
    for scale in SCALES:
        with_gap = advantages([1.0, NAN, 0.0], [4, 4, 4], scale)
        assert [with_gap[0], with_gap[2]] == advantages([1.0, 0.0], [4, 4], scale)
        assert with_gap[1] == 0.0


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[NAN, NAN], [0.3, NAN], [NAN]])
def test_groups_that_compare_nothing(scale: str, rewards: list[float]) -> None:
    assert advantages(rewards, [0] * len(rewards), scale) == [0.0] * len(rewards)


@pytest.mark.parametrize("scale", SCALES)
def test_no_samples(scale: str) -> None:
    assert advantages([], [], scale) == []


@given(
    samples=st.lists(
        st.tuples(st.sampled_from([-1, 0, 3, 2**40]), st.sampled_from([0.0, 1.0, 0.1, -2.5, 7.0, NAN])),
        min_size=1,
        max_size=20,
    ),
    scale=st.sampled_from(SCALES),
)
def test_uneven_groups_against_the_definition(samples: list[tuple[int, float]], scale: str) -> None:
    groups, rewards = (list(part) for part in zip(*samples, strict=True))
    assert advantages(rewards, groups, scale) == pytest.approx(reference(rewards, groups, scale), rel=1e-12, abs=1e-12)


def test_order_and_names_of_groups_do_not_matter() -> None:
    rewards, groups = torch.rand(24), torch.arange(24) % 5
    order = torch.randperm(24)
    renamed = torch.tensor([2**40, -7, 3, 12, 0])[groups]
    expected = group_relative_advantages(rewards, groups)
    torch.testing.assert_close(group_relative_advantages(rewards[order], renamed[order]), expected[order])


@pytest.mark.parametrize(("size", "factor"), [(2, 0.5), (4, 0.75), (8, 0.875)])
def test_own_sample_in_the_mean_scales_the_expected_gradient(size: int, factor: float) -> None:
    """Every outcome of a Bernoulli policy: E[mean of A grad ln p] is (1 - 1/G) times the true gradient p (1 - p)."""
    p = 0.3
    outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)
    groups = torch.arange(len(outcomes)).repeat_interleave(size)
    centred = group_relative_advantages(outcomes.flatten(), groups, scale_rewards="none").view_as(outcomes)
    probability = (p * outcomes + (1 - p) * (1 - outcomes)).prod(1)
    expected = (probability * (centred * (outcomes - p)).mean(1)).sum()
    assert float(expected) == pytest.approx(factor * p * (1 - p), rel=1e-12)


def test_group_has_signal() -> None:
    rewards = torch.tensor([0.1, 1.0, NAN, 0.1, 1.0, 0.0, NAN, 0.5])
    groups = torch.tensor([9, -1, -1, 9, 4, 4, 5, 5])
    assert group_has_signal(rewards, groups).tolist() == [False, True, False, False]  # groups -1, 4, 5, 9


@pytest.mark.parametrize(
    ("rewards", "groups", "scale", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2), "group", r"must be \[N\]"),
        (torch.zeros(2), torch.zeros(3), "group", r"\(2,\) and \(3,\)"),
        (torch.zeros(2), torch.zeros(2), "std", "use group, batch, mad or none"),
    ],
)
def test_bad_arguments(rewards: torch.Tensor, groups: torch.Tensor, scale: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_relative_advantages(rewards, groups.long(), scale_rewards=scale)


def process_reference(
    samples: list[tuple[int, float, list[float], list[bool]]], scale: str = "group"
) -> list[list[float]]:
    """Section 4.1.3 of DeepSeekMath, sample by sample. A sample: group, outcome (NaN = not scored), rewards of tokens,
    whether the policy made them (here rewards lie at its own tokens only)."""
    lists: list[list[tuple[int, float]]] = []  # per sample: position and reward of its steps
    for group, outcome, tokens, made in samples:
        steps = [(t, r) for t, r in enumerate(tokens) if r != 0]
        mates = [o for g, o, _, _ in samples if g == group and not math.isnan(o)]
        last = max((t for t, m in enumerate(made) if m), default=None)
        if any(mates) and last is not None:
            steps = [(t, r) for t, r in steps if t != last] + [(last, tokens[last] + outcome)]
        lists.append([] if math.isnan(outcome) else steps)
    result = []
    for (group, _, tokens, made), steps in zip(samples, lists, strict=True):
        pool = [r for (g, *_), other in zip(samples, lists, strict=True) if g == group for _, r in other]
        normalised = []
        for t, reward in steps:
            if len(pool) < 2 or max(pool) == min(pool):
                normalised.append((t, 0.0))
                continue
            divisor = {"group": statistics.stdev(pool) + STD_FLOOR, "none": 1.0}[scale]
            normalised.append((t, (reward - statistics.mean(pool)) / divisor))
        result.append([sum(r for s, r in normalised if s >= t) if made[t] else 0.0 for t in range(len(tokens))])
    return result


def process(samples: list[tuple[int, float, list[float], list[bool]]], scale: str = "group") -> list[float]:
    inputs = AdvantageInputs(
        rewards=torch.tensor([o + sum(tokens) for _, o, tokens, _ in samples], dtype=torch.float64),
        groups=torch.tensor([g for g, *_ in samples]),
        rows=torch.tensor([i for i, s in enumerate(samples) for _ in s[2]], dtype=torch.int64),
        mask=torch.tensor([m for *_, made in samples for m in made], dtype=torch.bool),
        token_rewards=torch.tensor([r for _, _, tokens, _ in samples for r in tokens], dtype=torch.float64),
    )
    record = GRPO(token_level=True, scale_rewards=scale)  # type: ignore[arg-type]
    return record.compute(inputs).advantages.tolist()


def test_process_supervision_by_hand() -> None:
    """Step rewards 1 and 3 | 2: mean 2, deviation 1; the first sample's tokens get (-1 + 1) and 1, the other's 0."""
    made = [True, True, True]
    samples = [(0, 0.0, [1.0, 0.0, 3.0], made), (0, 0.0, [0.0, 2.0, 0.0], made)]
    assert process(samples) == pytest.approx([0, 1 / 1.0001, 1 / 1.0001, 0, 0, 0], abs=1e-14)


def test_process_supervision_without_rewards_of_tokens_is_grpo() -> None:
    outcomes = [1.0, 0.0, 0.0, 0.5, 0.5]
    samples = [(i // 3, o, [0.0, 0.0], [True, True]) for i, o in enumerate(outcomes)]
    expected = advantages(outcomes, [0, 0, 0, 1, 1])
    assert process(samples) == pytest.approx([a for a in expected for _ in range(2)], rel=1e-14)


def test_rounding_of_dense_rewards_is_no_outcome() -> None:
    """Totals that differ from the sum of float32 rewards in the last digits: no outcome of zero joins the steps."""
    tokens = torch.tensor([0.1, 0.7, 0.3, 0.9], dtype=torch.float32)
    args = (torch.tensor([0, 0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), tokens)
    totals = (torch.tensor([0.8, 1.2], dtype=torch.float64), tokens.double().view(2, 2).sum(1))
    rough, exact = (GRPO(token_level=True).compute(AdvantageInputs(total, *args)).advantages for total in totals)
    torch.testing.assert_close(rough, exact, rtol=0, atol=1e-12)


@given(
    samples=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from([0.0, 1.0, -0.5, NAN]),
            st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.25, 1.0, -2.0]), st.booleans()), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=8,
    ),
    scale=st.sampled_from(["group", "none"]),
)
def test_process_supervision_against_the_definition(
    samples: list[tuple[int, float, list[tuple[float, bool]]]], scale: str
) -> None:
    cases = [(g, o, [r if m else 0.0 for r, m in tokens], [m for _, m in tokens]) for g, o, tokens in samples]
    expected = [a for row in process_reference(cases, scale) for a in row]
    assert process(cases, scale) == pytest.approx(expected, rel=1e-10, abs=1e-10)


# ---------------------------------------------------------------------------------------------- several functions

# Three groups of four, by two functions that weigh 1 and -0.5.
BY_FUNCTION = [[1.0, 0.2], [0.0, 0.9], [1.0, NAN], [0.0, 0.4], [NAN, NAN], [0.5, 10.0], [0.25, 30.0], [0.0, 20.0]]
BY_FUNCTION += [[1.0, 3.0], [1.0, 1.0], [1.0, 2.0], [1.0, NAN]]
# GRPOTrainer's multi_objective_aggregation="normalize_then_sum" of TRL 1.16.0, in float64.
OF_TRL = [1.35572547, -1.50235938, 0.91582377, -0.76918986, 0.0, 1.58609987, -0.5288374, -1.05726247]
OF_TRL += [-0.52878981, 0.52878981, 0.0, 0.0]


def by_function(order: list[int]) -> list[float]:
    """By the estimator itself, its samples given in this order."""
    values = torch.tensor(BY_FUNCTION, dtype=torch.float64)[order]
    totals = torch.where(values.isnan().all(1), NAN, values.nan_to_num() @ torch.tensor([1.0, -0.5]).double())
    number = len(order)
    inputs = AdvantageInputs(
        rewards=totals,
        groups=torch.tensor(order) // 4,
        rows=torch.arange(number),
        mask=torch.ones(number, dtype=torch.bool),
        token_rewards=torch.zeros(number, dtype=torch.float64),
        function_rewards=values,
        reward_weights=torch.tensor([1.0, -0.5]),
    )
    found: list[float] = GRPO(multi_objective_aggregation="normalize_then_sum").compute(inputs).advantages.tolist()
    return found


def test_functions_normalised_one_by_one_give_the_numbers_of_trl() -> None:
    assert by_function(list(range(12))) == pytest.approx(OF_TRL, abs=1e-7)
    order = [7, 2, 9, 0, 4, 11, 1, 5, 3, 10, 8, 6]
    assert by_function(order) == pytest.approx([OF_TRL[place] for place in order], abs=1e-7)


def test_functions_that_tell_nothing_apart_give_exactly_nothing() -> None:
    values = torch.tensor([[0.1, NAN], [0.1, 0.7], [0.1, NAN], [0.3, 0.2]], dtype=torch.float64)
    groups, weights = torch.tensor([0, 0, 1, 2]), torch.tensor([3.0, 1.0])
    assert reward_decoupled_advantages(values.nansum(1), values, weights, groups).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match=r"must be \[N, K\] for 4 samples and 2 weights, not \[4, 3\]"):
        reward_decoupled_advantages(values.nansum(1), torch.ones(4, 3), weights, groups)


def test_steps_and_functions_are_not_normalised_both() -> None:
    with pytest.raises(ConfigError, match="normalize_then_sum those of functions for whole completions; leave one of"):
        GRPO(multi_objective_aggregation="normalize_then_sum", token_level=True)
