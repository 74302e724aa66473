"""Padded attention against every sequence alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.attention_function import AttentionOptions
from hybrid_rl.models.attention.padded import BUCKET_FILL, SMALL_LENGTH, PaddedAttention, length_buckets
from hybrid_rl.models.row import Layout

LENGTHS = {
    "one token": [1],
    "one": [9],
    "equal": [6, 6, 6],
    "ragged": [3, 1, 7, 2, 1],
    "long to short, in buckets": [90, 70, 40, 39, 3],
    "buckets that interleave": [40, 3, 90, 35, 70],
    "equal but apart": [50, 5, 50],
}
OPTIONS = {
    "plain": AttentionOptions(),
    "scale": AttentionOptions(scale=0.7),
    "window": AttentionOptions(window=4),
    "window 1": AttentionOptions(window=1),
    "softcap": AttentionOptions(softcap=1.3),
    "all": AttentionOptions(scale=0.7, window=4, softcap=1.3),
}


def eager(query, key, value, lengths, options):
    """Softmax attention written out: one sequence, one query head and one query token at a time."""
    rows, start = [], 0
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    per_key_head = query.shape[1] // key.shape[1]
    for length in lengths:
        for place in range(length):
            first = 0 if options.window is None else max(0, place - options.window + 1)
            seen = slice(start + first, start + place + 1)
            heads = []
            for head in range(query.shape[1]):
                scores = key[seen, head // per_key_head] @ query[start + place, head] * scale
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                heads.append(scores.softmax(0) @ value[seen, head // per_key_head])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def qkv(num_tokens, num_heads=4, num_key_value_heads=2, dtype=torch.float64):
    shapes = ((num_heads, 8), (num_key_value_heads, 8), (num_key_value_heads, 6))
    return [(2 * torch.randn(num_tokens, *shape, dtype=torch.float64)).to(dtype).requires_grad_() for shape in shapes]


def check(lengths, options, tolerance, **shape):
    inputs = qkv(sum(lengths), **shape)
    mine = PaddedAttention(Layout(tuple(lengths))).attend(0, *inputs, options)
    reference = eager(*(tensor.double() for tensor in inputs), lengths, options)
    torch.testing.assert_close(mine.double(), reference, rtol=tolerance, atol=tolerance)
    direction = torch.randn_like(reference)
    gradients = torch.autograd.grad((mine.double() * direction).sum(), inputs)
    expected = torch.autograd.grad((reference * direction).sum(), inputs)
    torch.testing.assert_close(gradients, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    "options", [OPTIONS["plain"], OPTIONS["window"], OPTIONS["all"]], ids=["plain", "window", "all"]
)
def test_values_and_gradients_equal_those_of_each_sequence_alone(lengths, options):
    check(lengths, options, 1e-11)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_in_fp64_and_fp32(options):
    lengths = [5, 40, 38, 2]
    check(lengths, options, 1e-11)
    check(lengths, options, 2e-5, dtype=torch.float32)  # sums of up to 40 terms of size 10 in fp32


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_query_heads_share_key_heads_in_order(num_key_value_heads, options):
    check([4, 7], options, 1e-11, num_key_value_heads=num_key_value_heads)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_a_poisoned_sequence_leaves_the_others_as_they_are(options):
    lengths = [5, 7, 1, 6]
    query, key, value = (tensor.detach() for tensor in qkv(sum(lengths)))
    clean = PaddedAttention(Layout(tuple(lengths))).attend(0, query, key, value, options)
    for tensor in (query, key, value):
        tensor[5:12] = torch.nan
    poisoned = PaddedAttention(Layout(tuple(lengths))).attend(0, query, key, value, options)
    assert poisoned[5:12].isnan().all()
    keep = [*range(5), *range(12, 19)]
    torch.testing.assert_close(poisoned[keep], clean[keep], rtol=0, atol=0)


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ModelError, match="planned for 5 tokens but got 6"):
        PaddedAttention(Layout((2, 3))).attend(0, *qkv(6), AttentionOptions())


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_buckets_hold_every_sequence_once_and_none_is_much_shorter_than_the_longest(lengths):
    buckets = length_buckets(lengths)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        own = [lengths[index] for index in bucket]
        assert max(own) <= SMALL_LENGTH or min(own) >= BUCKET_FILL * max(own)
    # No two buckets could have been one.
    longest = sorted((max(lengths[i] for i in bucket) for bucket in buckets), reverse=True)
    assert all(short < BUCKET_FILL * long for long, short in zip(longest, longest[1:], strict=False))
