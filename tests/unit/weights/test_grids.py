"""Grids of quantised weights: numbers by hand, rows of several ranks, and what a grid cannot hold."""

import pytest
import torch

from hybrid_rl.errors import ConfigError
from hybrid_rl.weights.grids import FP4_VALUES, GRIDS, grid_weights, joined_names
from tests.support.tiny import build_model
from tests.unit.models.families import build


def quantised(name, weight, dtype=torch.float32):
    grid = GRIDS[name]
    return grid.quantise(weight, grid.maxima(weight), dtype)


def weights(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_fp8_by_hand():
    """amax 7 / 448 = 1/64: the values are 64 w, of which e4m3 keeps four bits: 34 lies between 32 and 36."""
    parts = quantised("fp8", torch.tensor([[7.0, -0.5], [34 / 64, 0.0]]))
    assert parts["weight_scale"].tolist() == [1 / 64]
    assert parts["weight"].float().tolist() == [[448.0, -32.0], [32.0, 0.0]]
    assert GRIDS["fp8"].dequantise(parts).tolist() == [[7.0, -0.5], [0.5, 0.0]]


def test_int4_by_hand():
    """The scale is that of the side that needs more: 7 x 0.5 = 3.5 up, 8 x 0.5 = 4 down."""
    row = torch.zeros(1, 32)
    row[0, :4] = torch.tensor([3.5, -4.0, 0.74, 0.26])
    parts = quantised("int4", row)
    assert parts["weight_scale"].tolist() == [[0.5]]
    # Codes 15, 0, 9 and 9 (0.74 and 0.26 round to one half), the others 8.
    assert parts["weight_packed"][0].tolist() == [int("0x888899" + "0f", 16) - (1 << 32), *[0x88888888 - (1 << 32)] * 3]
    assert GRIDS["int4"].dequantise(parts)[0, :5].tolist() == [3.5, -4.0, 0.5, 0.5, 0.0]


def test_int4_divides_by_the_scale_that_the_engine_has():
    """In bfloat16 a scale of 1 + 2^-9 becomes 1: 3.5 x (1 + 2^-9) is then above the tie, and rounds up."""
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 1] = 7 * (1 + 2**-9), 2.5 * (1 + 2**-9)
    for dtype, code in ((torch.float32, 2), (torch.bfloat16, 3)):
        parts = quantised("int4", row, dtype)
        assert parts["weight_scale"].dtype == dtype
        assert int(parts["weight_packed"][0, 0]) >> 4 & 15 == 8 + code


def test_nvfp4_by_hand():
    """amax 6 makes the scale of all 448; a block with amax 6 has the scale 448, one with 3 has 224, one of zeros 0."""
    row = torch.zeros(1, 48)
    row[0, :7] = torch.tensor([6.0, -0.5, 0.25, 0.75, 2.5, 5.0, -1.75])
    row[0, 16:18] = torch.tensor([3.0, -1.25])
    parts = quantised("nvfp4", row)
    assert parts["weight_global_scale"].tolist() == [448.0]
    assert parts["weight_scale"].float().tolist() == [[448.0, 224.0, 0.0]]
    values = GRIDS["nvfp4"].dequantise(parts)
    # A tie goes to the value whose number is even.
    assert values[0, :8].tolist() == [6.0, -0.5, 0.0, 1.0, 2.0, 4.0, -2.0, 0.0]
    assert values[0, 16:18].tolist() == [3.0, -1.0]  # -1.25 / 0.5 = -2.5, between -2 and -3
    assert parts["weight_packed"][0, :4].tolist() == [0x97, 0x20, 0x64, 0x0C]


@pytest.mark.parametrize("name", GRIDS)
def test_rows_of_several_ranks_are_those_of_the_whole_weight(name):
    """Ranks that hold some rows each, at any cut, need no more than the largest values of all."""
    whole, grid = weights(300, 160), GRIDS[name]
    expected = quantised(name, whole)
    maxima = torch.zeros(grid.num_blocks(whole.shape))
    cuts = [0, 1, 100, 100, 257, 300]
    boxes = list(zip(cuts, cuts[1:], strict=False))
    for low, high in boxes:
        own = grid.maxima(whole[low:high], low)
        first = low // grid.block[0] if grid.block else 0
        part = maxima[first : first + len(own)]
        torch.maximum(part, own, out=part)
    assert torch.equal(maxima, grid.maxima(whole))
    for suffix, part in grid.parts(whole.shape, torch.float32).items():
        made = [grid.quantise(whole[a:b], maxima, torch.float32, a).get(suffix) for a, b in boxes]
        if made[0] is None:
            assert suffix == "weight_shape"
            continue
        result = made[0] if part.per_element is None else torch.cat(made)
        assert (result.dtype, tuple(result.shape)) == (part.dtype, part.shape)
        assert torch.equal(result.view(torch.uint8), expected[suffix].view(torch.uint8))


@pytest.mark.parametrize(("name", "step"), [("fp8", 2**-4), ("fp8_block", 2**-4), ("int4", None), ("nvfp4", None)])
def test_no_weight_is_further_from_its_own_than_half_a_step(name, step):
    whole, grid = weights(140, 192), GRIDS[name]
    off = (grid.dequantise(quantised(name, whole)) - whole).abs()
    if step is not None:
        assert bool((off <= whole.abs() * step + 1e-6).all())
        return
    groups = whole.unflatten(1, (-1, grid.multiple)).abs().amax(-1, keepdim=True)
    # int4: half of amax / 7; nvfp4: half of the widest step, 2 of 6, and the rounding of an e4m3 scale.
    limit = groups / 14 * 1.001 if name == "int4" else groups / 6 * (1 + 2**-4)
    assert bool((off.unflatten(1, (-1, grid.multiple)) <= limit).all())


@pytest.mark.parametrize("name", GRIDS)
def test_what_is_on_the_grid_stays_and_zeros_are_zeros(name):
    grid = GRIDS[name]
    once = grid.dequantise(quantised(name, weights(128, 128)))
    if name != "int4":  # whose groups have another scale if the largest value was rounded down
        assert torch.equal(grid.dequantise(quantised(name, once)), once)
    assert torch.equal(grid.dequantise(quantised(name, torch.zeros(5, 64))), torch.zeros(5, 64))
    if name == "int4":  # the code of zero, eight times
        assert set(quantised(name, torch.zeros(5, 64))["weight_packed"].flatten().tolist()) == {0x88888888 - (1 << 32)}
    tiny = weights(8, 64) * 1e-30
    assert bool(grid.dequantise(quantised(name, tiny)).isfinite().all())


def test_the_sixteen_values_of_four_bits():
    packed = torch.arange(16, dtype=torch.uint8).repeat(16).view(16, 16)
    whole = torch.ones(1)
    parts = {"weight_packed": packed[:, :8], "weight_scale": torch.ones(16, 1).to(torch.float8_e4m3fn)}
    values = GRIDS["nvfp4"].dequantise({**parts, "weight_global_scale": whole})
    assert values[0].tolist() == [x for value in FP4_VALUES for x in (value, 0.0)]


def test_weights_of_a_model_that_are_put_on_a_grid():
    names = grid_weights(build_model(), "fp8")
    assert len(names) == 2 * 7 and not any("embed" in name or "lm_head" in name for name in names)
    untied = grid_weights(build_model(tie_word_embeddings=False), "fp8")
    assert untied == names
    groups = joined_names(names)
    assert sorted(len(group) for group in groups) == [2, 2, 3, 3]
    with pytest.raises(ConfigError, match=r"rollout.quantization=int4 takes 32 weights of a row .* has 16 in a row"):
        grid_weights(build_model(), "int4")
    with pytest.raises(ConfigError, match=r"rollout.quantization=nvfp4 is for models .* experts are not supported"):
        grid_weights(build("qwen3-moe"), "nvfp4")
