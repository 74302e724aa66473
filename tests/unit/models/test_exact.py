"""Passes whose numbers do not depend on what is computed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rl.compat import native
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.exact import ExactFunctions, missing_operators
from hybrid_rl.models.linear import exact_product
from hybrid_rl.models.packed.exact_check import check_exact
from hybrid_rl.models.row import PackedRow
from tests.unit.models.families import build

pytestmark = pytest.mark.skipif(not native.is_available() or bool(missing_operators()), reason="extension not built")
DTYPES = (torch.float32, torch.bfloat16)


def numbers(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_product_against_numbers_by_hand() -> None:
    left, right = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 5.0, 6.0], [0.5, 0.25, -1.0]])
    assert exact_product(left, right, torch.tensor([1.0, 10.0])).tolist() == [[33.0, 8.0]]
    # One chain in order: 2^24 + 1 is 2^24 in float32, twice. A sum by halves would have 2^24 + 2.
    chain = torch.tensor([[2.0**24, 1.0, 1.0]])
    assert exact_product(chain, torch.ones(1, 3)).tolist() == [[2.0**24]]
    assert exact_product(chain, torch.ones(1, 3)).tolist() != exact_product(chain.flip(1), torch.ones(1, 3)).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_columns", "depth"), [(70, 33), (1, 300), (96, 512), (49, 257)])
def test_a_number_of_a_product_depends_on_its_row_and_column_only(num_columns: int, depth: int, dtype) -> None:
    left, right, bias = (
        numbers(*sizes, dtype=dtype, seed=seed)
        for seed, sizes in enumerate([(300, depth), (num_columns, depth), (num_columns,)])
    )
    whole = exact_product(left, right, bias)
    expected = left.double() @ right.double().t() + bias.double()
    scale = expected.abs().max()
    torch.testing.assert_close(
        whole.double() / scale, expected / scale, rtol=0, atol=0.005 if dtype != DTYPES[0] else 1e-6
    )
    for num_rows in (*range(1, 15), 64, 239, 240, 241):
        rows = torch.randperm(300, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
        assert torch.equal(exact_product(left[rows], right, bias), whole[rows])
    by_depth = right.t().contiguous().t()
    assert torch.equal(exact_product(left, by_depth, bias), whole)
    assert torch.equal(exact_product(left, right[::2], bias[::2].contiguous()), whole[:, ::2])
    assert torch.equal(exact_product(left, right, bias, in_float32=True).to(dtype), whole)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(exact_product(left, right, bias), whole)
    finally:
        torch.set_num_threads(before)


FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
    "mish": functional.mish,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "power -0.5": lambda x: (x.abs() + 0.1) ** -0.5,
    "power 0.25": lambda x: torch.pow(x.abs(), exponent=0.25),
    "square": lambda x: x**2,
    "exp2": torch.exp2,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "softmax": lambda x: torch.softmax(x, -1),
    "mean of squares": lambda x: x.pow(2).mean(-1, keepdim=True),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
}


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_row_are_the_same_in_any_batch(name: str, dtype: torch.dtype, set_threads) -> None:
    """Those that PyTorch has so, too: the day on which one changes shows here. With any number of threads."""
    function = FUNCTIONS[name]
    for width in (5, 60):
        rows = 3 * numbers(999, width, dtype=dtype)
        set_threads(1)
        with ExactFunctions():
            whole = function(rows)
        torch.testing.assert_close(whole, function(rows))
        for num_threads in (1, 2, 3, 5, 7):
            set_threads(num_threads)
            with ExactFunctions():
                for first, last in ((0, 1), (1, 4), (7, 70), (100, 650), (0, 999)):
                    assert torch.equal(function(rows[first:last].clone()), whole[first:last]), (
                        width,
                        num_threads,
                        first,
                    )


NEEDED = [
    *((name, torch.float32) for name in ("sigmoid", "silu", "gelu_tanh", "softplus", "mish", "power 0.25", "exp2")),
    *((name, torch.bfloat16) for name in ("gelu", "gelu_tanh", "rsqrt", "power -0.5")),
]


@pytest.mark.parametrize(("name", "dtype"), NEEDED)
def test_the_functions_that_are_replaced_need_it(name: str, dtype: torch.dtype) -> None:
    """PyTorch's round otherwise where a vectorised loop ends, in one dtype or both."""
    function, rows = FUNCTIONS[name], 3 * numbers(3999, 5, dtype=dtype)
    whole = function(rows)
    assert any(not torch.equal(function(rows[n : n + 3].clone()), whole[n : n + 3]) for n in range(0, 3990, 3))


def test_products_called_in_every_way_have_the_same_bits() -> None:
    """As methods and with named arguments; one that writes into `out`, or has factors, is PyTorch's."""
    left, right, vector = numbers(7, 300), numbers(300, 9, seed=1), numbers(9, seed=2)
    expected = exact_product(left, right.t())
    with_bias = exact_product(left, right.t(), vector)
    out = torch.empty(7, 9)
    with ExactFunctions():
        products = [
            *(left @ right, left.matmul(right), torch.matmul(input=left, other=right), left.matmul(other=right)),
            *(
                torch.mm(left, right),
                torch.mm(input=left, mat2=right),
                left.mm(mat2=right),
                torch.mm(left, right, out=None),
            ),
            *(torch.bmm(left[None], right[None])[0], torch.bmm(input=left[None], mat2=right[None])[0]),
            *(left[None].bmm(mat2=right[None])[0], functional.linear(input=left, weight=right.t())),
        ]
        sums = [
            *(torch.addmm(vector, left, right), torch.addmm(input=vector, mat1=left, mat2=right)),
            *(vector.addmm(left, mat2=right), functional.linear(input=left, weight=right.t(), bias=vector)),
        ]
        torch.matmul(input=left, other=right, out=out)
        doubled = torch.addmm(input=vector, mat1=left, mat2=right, alpha=2)
    assert all(torch.equal(product, expected) for product in products)
    assert all(torch.equal(product, with_bias) for product in sums)
    assert not torch.equal(expected, torch.mm(left, right))  # or PyTorch's could not be told apart
    assert torch.equal(out, torch.mm(left, right))
    torch.testing.assert_close(doubled, vector + 2 * expected)


def test_numbers_with_gaps_between_them_have_the_bits_of_numbers_without() -> None:
    rows = 3 * numbers(256, 5)
    with ExactFunctions():
        assert torch.equal(functional.silu(rows[:, 0]), functional.silu(rows)[:, 0])


def test_nan_is_not_rounded_to_a_number() -> None:
    """Of 16 ones in the low half, adding half a unit would make zeros of the whole."""
    rows = torch.ones(1, 1, dtype=torch.bfloat16)
    for bits in (-1, 0x7FFFFFFF):
        bias = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        assert exact_product(rows, rows, bias).isnan().all()


def test_gradients_are_those_of_the_same_functions_without() -> None:
    left, right, vector = numbers(12, 16), numbers(3, 16, 8, seed=1), numbers(8, seed=2)
    ends = torch.tensor([5, 5, 12], dtype=torch.int32)  # the second expert has no rows

    def loss(*inputs: Tensor) -> Tensor:
        rows, experts, bias = inputs
        grouped = torch.nn.functional.grouped_mm(rows, experts, offs=ends)
        batched = torch.bmm(rows.view(3, 4, 16), experts).view(12, 8)
        linear = functional.linear(rows, experts[0].t(), bias) + rows @ experts[1]
        return (functional.silu(grouped) * torch.sigmoid(linear) + batched + torch.addmm(bias, rows, experts[2])).sum()

    gradients = []
    for is_exact in (True, False):
        inputs = [tensor.clone().requires_grad_() for tensor in (left, right, vector)]
        if is_exact:
            with ExactFunctions():
                value = loss(*inputs)
        else:
            value = loss(*inputs)
        value.backward()
        gradients.append([tensor.grad for tensor in inputs])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_recomputed_activations_have_the_same_bits() -> None:
    """Gradient checkpointing: the gradient is that of the pass without, to the bit."""
    gradients = []
    for is_checkpointed in (False, True):
        model = CausalLM(build("qwen3-moe"), exact=True)
        if is_checkpointed:
            model.enable_gradient_checkpointing()
        tokens = torch.arange(23) * 5 % 90 + 2
        logprobs, _ = model.packed_logprobs(tokens, [9, 14], torch.arange(1, 9), 1.0)
        logprobs.sum().backward()
        gradients.append([p.grad for p in model.module.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_the_check_names_the_layer_that_mixes_tokens_with_their_row() -> None:
    module = build("llama")
    check_exact(CausalLM(module, exact=True))
    layer = module.model.layers[1].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(x) * (1 + 1e-6 * x.abs().max())
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp \(LlamaMLP\) of LlamaForCausalLM gives other numbers"):
        check_exact(CausalLM(module, exact=True))


def test_the_check_finds_ordinary_passes() -> None:
    with pytest.raises(ModelError, match="gives other numbers in a row of"):
        check_exact(CausalLM(build("qwen3-moe")))


def test_the_check_names_a_layer_that_runs_in_some_rows_only() -> None:
    """What it adds is 0: no number shows it."""
    module = build("llama")
    layer = module.model.layers[1].mlp
    plain = layer.forward
    layer.extra = torch.nn.Identity()
    layer.forward = lambda x: plain(layer.extra(x) if x.shape[1] < 10 else x)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.extra \(Identity\) of LlamaForCausalLM gives other"):
        check_exact(CausalLM(module, exact=True))


def test_the_check_finds_other_numbers_after_a_shared_prompt(monkeypatch) -> None:
    model = CausalLM(build("llama"), exact=True)
    plain = model.row_logprobs

    def row_logprobs(row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropy = plain(row, temperature)
        return logprobs * (1.001 if row.layout.children else 1.0), entropy

    monkeypatch.setattr(model, "row_logprobs", row_logprobs)
    with pytest.raises(
        ModelError, match="LlamaForCausalLM gives other logprobs to samples that share a prompt of 30 tok"
    ):
        check_exact(model)
