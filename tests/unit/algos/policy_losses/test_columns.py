"""Shapes are checked by name, and a masked ratio is 1 with no gradient."""

from __future__ import annotations

import pytest
import torch

from hybrid_rl.algos.policy_losses.columns import check_columns, masked_log_ratio, unclipped


@pytest.mark.parametrize("shape", [(2,), (3, 1), ()])
def test_columns_must_all_be_one_number_per_token(shape: tuple[int, ...]) -> None:
    check_columns(logprobs=torch.zeros(3), mask=torch.zeros(3))
    with pytest.raises(ValueError, match=r"logprobs, mask must all be \[T\], one number per token, not .*'mask'"):
        check_columns(logprobs=torch.zeros(3), mask=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        check_columns(logprobs=torch.zeros(3, 2), mask=torch.zeros(3, 2))


def test_a_masked_ratio_is_one() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-3.0, -1e6], requires_grad=True)
    log_ratio = masked_log_ratio(logprobs, old, torch.tensor([True, False]))
    assert log_ratio.tolist() == [2.0, 0.0]
    log_ratio.exp().sum().backward()
    assert logprobs.grad is not None and old.grad is None
    assert logprobs.grad.tolist() == pytest.approx([7.389056, 0.0])


def test_nothing_is_clipped() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = unclipped(torch.tensor([3.0, 4.0]), weight, {"x": torch.zeros(2)})
    assert not loss.clipped_low.any() and not loss.clipped_high.any() and not loss.ratio.requires_grad
    assert loss.weight is weight and set(loss.metrics) == {"x"}
