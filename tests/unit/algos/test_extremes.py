"""Of every loss, correction and KL estimate that is registered: what only a broken run gives makes no NaN and no
infinity, in the result and in the gradient, and a token that is clipped has none at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import CORRECTIONS, POLICY_LOSSES, CorrectionInputs, PolicyObjective, kl_estimate
from hybrid_rl.algos.kl import ESTIMATORS, exact_kl, kl_reward
from hybrid_rl.algos.policy_losses.clip import Clip
from hybrid_rl.algos.value_losses import clipped_value_loss, value_clipped
from tests.unit.algos.variants import records, variants
from tests.unit.algos.wild import GAPS, Draw, rows_and_mask, seeds, spoiled, two_policies, wild_inputs

DTYPES = (torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.sweep))
LOSSES, WEIGHTS = variants(POLICY_LOSSES), variants(CORRECTIONS)


def assert_finite(what: str, column: Tensor) -> None:
    assert column.isfinite().all(), f"{what}: {column[~column.isfinite()][:3].tolist()}"


def gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def check_loss(name: str, seed: int, dtype: torch.dtype) -> None:
    record = LOSSES[name]
    inputs, leaves = wild_inputs(record, seed, dtype)
    loss, mask = record.loss(inputs), inputs.mask
    assert_finite("loss", loss.per_token[mask])
    assert_finite("weight", loss.weight[mask])
    of_logprobs, of_whole, of_parameters = gradients(torch.where(mask, loss.per_token, 0).sum(), leaves)
    for what, gradient in (("gradient", of_logprobs), ("of the vocabulary", of_whole), ("learned", of_parameters)):
        assert_finite(what, gradient)
    stopped = mask & (loss.clipped_low | loss.clipped_high)
    for gradient in (of_logprobs, of_whole):
        assert not gradient[~mask].any() and not gradient[stopped].any()
    # A KL in the loss is multiplied by the weight, with its gradient.
    assert_finite("gradient of the weight", gradients(torch.where(mask, loss.weight, 0).sum(), leaves)[1])
    for what, column in loss.metrics.items():
        # A divergence may be infinite: it is compared, nothing is computed from it.
        assert not column[mask].isnan().any() if what == "divergence/mean" else column[mask].isfinite().all(), what


def check_correction(name: str, seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed)
    rows, mask = rows_and_mask(draw)
    mine, theirs = two_policies(draw, len(rows))
    # Both certain that a token that was sampled cannot be: a ratio that is no number.
    none = (draw.uniform(0, 1, len(rows)) < 0.1) & mask
    mine, theirs = (torch.where(none, -math.inf, column) for column in (mine, theirs))
    columns = [spoiled(draw, column, mask, dtype) for column in (mine, theirs)]
    found = WEIGHTS[name].weigh(CorrectionInputs(*columns, mask, rows, 6, draw.integers(0, 3, len(rows))))
    assert found.weights.dtype == dtype
    assert_finite("weights", found.weights)
    assert (found.weights >= 0).all() and not found.weights[~mask].any() and not found.weights[found.rejected].any()
    assert not (found.rejected & ~mask).any() and not (found.rejected & found.truncated).any()
    if WEIGHTS[name].is_active:
        assert found.rejected[none].all()


def check_kl(estimator: str, seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed)
    mine, theirs = (column.to(dtype) for column in two_policies(draw, 40))
    mine.requires_grad_()
    estimate = kl_estimate(mine, theirs, estimator)
    assert_finite("estimate", estimate)
    assert estimator == "k1" or bool((estimate >= 0).all())
    assert_finite("gradient", gradients(estimate.sum(), [mine])[0])
    mask = draw.uniform(0, 1, 40) < 0.75
    columns = [spoiled(draw, column.detach(), mask, dtype) for column in (mine, theirs)]
    reward = kl_reward(*columns, mask, 0.1, estimator)
    assert_finite("reward", reward)
    assert not reward[~mask].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
@seeds(2, 100)
def test_losses(name: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check_loss(name, seed, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, record in WEIGHTS.items() if record.is_active])
@seeds(3, 100)
def test_corrections(name: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check_correction(name, seed, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@seeds(5, 500)
def test_kl_estimates(estimator: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check_kl(estimator, seed, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@seeds(5)
def test_exact_kl(dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check_exact_kl(seed, dtype)


def check_exact_kl(seed: int, dtype: torch.dtype) -> None:
    """Distributions of which some entries are impossible, rows of anything where masked."""
    draw = Draw(seed)
    mask = draw.uniform(0, 1, 20) < 0.75
    logits = draw.of(GAPS, 2, 20, 8)
    logits[:, :, 3] = -math.inf
    mine, theirs = (spoiled(draw, column.log_softmax(1), mask, dtype) for column in logits)
    mine.requires_grad_()
    kl = exact_kl(mine, theirs, mask)
    gradient = gradients(kl.sum(), [mine])[0]
    assert_finite("kl", kl)
    assert_finite("gradient", gradient)
    assert not kl[~mask].any() and not gradient[~mask].any()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@seeds(5)
def test_value_loss(clip: float | None, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check_value_loss(clip, seed, dtype)


def check_value_loss(clip: float | None, seed: int, dtype: torch.dtype) -> None:
    """Of values and returns up to 1e12, beyond which advantages are refused."""
    draw = Draw(seed)
    sizes = torch.tensor([0, 1e-6, -0.1, 0.1, 1, -3, 1e6, 1e12, -1e12]).double()
    values, old, returns = draw.of(sizes, 3, 60).to(dtype)
    values.requires_grad_()
    loss, stopped = clipped_value_loss(values, old, returns, clip), value_clipped(values, old, returns, clip)
    gradient = gradients(loss.sum(), [values])[0]
    assert_finite("loss", loss)
    assert_finite("gradient", gradient)
    assert not gradient[stopped].any() and bool(stopped.any()) == (clip is not None)


@seeds(30)
@pytest.mark.parametrize("name", [name for name, record in LOSSES.items() if record.follows_advantages])
def test_without_advantages_there_is_no_gradient(name: str, seeds: range) -> None:
    """Of a loss that says so: its update computes such samples without a backward pass."""
    for seed in seeds:
        inputs, leaves = wild_inputs(LOSSES[name], seed, torch.float64)
        still = inputs.mask & (inputs.advantages == 0)
        loss = LOSSES[name].loss(inputs).per_token
        assert not any(gradient.any() for gradient in gradients(torch.where(still, loss, 0).sum(), leaves)), seed


def test_the_losses_that_learn_without_advantages() -> None:
    """KL-Cov pays a penalty at tokens of any advantage, lambda-GRPO learns a number besides the model."""
    others = {record for record in records(POLICY_LOSSES).values() if not record.follows_advantages}
    assert {record.__name__ for record in others} == {"KLCov", "LambdaGRPO"}


def test_a_loss_of_a_users_own_says_it_again() -> None:
    """Whatever it changes: a method that `loss` calls, or a class beside the library's, may have brought a term."""

    class Penalty(PolicyObjective):
        pass

    class Mixed(Penalty, Clip):
        pass

    class Says(Clip):
        follows_advantages = True

    assert Clip.follows_advantages and Says.follows_advantages
    assert not Mixed.follows_advantages and not Penalty.follows_advantages
