"""Weights of 8 bits: numbers by hand, the compiled operators against PyTorch's to the bit, and rows by themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.compat import native
from hybrid_rl.models.int8.rounding import Int8Weight, linear_torch, round_torch

compiled = pytest.mark.skipif(native.operator("int8_linear") is None, reason="the compiled extension is not built")


def test_a_weight_by_hand() -> None:
    weight = torch.tensor([[1.27, -0.635, 0.014], [0.0, 0.0, 0.0], [-254.0, 3.0, 1.0]])
    rounded = Int8Weight.of(weight)
    assert rounded.values.tolist() == [[127, -64, 1], [0, 0, 0], [-127, 2, 0]]  # 1.5 and 0.5 go to the even one
    assert rounded.scales.tolist() == pytest.approx([0.01, 0.0, 2.0])
    assert rounded.as_float()[2].tolist() == [-254.0, 4.0, 0.0]
    assert rounded.num_bytes == 9 + 3 * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(value: float) -> None:
    weight = torch.ones(3, 8)
    weight[1, 4] = value
    out = Int8Weight.of(weight).linear(torch.ones(2, 8))
    assert out[:, 1].isnan().all() and out[:, [0, 2]].tolist() == [[8.0, 8.0], [8.0, 8.0]]
    rows = torch.ones(2, 8)
    rows[0, 3] = value
    out = Int8Weight.of(torch.ones(3, 8)).linear(rows)
    assert out[0].isnan().all() and out[1].tolist() == [8.0, 8.0, 8.0]


@compiled
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 130),
    st.integers(1, 40),
    st.integers(0, 1000),
    st.sampled_from([1e-20, 1.0, 1e20]),
)
def test_the_compiled_operators_give_the_bits_of_pytorch(m: int, k: int, n: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, rows = torch.randn(n, k, generator=generator), torch.randn(m, k, generator=generator) * size
    bias = torch.randn(n, generator=generator)
    values, scales = torch.empty(n, k, dtype=torch.int8), torch.empty(n)
    round_torch(weight, values, scales)
    rounded = Int8Weight.of(weight)
    assert torch.equal(rounded.values, values) and torch.equal(rounded.scales, scales)
    assert torch.equal(rounded.linear(rows, bias), linear_torch(rows, values, scales, bias))
    assert torch.equal(rounded.linear(rows), linear_torch(rows, values, scales, None))


@compiled
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("m", "k", "n"), [(64, 700, 301), (1, 4864, 897)])
def test_many_blocks_and_threads_give_the_bits_of_pytorch(m: int, k: int, n: int, threads: int) -> None:
    """Tasks of several blocks of columns, and columns that no tile divides."""
    weight, rows = torch.randn(n, k), torch.randn(m, k)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rounded = Int8Weight.of(weight)
        products = rounded.linear(rows)
    finally:
        torch.set_num_threads(before)
    values, scales = torch.empty(n, k, dtype=torch.int8), torch.empty(n)
    round_torch(weight, values, scales)
    assert torch.equal(rounded.values, values) and torch.equal(rounded.scales, scales)
    assert torch.equal(products, linear_torch(rows, values, scales, None))


@compiled
@pytest.mark.parametrize("size", [1e-38, 1e-43, 1e-44])
def test_rows_of_the_smallest_numbers_are_those_of_pytorch(size: float) -> None:
    weight = torch.randn(5, 30) * size
    values, scales = torch.empty(5, 30, dtype=torch.int8), torch.empty(5)
    round_torch(weight, values, scales)
    rounded = Int8Weight.of(weight)
    assert torch.equal(rounded.values, values) and torch.equal(rounded.scales, scales)


@compiled
def test_sums_of_the_largest_numbers_do_not_overflow() -> None:
    """4,864 columns of the same sign: the exact product is 4864 * 127 * 3, whatever integers stand for it."""
    rounded = Int8Weight.of(torch.full((5, 4864), 127.0))
    assert rounded.linear(torch.full((2, 4864), 3.0)).tolist() == [[4864 * 127.0 * 3] * 5] * 2


@compiled
def test_a_row_is_the_same_to_the_bit_among_others_and_with_more_threads() -> None:
    rounded, rows = Int8Weight.of(torch.randn(301, 700)), torch.randn(64, 700)
    together = rounded.linear(rows)
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        assert torch.equal(rounded.linear(rows), together)
    finally:
        torch.set_num_threads(before)
    for row in (0, 17, 63):
        assert torch.equal(rounded.linear(rows[row : row + 1])[0], together[row])


def test_the_error_of_a_product_is_that_of_the_weights() -> None:
    """Against float64: rounding errors of weights are uniform over a unit, so the outputs' have the variance
    K * scale^2 / 12 for rows of variance 1; what the rows are rounded by is a hundredth of it at most."""
    torch.manual_seed(0)
    weight, rows = torch.randn(256, 512), torch.randn(64, 512)
    rounded = Int8Weight.of(weight)
    error = rounded.linear(rows).double() - rows.double() @ weight.double().T
    expected = (512 * rounded.scales.double().square() / 12).mean().sqrt()
    assert float(error.square().mean().sqrt()) == pytest.approx(float(expected), rel=0.03)
    of_rows = rounded.linear(rows).double() - rows.double() @ rounded.as_float().double().T
    assert of_rows.square().mean() < 1e-4 * error.square().mean()


def test_bfloat16_rows_give_bfloat16_and_batches_of_any_shape() -> None:
    weight, rows = torch.randn(3, 8), torch.randn(2, 4, 8).bfloat16()
    rounded = Int8Weight.of(weight.bfloat16())
    out = rounded.linear(rows)
    assert out.dtype == torch.bfloat16 and out.shape == (2, 4, 3)
    assert torch.equal(out, rounded.linear(rows.float()).bfloat16())
    assert torch.equal(rounded.scales, Int8Weight.of(weight.bfloat16().float()).scales)
