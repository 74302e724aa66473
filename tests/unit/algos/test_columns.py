"""Columns are checked by name; a masked ratio is 1 with no gradient; a ratio too large for a float ends at e^20."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos import LossInputs, PolicyLoss
from hybrid_rl.algos.columns import (
    MAX_LOG_RATIO,
    at_least_float32,
    bounded,
    check_ascending,
    check_columns,
    check_rewards,
    masked_log_ratio,
    ratio_of,
)

ON = torch.tensor([True, True, False])


@pytest.mark.parametrize("shape", [(2,), (3, 1), ()])
def test_columns_must_all_be_one_number_per_token(shape: tuple[int, ...]) -> None:
    check_columns(logprobs=torch.zeros(3), mask=ON)
    with pytest.raises(ValueError, match=r"logprobs, mask must all be \[T\], one number per token, not .*'mask'"):
        check_columns(logprobs=torch.zeros(3), mask=torch.zeros(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        check_columns(logprobs=torch.zeros(3, 2), values=torch.zeros(3, 2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_as_tokenizers_give_it_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"mask must be bool, not torch.*; give mask.bool\(\)"):
        check_columns(logprobs=torch.zeros(3), mask=ON.to(dtype))
    with pytest.raises(ValueError, match="mask must be bool"):
        loss_inputs(mask=ON.to(dtype))


def test_rows_are_numbers_of_samples() -> None:
    with pytest.raises(ValueError, match="rows must be int64, .* not torch.int32"):
        loss_inputs(rows=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="rows must be numbers of samples, from 0, but one is -1"):
        loss_inputs(rows=torch.tensor([0, -1, 0]))
    check_ascending(torch.tensor([0, 0, 2]), 3)
    for rows in ([1, 0, 2], [0, 1, 3], [-1, 0, 1]):
        with pytest.raises(ValueError, match=r"rows must ascend within 0\.\.2"):
            check_ascending(torch.tensor(rows), 3)


def test_rewards_are_numbers_or_not_there() -> None:
    check_rewards(rewards=torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="rewards has -inf at sample 1, .* NaN for a sample that could not be scored"):
        check_rewards(rewards=torch.tensor([1.0, -math.inf]))
    with pytest.raises(ValueError, match=r"rewards must be \[N\]"):
        check_rewards(rewards=torch.zeros(2, 1))


def loss_inputs(**changes: torch.Tensor) -> LossInputs:
    names = ("logprobs", "old_logprobs", "advantages", "entropy", "rollout_logprobs")
    columns = {name: torch.zeros(3) for name in names} | {"mask": ON, "rows": torch.zeros(3, dtype=torch.int64)}
    return LossInputs(**{**columns, **changes}, num_rows=1)


def test_a_masked_ratio_is_one() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-3.0, -1e6], requires_grad=True)
    log_ratio = masked_log_ratio(logprobs, old, torch.tensor([True, False]))
    assert log_ratio.tolist() == [2.0, 0.0]
    ratio_of(log_ratio).sum().backward()
    assert logprobs.grad is not None and old.grad is None
    assert logprobs.grad.tolist() == pytest.approx([7.389056, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [-math.inf, -100.0, 0.0, 3.0, 19.5, 20.0, 20.5, 88.8, 100.0, 1e30, math.inf])
def test_the_ratio_ends_at_e_to_the_20_in_value_and_slope(log_ratio: float, dtype: torch.dtype) -> None:
    value = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    ratio = ratio_of(value)
    ratio.backward()
    assert value.grad is not None
    expected = math.exp(min(log_ratio, MAX_LOG_RATIO))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert ratio.item() == pytest.approx(expected, rel=tolerance)
    assert value.grad.item() == pytest.approx(expected, rel=tolerance)


def test_below_the_bound_it_is_exp_to_the_last_bit() -> None:
    log_ratio = torch.linspace(-30, 20, 1001)
    assert torch.equal(ratio_of(log_ratio), log_ratio.exp())
    assert bounded(torch.tensor([math.nan])).isnan().all()


def test_half_precision_is_widened() -> None:
    assert at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert at_least_float32(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    assert at_least_float32(torch.zeros(1, dtype=torch.int64)).dtype == torch.int64


def test_nothing_is_clipped() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = PolicyLoss.unclipped(torch.tensor([3.0, 4.0]), weight, {"x": torch.zeros(2)})
    assert not loss.clipped_low.any() and not loss.clipped_high.any() and not loss.ratio.requires_grad
    assert loss.weight is weight and set(loss.metrics) == {"x"}
