"""What a reduction in the forward pass does to gradients, with numbers worked out by hand; and what we do instead."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow


def slopes(rank: int, num_ranks: int) -> dict[str, float]:
    """d/dw of the sum over ranks of x_r * w with x = 1, 2, 3, 4, whose true value is 10, after gradients of ranks are
    summed or averaged."""
    found = {}

    def gradient(loss: torch.Tensor, weight: torch.Tensor, reduction: str) -> float:
        loss.backward()
        assert weight.grad is not None
        total = weight.grad.clone()
        dist.all_reduce(total)
        return float(total) / (num_ranks if reduction == "mean" else 1)

    for reduction in ("sum", "mean"):
        weight = torch.ones((), requires_grad=True)
        value = (rank + 1) * weight
        with torch.no_grad():  # the value of the sum, the gradient of this rank's part
            total = value.clone()
            dist.all_reduce(total)
        found[f"raw, {reduction}"] = gradient(value + (total - value.detach()), weight, reduction)
        weight = torch.ones((), requires_grad=True)
        found[f"differentiable, {reduction}"] = gradient(all_reduce((rank + 1) * weight), weight, reduction)
    weight = torch.ones((), requires_grad=True)
    count = torch.tensor(rank + 1.0)  # ours: counts are reduced before, losses never; gradients are summed
    dist.all_reduce(count)
    found["ours"] = gradient((rank + 1) * weight / count, weight, "sum") * float(count)
    return found


def test_either_reduction_is_right_with_the_matching_sum_of_gradients_only() -> None:
    for found in run_ranks(slopes, 4):
        assert found == {
            "raw, sum": 10.0,
            "raw, mean": 2.5,
            "differentiable, sum": 40.0,
            "differentiable, mean": 10.0,
            "ours": 10.0,
        }
