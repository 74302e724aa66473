"""Of every estimator that is registered: rewards to 1e300, logprobs that only a broken run has and anything at masked
tokens give finite advantages, which are right; what cannot be right is refused with its value."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import ADVANTAGES, AdvantageEstimator, AdvantageInputs
from hybrid_rl.algos.advantages.group_rewards import GroupEstimator
from tests.unit.algos.variants import variants
from tests.unit.algos.wild import Draw, seeds, spoiled, two_policies

ESTIMATORS: dict[str, AdvantageEstimator] = variants(ADVANTAGES)
SIZES = torch.tensor([0, 1e-300, 1e-6, 0.5, 1, -1, 3, 1e6, -1e30, 1e154, -1e155, 1e300, -1e300], dtype=torch.float64)
NUM_SAMPLES = 12


def wild_inputs(seed: int, dtype: torch.dtype, *, negative: bool) -> AdvantageInputs:
    """Two groups of six, one sample in ten unscored, some rewards at tokens; anything at masked tokens."""
    draw = Draw(seed)
    rows = torch.repeat_interleave(torch.arange(NUM_SAMPLES), draw.integers(1, 7, NUM_SAMPLES))
    count = len(rows)
    mask = draw.uniform(0, 1, count) < 0.75
    dense = torch.where(mask & (draw.uniform(0, 1, count) < 0.2), draw.of(SIZES, count), 0.0)
    rewards, greedy = draw.of(SIZES, 2, NUM_SAMPLES)
    if not negative:
        dense, rewards = dense.abs(), rewards.abs()
    rewards = rewards.index_add(0, rows, dense)
    rewards[draw.uniform(0, 1, NUM_SAMPLES) < 0.1] = math.nan
    greedy[draw.uniform(0, 1, NUM_SAMPLES) < 0.1] = math.nan
    mine, theirs = two_policies(draw, count)

    def column(values: Tensor) -> Tensor:
        return spoiled(draw, values, mask, dtype)

    return AdvantageInputs(
        rewards=rewards,
        groups=torch.arange(NUM_SAMPLES) // 6,
        rows=rows,
        mask=mask,
        token_rewards=dense,
        rollout_logprobs=column(theirs),
        logprobs=column(mine),
        ref_logprobs=column(theirs),
        teacher_logprobs=column(theirs),
        values=column(draw.of(torch.tensor([0, 1e-6, -3, 1e6, 1e30]).double(), count)),
        sum_pi_squared=column(draw.uniform(0, 1, count)),
        baseline_rewards=greedy,
        function_rewards=draw.of(torch.cat([SIZES, torch.tensor([math.nan])]), NUM_SAMPLES, 3),
        reward_weights=draw.of(torch.tensor([0.0, 1.0, -2.0, 1e6]), 3),
    )


def check(name: str, seed: int, dtype: torch.dtype) -> None:
    estimator = ESTIMATORS[name]
    inputs = wild_inputs(seed, dtype, negative=not name.startswith("maxrl"))  # it refuses them: test_baselines.py
    found = estimator.compute(inputs)
    for column in (found.advantages, found.returns):
        if column is not None:
            assert column.dtype == torch.float64 and column.shape == inputs.rows.shape
            assert column.isfinite().all() and not column[~inputs.mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
@seeds(3, 200)
def test_advantages_are_finite(name: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check(name, seed, dtype)


def plain_inputs() -> AdvantageInputs:
    """Rewards of the order of 1 for a third, 0 for the others, nothing at single tokens; critic and greedy completion
    say 0, the teacher the same of all tokens."""
    draw = Draw(5)
    rows = torch.repeat_interleave(torch.arange(NUM_SAMPLES), draw.integers(1, 7, NUM_SAMPLES))
    zeros = torch.zeros(len(rows)).double()
    logprobs = -draw.uniform(0.1, 2, len(rows))
    rewards = torch.where(torch.arange(NUM_SAMPLES) % 3 == 0, draw.uniform(1, 3, NUM_SAMPLES), 0.0)
    return AdvantageInputs(
        rewards=rewards,
        groups=torch.arange(NUM_SAMPLES) // 6,
        rows=rows,
        mask=torch.ones(len(rows), dtype=torch.bool),
        token_rewards=zeros,
        rollout_logprobs=logprobs,
        logprobs=logprobs,
        ref_logprobs=logprobs,
        teacher_logprobs=logprobs - 0.3,
        values=zeros,
        sum_pi_squared=draw.uniform(0.2, 1, len(rows)),
        baseline_rewards=torch.zeros(NUM_SAMPLES).double(),
        function_rewards=torch.stack([0.25 * rewards, rewards.roll(1)], 1),
        reward_weights=torch.tensor([1.0, 0.5]),
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_large_rewards_are_small_ones_on_another_scale(name: str) -> None:
    """Rewards times 2^20 and times 2^996, some 7e299: the same advantages where they are normalised, else 2^976 times
    as large. The floors under a division are nothing beside 2^20, and a threshold is passed by all or by none."""
    inputs = plain_inputs()
    assert inputs.function_rewards is not None
    larger = [
        dataclasses.replace(
            inputs,
            rewards=torch.ldexp(inputs.rewards, torch.tensor(power)),
            function_rewards=torch.ldexp(inputs.function_rewards, torch.tensor(power)),
        )
        for power in (20, 996)
    ]
    moderate, large = map(ESTIMATORS[name].compute, larger)
    for few, many in ((moderate.advantages, large.advantages), (moderate.returns, large.returns)):
        if few is None or many is None:
            assert few is many
            continue
        scaled = torch.ldexp(few, torch.tensor(976))
        assert few.any() or "pass_k=8" in name, "no group of six can have eight"
        if not few.any():
            assert not many.any()
            continue
        errors = [float((many - expected).abs().max() / expected.abs().max()) for expected in (few, scaled)]
        assert min(errors) < 1e-9, errors


ALIKE = {
    name: estimator
    for name, estimator in ESTIMATORS.items()
    if isinstance(estimator, GroupEstimator) and estimator.is_zero_if_alike
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_group_whose_rewards_are_alike_has_no_advantages(name: str) -> None:
    """Exactly 0, whatever the reward, of groups beside one that is not alike: an update skips their backward pass."""
    for reward in (0.0, 1.0, 0.1, 0.3, 2 / 3):
        rewards = torch.tensor([reward] * 49 + [0.0, 1.0, 0.25, 0.0] + [math.nan] * 2).double()
        groups = torch.tensor([5] * 49 + [1] * 4 + [9] * 2)
        advantages = ALIKE[name].of_samples(rewards, groups)
        assert not advantages[groups != 1].any()


def test_the_estimators_that_teach_by_groups_that_are_alike() -> None:
    others = {name for name, estimator in ESTIMATORS.items() if isinstance(estimator, GroupEstimator)} - set(ALIKE)
    assert {name.partition(" ")[0] for name in others} == {"rejection", "grpo"}
    assert "grpo token_level=True" in others and "grpo" not in others
