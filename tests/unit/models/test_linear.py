"""Products through oneDNN against float64, and the layers that `Linears` switches over and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hybrid_rl.models import linear
from hybrid_rl.models.linear import SMALLEST_ROWS, Linears, is_available, product, weight_gradient
from hybrid_rl.models.packed.causal_lm import CausalLM
from tests.support.inside.models import count_linear_calls, num_fast_rows
from tests.unit.models.families import build

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
SMALLEST_PRODUCT = 1 << 18  # of these tests, whatever the processor
SIZES = [(128, 64, 160), (3, 5, 7), (1, 64, 64)]  # the first is large enough for oneDNN


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch):
    monkeypatch.setattr(linear, "smallest_product", lambda: SMALLEST_PRODUCT)


def relative(mine: Tensor, expected: Tensor) -> float:
    return float((mine.detach().double() - expected).norm() / expected.norm())


def layouts(rows: int, columns: int) -> dict[str, Tensor]:
    """The same kind of matrix under other strides."""
    return {
        "contiguous": torch.randn(rows, columns),
        "transposed": torch.randn(columns, rows).t(),
        "every other row": torch.randn(2 * rows, columns)[::2],
        "part of the columns": torch.randn(rows, columns + 3)[:, 1:-2],
        "one row": torch.randn(1, columns).expand(rows, columns),
        "one column": torch.randn(rows, 1).expand(rows, columns),
    }


LAYOUTS = list(layouts(1, 1))


@pytest.fixture
def calls(monkeypatch):
    """How often oneDNN is called, as on a processor that MKL does not know."""
    monkeypatch.setattr(linear, "transposes_by_mkl", lambda: False)
    counted = []
    count_linear_calls(monkeypatch, lambda: counted.append(1))
    return counted


@pytest.mark.parametrize("right_layout", LAYOUTS)
@pytest.mark.parametrize("left_layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_any_strides(size, left_layout, right_layout):
    rows, columns, depth = size
    left, right, bias = layouts(rows, depth)[left_layout], layouts(columns, depth)[right_layout], torch.randn(columns)
    assert (rows * columns * depth >= SMALLEST_PRODUCT) == (rows == 128)
    exact = left.double() @ right.double().t()
    # Against the size of what is summed: equal rows may cancel to almost nothing.
    scale = (left.double().abs() @ right.double().abs().t()).norm()
    assert (product(left, right).double() - exact).norm() / scale < 3e-6
    assert (product(left, right, bias).double() - exact - bias).norm() / scale < 3e-6


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 160), (160, 64), (96, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by_mkl", [False, True])
def test_weight_gradients_of_any_strides(by_mkl, layout, outputs, inputs, monkeypatch):
    monkeypatch.setattr(linear, "transposes_by_mkl", lambda: by_mkl)
    grad, rows = layouts(128, outputs)[layout], torch.randn(128, inputs)
    mine = weight_gradient(grad, rows)
    assert mine.shape == (outputs, inputs)
    scale = (grad.double().abs().t() @ rows.double().abs()).norm()
    assert (mine.double() - grad.double().t() @ rows.double()).norm() / scale < 1e-6


def test_small_products_and_other_dtypes_are_left_to_pytorch(calls):
    product(torch.randn(3, 5), torch.randn(7, 5))
    for dtype in (torch.bfloat16, torch.float64):
        left, right = torch.randn(128, 160, dtype=dtype), torch.randn(64, 160, dtype=dtype)
        assert torch.equal(product(left, right), left @ right.t())
    assert calls == []
    product(torch.randn(128, 160), torch.randn(64, 160))
    assert calls == [1]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # PyTorch, on leaving its own context
def test_onednn_can_be_switched_off(calls):
    with torch.backends.mkldnn.flags(enabled=False):
        assert not is_available(torch.zeros(1))
        product(torch.randn(128, 160), torch.randn(64, 160))
        layer = nn.Linear(64, 64)
        linears = Linears(layer)
        with linears.fast(1000):
            assert "forward" not in vars(layer)
            layer(torch.randn(1000, 64))
    assert calls == []


# -------------------------------------------------------------------------------------------------------- layers


def gradients(layer: nn.Module, rows: Tensor, direction: Tensor) -> list[Tensor]:
    out = layer(rows)
    return [out, *torch.autograd.grad((out * direction).sum(), [rows, *layer.parameters()])]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(256,), (4, 64), (2, 4, 32)], ids=str)
def test_values_and_gradients_are_those_of_the_plain_layer(shape, bias, calls):
    layer = nn.Linear(96, 80, bias=bias)
    rows, direction = torch.randn(*shape, 96, requires_grad=True), torch.randn(*shape, 80)
    exact = gradients(copy.deepcopy(layer).double(), rows.detach().double().requires_grad_(), direction.double())
    with Linears(layer).fast(256):
        mine = gradients(layer, rows, direction)
    assert len(calls) == 3  # the output, and the gradients of rows and weight
    for got, expected in zip(mine, exact, strict=True):
        assert got.shape == expected.shape and got.dtype == torch.float32
        assert relative(got, expected) < 1e-6


def test_an_expanded_gradient(calls):
    """The gradient of a sum has strides of zero."""
    layer, rows = nn.Linear(96, 80), torch.randn(256, 96)
    with Linears(layer).fast(256):
        layer(rows).sum().backward()
    expected = rows.double().sum(0).expand(80, 96)
    assert relative(layer.weight.grad, expected) < 1e-6
    assert torch.equal(layer.bias.grad, torch.full((80,), 256.0))


@pytest.mark.parametrize("frozen", ["weight", "bias", "rows"])
def test_only_what_asks_for_a_gradient_gets_one(frozen, calls):
    layer, rows = nn.Linear(96, 80), torch.randn(256, 96, requires_grad=frozen != "rows")
    if frozen != "rows":
        getattr(layer, frozen).requires_grad_(False)
    with Linears(layer).fast(256):
        layer(rows).square().sum().backward()
    have = {"weight": layer.weight.grad, "bias": layer.bias.grad, "rows": rows.grad}
    assert {name for name, gradient in have.items() if gradient is None} == {frozen}
    assert len(calls) == (3 if frozen == "bias" else 2)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1, 0), (3, 0)], ids=str)
def test_no_rows_no_output(shape, grad):
    layer = nn.Linear(96, 80)
    with torch.set_grad_enabled(grad), Linears(layer).fast(256):
        assert layer(torch.randn(*shape, 96)).shape == (*shape, 80)


def test_few_rows_are_faster_as_they_are(calls):
    layer = nn.Linear(96, 80)
    linears = Linears(layer)
    for num_rows, expected in ((SMALLEST_ROWS - 1, False), (SMALLEST_ROWS, True)):
        with linears.fast(num_rows):
            assert bool(linears.num_rows) == expected
            layer(torch.randn(num_rows, 96))
    assert calls == [1]


def test_each_layer_of_a_size_that_pays(calls):
    small, large = nn.Linear(64, 32), nn.Linear(64, 64)
    assert 100 * small.weight.numel() < SMALLEST_PRODUCT < 100 * large.weight.numel()
    rows = torch.randn(100, 64)
    with Linears(nn.ModuleList([small, large])).fast(100):
        small(rows)
        assert calls == []
        large(rows)
    assert calls == [1]


class Subclass(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


def test_layers_that_are_not_plain_stay_as_they_are(calls):
    replaced, other, double = nn.Linear(64, 64), Subclass(64, 64), nn.Linear(64, 64, dtype=torch.float64)
    replaced.forward = lambda input: input * 2
    half = nn.Linear(64, 64, dtype=torch.bfloat16)
    plain = nn.Linear(64, 64)
    module = nn.ModuleList([plain, replaced, other, double, half])
    own = replaced.forward
    rows = torch.randn(100, 64)
    before = [layer(rows.to(layer.weight.dtype)) for layer in module[1:]]
    with Linears(module).fast(100):
        assert "forward" in vars(plain) and replaced.forward is own
        assert not any("forward" in vars(layer) for layer in (other, double, half))
        after = [layer(rows.to(layer.weight.dtype)) for layer in module[1:]]
    assert replaced.forward is own
    assert calls == [] and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_hooks_still_run_and_new_weights_are_seen():
    layer, seen = nn.Linear(64, 64), []
    layer.register_forward_hook(lambda module, arguments, out: seen.append(out.shape))
    linears = Linears(layer)
    layer.weight = nn.Parameter(torch.ones(64, 64))
    with linears.fast(100), torch.no_grad():
        out = layer(torch.ones(100, 64)) - layer.bias
    assert seen == [(100, 64)]
    torch.testing.assert_close(out, torch.full((100, 64), 64.0))


def test_nested_blocks_end_with_the_outermost_and_with_an_error(calls):
    layer = nn.Linear(64, 64)
    linears, rows = Linears(layer), torch.randn(100, 64)
    with pytest.raises(KeyError), linears.fast(100):
        for num_rows in (100, 1):
            with linears.fast(num_rows):
                assert linears.num_rows == 100
            assert linears.num_rows == 100
        layer(rows)
        raise KeyError
    layer(rows)
    assert not linears.num_rows and "forward" not in vars(layer) and calls == [1]


def test_a_shared_layer_is_one_layer():
    layer = nn.Linear(64, 64)
    module = nn.Sequential(layer, layer)
    with Linears(module).fast(100):
        module(torch.randn(100, 64)).sum().backward()
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("num_tokens", [20, 60])
def test_what_is_recomputed_uses_the_layers_of_its_forward_pass(num_tokens, monkeypatch):
    """The backward pass comes after the block; the recomputed activations must not differ from the first."""
    monkeypatch.setattr(linear, "smallest_product", lambda: 0)
    calls, own = [], linear._Forward.__call__
    monkeypatch.setattr(linear._Forward, "__call__", lambda self, rows: calls.append(1) or own(self, rows))
    lengths = [num_tokens // 4] * 4
    tokens = torch.arange(num_tokens) * 7 % 90 + 2
    targets = torch.cat([torch.arange(1, n) + sum(lengths[:i]) for i, n in enumerate(lengths)])
    results, counts = [], []
    for checkpointing in (False, True):
        module = build("qwen2")
        model = CausalLM(module)
        if checkpointing:
            model.enable_gradient_checkpointing()
        calls.clear()
        logprobs, _ = model.packed_logprobs(tokens, lengths, targets, 1.0)
        forwards = len(calls)
        logprobs.sum().backward()
        counts.append((forwards, len(calls)))
        results.append([logprobs.detach(), *(p.grad for p in module.parameters())])
        assert not num_fast_rows(model)
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-6)
    # Seven layers in each of two blocks.
    once = 14 if num_tokens >= SMALLEST_ROWS else 0
    assert counts == [(once, once), (once, 2 * once)]
