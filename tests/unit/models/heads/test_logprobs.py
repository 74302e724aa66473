"""The fused head, and the whole distribution, against log_softmax and autograd, cut into chunks of every size."""

import math
from itertools import product

import pytest
import torch

from hybrid_rl.models.heads import logprobs as heads
from hybrid_rl.models.heads.distribution import chosen_and_entropy, token_distribution
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import token_logprobs

M, H, V = 7, 5, 11
HEADS = {
    "plain": HeadOptions(),
    "scale": HeadOptions(scale=0.4),
    "softcap": HeadOptions(softcap=1.5),
    "scale and softcap": HeadOptions(scale=2.5, softcap=1.5),
}


def of_distribution(hidden, weight, bias, labels, temperature, options):
    """The same numbers as `token_logprobs`, of the distribution over all tokens."""
    return chosen_and_entropy(token_distribution(hidden, weight, bias, temperature, options), labels)


FORMS = pytest.mark.parametrize("form", [token_logprobs, of_distribution])


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


@FORMS
@pytest.mark.parametrize(("options", "temperature", "bias"), list(product(HEADS.values(), [1.0, 0.6], [True, False])))
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_values_and_gradients_equal_autograd(form, options, temperature, bias, rows_per_chunk, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", rows_per_chunk * V)
    tensors, labels = inputs(bias=bias)
    mine = form(*tensors, labels, temperature, options)
    log_p = reference(*tensors, temperature, options)
    expected = log_p[range(M), labels], -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    leaves = [t for t in tensors if t is not None]
    weights = torch.randn(2, M, dtype=torch.float64)
    for use in ([1, 0], [0, 1], [1, 1]):  # the logprobs alone, the entropy alone, both
        both = [
            torch.autograd.grad(
                sum(f * (w * out).sum() for f, w, out in zip(use, weights, outputs, strict=True)),
                leaves,
                retain_graph=True,
            )
            for outputs in (mine, expected)
        ]
        torch.testing.assert_close(*both, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_gradcheck(options, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 2 * V)
    tensors, labels = inputs()
    assert torch.autograd.gradcheck(lambda h, w, b: token_logprobs(h, w, b, labels, 0.7, options), tensors)


@FORMS
def test_numbers_by_hand(form):
    """Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8."""
    weight = torch.tensor([1.0, 2.0, 5.0]).log()[:, None]
    logprob, entropy = form(torch.ones(1, 1), weight, None, torch.tensor([1]), 1.0, HeadOptions())
    assert logprob.item() == pytest.approx(math.log(2 / 8))
    assert entropy.item() == pytest.approx(-sum(p / 8 * math.log(p / 8) for p in (1, 2, 5)))


@FORMS
def test_the_gradient_of_a_bf16_head_is_summed_in_fp32(form, monkeypatch):
    """300 rows that each add 2^-9 to one weight: bf16 sums stop growing near 1, fp32 sums do not."""
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 2)
    hidden = torch.full((300, 1), 2.0**-8, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(300, dtype=torch.int64)
    form(hidden, weight, None, labels, 1.0, HeadOptions())[0].sum().backward()
    # d ln p_0 / d w_0 = (1 - 1/2) * 2^-8 for each row.
    assert weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad[:, 0].float(), torch.tensor([300 / 512, -300 / 512]), rtol=4e-3, atol=0)


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_heads_give_float32_of_their_rounded_logits(form, dtype):
    tensors, labels = inputs(dtype)
    mine = form(*tensors, labels, 1.0, HeadOptions())
    rounded = torch.nn.functional.linear(*tensors).double().log_softmax(1)[range(M), labels]
    assert mine[0].dtype == mine[1].dtype == torch.float32
    torch.testing.assert_close(mine[0].double(), rounded, rtol=1e-6, atol=1e-6)
    sum(part.sum() for part in mine).backward()
    assert all(t.grad.dtype == dtype and t.grad.isfinite().all() for t in tensors)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_huge_logits_stay_finite(size):
    hidden = torch.tensor([[size]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    logprob, entropy = token_logprobs(hidden, weight, None, torch.tensor([0]), 1.0, HeadOptions())
    assert (logprob.item(), entropy.item()) == (0.0, 0.0)
    (logprob + entropy).sum().backward()
    assert hidden.grad.isfinite().all()


@FORMS
def test_no_rows_give_no_values_and_zero_gradients(form):
    hidden, weight, bias = inputs()[0]
    outputs = form(hidden[:0], weight, bias, torch.zeros(0, dtype=torch.int64), 1.0, HeadOptions())
    assert [tuple(output.shape) for output in outputs] == [(0,), (0,)]
    gradient = torch.autograd.grad(sum(outputs).sum(), weight)[0]
    assert torch.equal(gradient, torch.zeros_like(weight))


def test_labels_of_another_length_are_refused():
    tensors, labels = inputs()
    with pytest.raises(ValueError, match=r"labels must be \[7\], not \(6,\)"):
        token_logprobs(*tensors, labels[1:], 1.0, HeadOptions())


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_frozen_head_has_no_gradient_and_changes_none(is_wide, monkeypatch):
    """Its gradient would be as large as the head; what flows on is the same to the bit."""
    dtype = torch.bfloat16 if is_wide else torch.float32
    options, (tensors, labels) = HeadOptions(in_float32=is_wide), inputs(dtype)
    found = []
    for is_frozen in (False, True):
        hidden, weight, bias = (t.detach().clone().requires_grad_() for t in tensors)
        if is_frozen:
            weight.requires_grad_(False), bias.requires_grad_(False)
            for name in ("weight_gradient", "wide_weight_gradient"):
                monkeypatch.setattr(heads, name, None)
        logprobs, entropy = token_logprobs(hidden, weight, bias, labels, 0.7, options)
        (logprobs.sum() + 2 * entropy.sum()).backward()
        found.append(hidden.grad)
    assert torch.equal(*found) and weight.grad is None and bias.grad is None
