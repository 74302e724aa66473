"""Token weights against the means they stand for, and their independence of how a mini-batch is cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import row_mean, row_sum, token_weights
from hybrid_rl.algos.masked import take

MAX_LENGTH = 5
# Four samples of 3, 1, 0 and 4 tokens; the third is empty, all tokens of the second are masked.
ROWS = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3])
MASK = torch.tensor([True, False, True, False, True, True, True, False])
VALUES = torch.tensor([1.0, 100.0, 3.0, 1000.0, 2.0, 4.0, 9.0, 1e4])
LOSS_TYPES = ["dapo", "grpo", "dr_grpo", "sequence_sum"]


@pytest.mark.parametrize(
    ("shape", "num_taken"), [((8,), 100_000), ((1500, 576), 1200)], ids=["a number of a sample", "hidden states"]
)
def test_the_gradient_of_what_is_taken_often_has_the_same_bits_every_time(
    shape: tuple[int, ...], num_taken: int
) -> None:
    """With several threads: all tokens of a sample take its number, all completions their prompt's last place."""
    values, rows = torch.randn(shape, requires_grad=True), torch.randint(0, 8, (num_taken,))
    weights, num_threads = torch.randn(num_taken, *shape[1:]), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = (torch.autograd.grad((take(values, rows) * weights).sum(), values)[0] for _ in range(20))
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(first, other) for other in others)


def weights(mask: Tensor, rows: Tensor, num_rows: int, loss_type: str) -> Tensor:
    """With the counts of the whole mini-batch, whatever part of it the arguments are."""
    return token_weights(
        mask,
        rows,
        num_rows,
        loss_type,
        num_tokens=int(MASK.sum()),
        num_trajectories=4,
        max_completion_length=MAX_LENGTH,
    )


@pytest.mark.parametrize(
    ("loss_type", "mean"),
    [
        ("dapo", (1 + 3 + 2 + 4 + 9) / 5),
        ("grpo", ((1 + 3) / 2 + 0 + 0 + (2 + 4 + 9) / 3) / 4),
        ("dr_grpo", (1 + 3 + 2 + 4 + 9) / (4 * MAX_LENGTH)),
        ("sequence_sum", ((1 + 3) + 0 + 0 + (2 + 4 + 9)) / 4),
    ],
)
def test_weights_make_the_written_out_mean(loss_type: str, mean: float) -> None:
    result = weights(MASK, ROWS, 4, loss_type)
    assert result.dtype == torch.float32 and not result[~MASK].any()
    assert float((result * VALUES)[MASK].sum()) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("cut", [[[0], [1], [2], [3]], [[3, 1], [0, 2]], [[2, 0, 1, 3]]])
def test_cutting_changes_no_weight(loss_type: str, cut: list[list[int]]) -> None:
    """Bit for bit: every sample whole, in any order, in any micro-batch."""
    whole = weights(MASK, ROWS, 4, loss_type)
    for part in cut:
        places = torch.cat([torch.where(row == ROWS)[0] for row in part])
        rows = torch.cat([torch.full_like(torch.where(row == ROWS)[0], i) for i, row in enumerate(part)])
        assert torch.equal(weights(MASK[places], rows, len(part), loss_type), whole[places])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_learn_from_is_zero_not_nan(loss_type: str) -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    result = token_weights(
        nothing, torch.tensor([0, 0, 1]), 2, loss_type, num_tokens=0, num_trajectories=0, max_completion_length=4
    )
    assert result.tolist() == [0.0] * 3


def test_unknown_loss_type() -> None:
    with pytest.raises(ValueError, match="'bnpo' is unknown; use dapo, grpo, dr_grpo or sequence_sum"):
        weights(MASK, ROWS, 4, "bnpo")


def test_row_sum_and_mean_by_hand() -> None:
    assert row_sum(VALUES[:4], ROWS[:4], 3).tolist() == [104.0, 1000.0, 0.0]
    assert row_mean(VALUES, MASK, ROWS, 4).tolist() == [2.0, 0.0, 0.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_sums_of_short_floats_do_not_stand_still(dtype: torch.dtype) -> None:
    """In bfloat16 256 + 1 is 256: 1024 times .01 would have the mean .0156, and the sum of 4096 numbers be 256."""
    rows = torch.zeros(4096, dtype=torch.int64)
    values = torch.rand(4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = values.double().sum().item()
    assert row_sum(values, rows, 1).dtype == torch.float32
    assert row_sum(values, rows, 1).item() == pytest.approx(exact, rel=1e-5) and exact > 2000
    hundredths = torch.full((1024,), 0.01, dtype=dtype)
    assert row_mean(hundredths, rows[:1024] == 0, rows[:1024], 1).item() == pytest.approx(0.01, rel=5e-3)
    counts = torch.full((4096,), 1, dtype=torch.int64)
    assert row_sum(counts, rows, 1).tolist() == [4096]


@pytest.mark.parametrize("wild", [math.nan, math.inf])
def test_masked_values_do_not_count_at_all(wild: float) -> None:
    values = torch.where(MASK, VALUES, wild).requires_grad_()
    row_mean(values, MASK, ROWS, 4).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([1 / 2, 0, 1 / 2, 0, 1 / 3, 1 / 3, 1 / 3, 0])
