"""Whole distributions, and the numbers taken from them, beyond what `test_logprobs.py` asks of both forms."""

import pytest
import torch

from hybrid_rl.models.heads import logprobs as heads
from hybrid_rl.models.heads.distribution import chosen_and_entropy, sum_of_squares, token_distribution, top_tokens
from hybrid_rl.models.heads.logit_options import HeadOptions
from tests.unit.models.heads.test_logprobs import HEADS, V, inputs, reference


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_values_and_gradients_equal_autograd(options, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 2 * V)
    tensors, labels = inputs()

    def numbers(hidden, weight, bias):
        log_probs = token_distribution(hidden, weight, bias, 0.7, options)
        return *chosen_and_entropy(log_probs, labels), sum_of_squares(log_probs), log_probs

    torch.testing.assert_close(numbers(*tensors)[-1], reference(*tensors, 0.7, options), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(numbers, tensors)


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
    """p = 1/8, 2/8, 5/8; sum of squares 30/64."""
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log()[:, None]
    log_probs = token_distribution(torch.ones(1, 1, dtype=torch.float64), weight, None, 1.0, HeadOptions())
    assert log_probs.exp().tolist() == [pytest.approx([1 / 8, 2 / 8, 5 / 8], rel=1e-12)]
    assert sum_of_squares(log_probs).tolist() == pytest.approx([30 / 64], rel=1e-12)
    assert sum_of_squares(log_probs[:0]).shape == (0,)
    ids, logprobs = top_tokens(log_probs, 2)
    assert ids.tolist() == [[2, 1]]
    assert logprobs.exp().tolist() == [pytest.approx([5 / 8, 2 / 8], rel=1e-12)]


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
