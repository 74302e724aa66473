"""What every estimator owes: the same numbers however samples lie, and nothing from what it must not see."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import ADVANTAGES, AdvantageEstimator, AdvantageInputs
from hybrid_rl.algos.advantages import (
    GAE,
    GPG,
    GRPO,
    Distillation,
    MaxOfGroup,
    PassAtK,
    ReinforcePlusPlus,
    Rejection,
    VTrace,
)
from tests.unit.algos.advantages.ranks import on_ranks
from tests.unit.algos.variants import records

VARIANTS: list[AdvantageEstimator] = [
    *(record() for record in records(ADVANTAGES).values()),
    *(GRPO(scale_rewards=scale) for scale in ("batch", "mad", "none")),
    *(GRPO(scale_rewards=scale, token_level=True) for scale in ("group", "batch", "mad", "none")),
    GPG(scale_rewards="group"),
    PassAtK(pass_k=2, success_threshold=0.5),
    MaxOfGroup(scale_rewards="group"),
    GAE(gamma=0.9, lam=0.5, whiten_advantages=False),
    ReinforcePlusPlus(gamma=0.9),
    VTrace(gamma=0.9, lam=0.9, rho_clip=2.0),
    Distillation(group_advantage_coef=0.5),
    Rejection(reward_threshold=0.5, num_best=None),
    Rejection(reward_threshold=0.2, num_best=2),
]
NUM_SAMPLES = 24
PER_TOKEN = ("rollout_logprobs", "logprobs", "ref_logprobs", "teacher_logprobs", "values", "sum_pi_squared")


def batch() -> AdvantageInputs:
    """Four groups of five and one of four, ragged; sample 2 is not scored, sample 8 has no greedy reward, sample 11 no
    token of the policy. Rewards all differ, so that no tie depends on order, and no sum on rounding."""
    generator = torch.Generator().manual_seed(3)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    lengths = torch.randint(1, 9, (NUM_SAMPLES,), generator=generator)
    rows = torch.repeat_interleave(torch.arange(NUM_SAMPLES), lengths)
    mask = (uniform(len(rows)) < 0.8) & (rows != 11)
    tokens = torch.where((uniform(len(rows)) < 0.3) & mask, 0.25 * uniform(len(rows)), 0.0)
    rewards = uniform(NUM_SAMPLES).index_add(0, rows, tokens)
    rewards[2] = math.nan
    greedy = uniform(NUM_SAMPLES)
    greedy[8] = math.nan
    logprobs = {name: -uniform(len(rows)) for name in PER_TOKEN if name.endswith("logprobs")}
    return AdvantageInputs(
        rewards=rewards,
        groups=torch.arange(NUM_SAMPLES) // 5 * 7 - 3,
        rows=rows,
        mask=mask,
        token_rewards=tokens,
        values=uniform(len(rows)),
        sum_pi_squared=uniform(len(rows)),
        baseline_rewards=greedy,
        **logprobs,
    )


def select(inputs: AdvantageInputs, samples: list[int], **changes: object) -> tuple[AdvantageInputs, Tensor]:
    """These samples in this order, and where their tokens lay."""
    tokens = torch.cat([torch.nonzero(inputs.rows == sample)[:, 0] for sample in samples])
    where = torch.empty(NUM_SAMPLES, dtype=torch.int64)
    where[samples] = torch.arange(len(samples))
    columns: dict[str, object] = {name: getattr(inputs, name)[tokens] for name in (*PER_TOKEN, "mask", "token_rewards")}
    columns |= {name: getattr(inputs, name)[samples] for name in ("rewards", "groups", "baseline_rewards")}
    return dataclasses.replace(inputs, **columns, rows=where[inputs.rows[tokens]], **changes), tokens  # type: ignore[arg-type]


def numbers(estimator: AdvantageEstimator, inputs: AdvantageInputs) -> Tensor:
    """Advantages and returns, [2, T]."""
    found = estimator.compute(inputs)
    returns = torch.zeros_like(found.advantages) if found.returns is None else found.returns
    assert (found.returns is not None) == ("values" in estimator.needs)
    assert found.advantages.dtype == returns.dtype == torch.float64
    return torch.stack([found.advantages, returns])


@pytest.mark.parametrize("estimator", VARIANTS, ids=repr)
def test_order_of_samples_does_not_matter(estimator: AdvantageEstimator) -> None:
    inputs = batch()
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled, tokens = select(inputs, order)
    expected = numbers(estimator, inputs)
    assert bool((expected[0] != 0).any())
    torch.testing.assert_close(numbers(estimator, shuffled), expected[:, tokens], rtol=0, atol=1e-10)


@pytest.mark.parametrize("estimator", VARIANTS, ids=repr)
def test_ranks_do_not_matter(estimator: AdvantageEstimator) -> None:
    """Whole groups on three ranks, one of which has none."""
    inputs = batch()
    parts = [list(range(15)), [], list(range(15, NUM_SAMPLES))]

    def work(rank: int, gather: object) -> Tensor:
        mine = [i for i in range(NUM_SAMPLES) if i in parts[rank]]
        if not mine:
            empty = {name: getattr(inputs, name)[:0] for name in (*PER_TOKEN, "mask", "token_rewards", "rows")}
            empty |= {name: getattr(inputs, name)[:0] for name in ("rewards", "groups", "baseline_rewards")}
            return numbers(estimator, dataclasses.replace(inputs, **empty, gather=gather, rank=rank))  # type: ignore[arg-type]
        return numbers(estimator, select(inputs, mine, gather=gather, rank=rank)[0])

    found = torch.cat(on_ranks(3, work), dim=1)
    torch.testing.assert_close(found, numbers(estimator, inputs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("estimator", VARIANTS, ids=repr)
def test_masked_and_unscored_are_zero_and_unseen(estimator: AdvantageEstimator) -> None:
    """NaN in every column at tokens of the environment changes nothing."""
    inputs = batch()
    expected = numbers(estimator, inputs)
    assert bool(expected.isfinite().all()) and bool((expected[:, ~inputs.mask] == 0).all())
    if estimator.needs_rewards and not isinstance(estimator, Distillation):
        assert bool((expected[0, inputs.rows == 2] == 0).all())
    spoiled = {name: torch.where(inputs.mask, getattr(inputs, name), math.nan) for name in PER_TOKEN}
    found = numbers(estimator, dataclasses.replace(inputs, **spoiled))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("estimator", VARIANTS, ids=repr)
def test_only_what_it_needs(estimator: AdvantageEstimator) -> None:
    """Columns outside `needs` may be missing."""
    inputs = batch()
    missing = {name: None for name in (*PER_TOKEN, "baseline_rewards") if name not in estimator.needs}
    found = numbers(estimator, dataclasses.replace(inputs, **missing))  # type: ignore[arg-type]
    assert torch.equal(found, numbers(estimator, inputs))
