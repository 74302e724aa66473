"""Whole distributions against log_softmax and autograd, in chunks of every size, and the numbers taken from them."""

import math
from itertools import product

import pytest
import torch

from hybrid_rl.models.heads import logprobs as heads
from hybrid_rl.models.heads.distribution import chosen_and_entropy, sum_of_squares, token_distribution, top_tokens
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import token_logprobs

M, H, V = 7, 5, 11
HEADS = {
    "plain": HeadOptions(),
    "scale": HeadOptions(scale=0.4),
    "softcap": HeadOptions(softcap=1.5),
    "scale and softcap": HeadOptions(scale=2.5, softcap=1.5),
}


def inputs(dtype=torch.float64, bias=True):
    tensors = [torch.randn(M, H), torch.randn(V, H), torch.randn(V) if bias else None]
    return [t if t is None else t.to(dtype).requires_grad_() for t in tensors], torch.randint(0, V, (M,))


def reference(hidden, weight, bias, temperature, options):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * options.scale
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return (logits / temperature).log_softmax(1)


@pytest.mark.parametrize(("options", "temperature", "bias"), list(product(HEADS.values(), [1.0, 0.6], [True, False])))
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_values_and_gradients_equal_autograd(options, temperature, bias, rows_per_chunk, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", rows_per_chunk * V)
    tensors, _ = inputs(bias=bias)
    mine = token_distribution(*tensors, temperature, options)
    expected = reference(*tensors, temperature, options)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    leaves = [t for t in tensors if t is not None]
    weights = torch.randn(M, V, dtype=torch.float64)
    both = [torch.autograd.grad((weights * out).sum(), leaves) for out in (mine, expected)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_gradcheck(options, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 2 * V)
    tensors, labels = inputs()

    def numbers(hidden, weight, bias):
        log_probs = token_distribution(hidden, weight, bias, 0.7, options)
        return *chosen_and_entropy(log_probs, labels), sum_of_squares(log_probs), log_probs

    assert torch.autograd.gradcheck(numbers, tensors)


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
def test_chosen_tokens_and_entropy_are_those_of_the_fused_head(rows_per_chunk, monkeypatch):
    """The two ways to the same numbers, and to the same gradient of both together."""
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", rows_per_chunk * V)
    tensors, labels = inputs()
    options = HEADS["scale and softcap"]
    whole = chosen_and_entropy(token_distribution(*tensors, 0.7, options), labels)
    fused = token_logprobs(*tensors, labels, 0.7, options)
    torch.testing.assert_close(whole, fused, rtol=1e-12, atol=1e-12)
    weights = torch.randn(2, M, dtype=torch.float64)
    both = [
        torch.autograd.grad(sum((w * out).sum() for w, out in zip(weights, outputs, strict=True)), tensors)
        for outputs in (whole, fused)
    ]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-11)


def test_entropy_that_nothing_asks_for_costs_no_gradient():
    log_probs = torch.randn(3, V).log_softmax(1).requires_grad_()
    chosen, entropy = chosen_and_entropy(log_probs, torch.tensor([1, 2, 3]))
    (chosen.sum() + 0 * entropy.sum()).backward()
    expected = torch.zeros(3, V)
    expected[[0, 1, 2], [1, 2, 3]] = 1
    assert torch.equal(log_probs.grad, expected)


def test_entropy_has_the_gradient_of_its_formula():
    """-sum of exp(x) x by x, which need not be normalised."""
    x = torch.randn(3, V, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
    entropies = chosen_and_entropy(x, torch.zeros(3, dtype=torch.int64))[1], -(x.exp() * x).sum(1)
    both = [torch.autograd.grad((weights * entropy).sum(), x)[0] for entropy in entropies]
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)


def test_numbers_by_hand():
    """Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8; sum of squares 30/64."""
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log()[:, None]
    log_probs = token_distribution(torch.ones(1, 1, dtype=torch.float64), weight, None, 1.0, HeadOptions())
    assert log_probs.exp().tolist() == [pytest.approx([1 / 8, 2 / 8, 5 / 8], rel=1e-12)]
    assert sum_of_squares(log_probs).tolist() == pytest.approx([30 / 64], rel=1e-12)
    chosen, entropy = chosen_and_entropy(log_probs, torch.tensor([1]))
    assert chosen.item() == pytest.approx(math.log(2 / 8), rel=1e-12)
    assert entropy.item() == pytest.approx(-sum(p / 8 * math.log(p / 8) for p in (1, 2, 5)), rel=1e-12)
    ids, logprobs = top_tokens(log_probs, 2)
    assert ids.tolist() == [[2, 1]]
    assert logprobs.exp().tolist() == [pytest.approx([5 / 8, 2 / 8], rel=1e-12)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_heads_give_float32(dtype):
    tensors, labels = inputs(dtype)
    log_probs = token_distribution(*tensors, 1.0, HeadOptions())
    rounded = torch.nn.functional.linear(*tensors).double().log_softmax(1)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), rounded, rtol=1e-5, atol=1e-5)
    sum(part.sum() for part in chosen_and_entropy(log_probs, labels)).backward()
    assert all(t.grad.dtype == dtype and t.grad.isfinite().all() for t in tensors)


def test_the_gradient_of_a_bf16_head_is_summed_in_fp32(monkeypatch):
    """300 rows that each add 2^-9 to one weight: bf16 sums stop growing near 1, fp32 sums do not."""
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 2)
    hidden = torch.full((300, 1), 2.0**-8, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_distribution(hidden, weight, None, 1.0, HeadOptions())[:, 0].sum().backward()
    torch.testing.assert_close(weight.grad[:, 0].float(), torch.tensor([300 / 512, -300 / 512]), rtol=4e-3, atol=0)


def test_no_rows_give_no_values_and_zero_gradients():
    tensors, _ = inputs()
    hidden, weight, bias = tensors
    log_probs = token_distribution(hidden[:0], weight, bias, 1.0, HeadOptions())
    outputs = [*chosen_and_entropy(log_probs, torch.zeros(0, dtype=torch.int64)), sum_of_squares(log_probs)]
    assert [tuple(output.shape) for output in outputs] == [(0,)] * 3
    gradient = torch.autograd.grad(sum(outputs).sum(), weight)[0]
    assert torch.equal(gradient, torch.zeros_like(weight))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_distribution(torch.zeros(2, 3), torch.zeros(5, 4), None, 1.0, HeadOptions()), r"\(2, 3\)"),
        (lambda: token_distribution(torch.zeros(2, 3), torch.zeros(5, 3), None, 0.0, HeadOptions()), "temperature=0.0"),
        (lambda: chosen_and_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)), r"labels \[M\]"),
        (lambda: top_tokens(torch.zeros(2, 3), 4), "k=4 must be 1 to V"),
        (lambda: top_tokens(torch.zeros(2, 3), 0), "k=0 must be 1 to V"),
        (lambda: sum_of_squares(torch.zeros(3)), r"must be \[M, V\]"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
