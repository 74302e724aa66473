"""Norms, gates and the head's logprobs by the compiled operators, against PyTorch's in float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_rl.compat import native
from hybrid_rl.models import fused
from hybrid_rl.models.fused import FusedLayers, rms_norm, silu_gate
from hybrid_rl.models.heads import logprobs as logprobs_of_heads
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import chunked_logprobs
from hybrid_rl.models.linear import product
from hybrid_rl.models.packed.packed_model import PackedModel
from tests.unit.models.families import build

pytestmark = pytest.mark.skipif(native.operator("rms_norm") is None, reason="the extension is not built")
# Sizes around the widths of registers, a block of columns (1024) and a part of rows (256).
SHAPES = [(1, 1), (5, 7), (3, 16), (257, 33), (2, 1025)]


def numbers(*sizes: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def leaves(*tensors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def check(mine: list[Tensor], exact: list[Tensor]) -> None:
    for got, expected in zip(mine, exact, strict=True):
        assert got.dtype == torch.float32 and got.shape == expected.shape
        assert (got - expected).abs().max() <= 2e-6 * max(1.0, float(expected.abs().max()))


def product_with_exact_long_sums(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    if left.shape[1] < 1000:
        return product(left, right, bias)
    return (left.double() @ right.double().t()).to(left.dtype)


def test_a_norm_by_hand() -> None:
    """Of (3, 4) without epsilon: the mean square is 12.5, so that (3, 4) / 3.5355 = (0.8485, 1.1314)."""
    out, scales = fused._RMSNorm.apply(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), (0.0, 0.0)), 12.5**-0.5
    assert out.tolist()[0] == pytest.approx([3 * scales, 8 * scales])


def test_a_gate_by_hand() -> None:
    """silu(ln 3) = ln 3 * 3/4, silu(-ln 3) = -ln 3 / 4."""
    log3 = torch.log(torch.tensor(3.0))
    out = fused._SiluGate.apply(torch.stack([log3, -log3]), torch.tensor([2.0, 2.0]))
    assert out.tolist() == pytest.approx([1.5 * float(log3), -0.5 * float(log3)])


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_and_their_gradients(shape: tuple[int, int], offset: float) -> None:
    rows, weight, up = numbers(*shape), numbers(shape[1], seed=1), numbers(*shape, seed=2)
    x, w = leaves(rows, weight, dtype=torch.float64)
    exact = rms_norm(x, w, 1e-5, offset)
    exact.backward(up.double())
    x32, w32 = leaves(rows, weight, dtype=torch.float32)
    mine: Tensor = fused._RMSNorm.apply(x32, w32, (1e-5, offset))
    mine.backward(up)
    check([mine, x32.grad, w32.grad], [exact, x.grad, w.grad])  # type: ignore[list-item]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_and_their_gradients(shape: tuple[int, int]) -> None:
    gate, other, up = numbers(*shape, scale=20.0), numbers(*shape, seed=1), numbers(*shape, seed=2)
    g, u = leaves(gate, other, dtype=torch.float64)
    exact = silu_gate(g, u)
    exact.backward(up.double())
    g32, u32 = leaves(gate, other, dtype=torch.float32)
    mine: Tensor = fused._SiluGate.apply(g32, u32)
    mine.backward(up)
    check([mine, g32.grad, u32.grad], [exact, g.grad, u.grad])  # type: ignore[list-item]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocabulary", [2, 19, 2500])
def test_logprobs_of_a_head_and_their_gradients(
    vocabulary: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The float64 side runs PyTorch's operators. One column is nearly excluded, as by a bias of -1e4.

    Sums over 2500 columns are in float64: a library's own in float32 are off by 2.6e-6 on Zen 3 (AVX2)."""
    monkeypatch.setattr(logprobs_of_heads, "product", product_with_exact_long_sums)
    hidden, weight, bias = numbers(9, 8), numbers(vocabulary, 8, seed=1), numbers(vocabulary, seed=2)
    bias[1] = -1e4
    labels = torch.arange(9) % vocabulary if vocabulary > 2 else torch.zeros(9, dtype=torch.int64)
    ups = numbers(9, seed=3), numbers(9, seed=4)
    sides = []
    for dtype in (torch.float32, torch.float64):
        inputs = leaves(hidden, weight, bias, dtype=dtype)
        logprobs, entropy = chunked_logprobs(*inputs, labels, temperature, HeadOptions())
        (logprobs * ups[0].to(dtype) + entropy * ups[1].to(dtype))[labels != 1].sum().backward()
        sides.append([entropy, logprobs[labels != 1], *(tensor.grad for tensor in inputs)])
    check(*sides)  # type: ignore[arg-type]


def test_an_excluded_column_has_no_part_in_an_entropy() -> None:
    operator: Any = native.operator("label_logprobs")
    logprobs, entropy, _ = operator(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([0]), 1.0)
    assert [float(logprobs), float(entropy)] == pytest.approx([-0.6931472, 0.6931472])


def test_a_label_outside_of_the_vocabulary_is_refused() -> None:
    operator: Any = native.operator("label_logprobs")
    with pytest.raises(RuntimeError, match="label 3 is not below the vocabulary of 3"):
        operator(torch.zeros(1, 3), torch.tensor([3]), 1.0)


def fused_kinds(model: nn.Module) -> Counter[str]:
    layers = FusedLayers(model)
    with layers.active():
        return Counter(type(layer).__name__ for layer in model.modules() if "forward" in vars(layer))


@pytest.mark.parametrize(
    ("name", "norms", "gates"),
    [("llama", 5, 2), ("qwen3", 9, 2), ("gemma2", 9, 0), ("gemma3", 13, 0), ("olmo2", 9, 2), ("cohere2", 0, 2)],
)
def test_layers_are_known_by_what_they_compute(name: str, norms: int, gates: int) -> None:
    """Gemma adds 1 to its weights and gates by GELU; Cohere's norm subtracts a mean."""
    model, kind = build(name), name.capitalize()
    kinds = fused_kinds(model)
    assert kinds == Counter({f"{kind}RMSNorm": norms, f"{kind}MLP": gates}) - Counter()
    ids = torch.arange(1, 10)[None]
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        with FusedLayers(model).active():
            assert torch.allclose(model(ids, use_cache=False).logits, plain, atol=2e-6)


class OddNorm(nn.Module):
    """Divides by the mean of the sizes: named and made like an RMSNorm."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * rows / (rows.abs().mean(-1, keepdim=True) + self.variance_epsilon)


class GatedNorm(OddNorm):
    """May be given a gate, and without one is an RMSNorm: those of GraniteMoeHybrid's Mamba layers."""

    def forward(self, rows: Tensor, gate: Tensor | None = None) -> Tensor:
        return rms_norm(rows if gate is None else rows * gate, self.weight, self.variance_epsilon, 0.0)


@pytest.mark.parametrize("kind", [OddNorm, GatedNorm])
def test_a_norm_of_another_formula_stays_as_it_is(kind: type[OddNorm]) -> None:
    assert not fused_kinds(nn.Sequential(kind(8)))


def test_blocks_end_and_do_not_nest() -> None:
    model = build("llama")
    layers = FusedLayers(model)
    with pytest.raises(KeyError), layers.active():
        with layers.active():
            pass
        assert "forward" in vars(model.model.norm)
        raise KeyError
    with layers.active(False):
        assert "forward" not in vars(model.model.norm)


def test_float64_models_keep_their_layers() -> None:
    with torch.no_grad():
        model = build("llama", dtype=torch.float64)
        packed = PackedModel(model)
        ids = torch.arange(1, 10)
        assert torch.equal(packed.own_forward(ids[None]).last_hidden_state, model.model(ids[None]).last_hidden_state)
