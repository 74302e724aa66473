"""Padded attention: the buckets that sequences are padded in, and every sequence as if it were alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.models.attention.attention_function import AttentionOptions
from hybrid_rl.models.attention.padded import BUCKET_FILL, SMALL_LENGTH, PaddedAttention, length_buckets
from hybrid_rl.models.row import Layout
from tests.support.engines.attention_contract import check_context, inputs

LENGTHS = {
    "equal": (6, 6, 6),
    "long to short, in buckets": (90, 70, 40, 39, 3),
    "buckets that interleave": (40, 3, 90, 35, 70),
    "equal but apart": (50, 5, 50),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_values_and_gradients_of_every_arrangement_of_buckets(lengths):
    """Beyond the layouts and options of the contract."""
    layout = Layout(lengths)
    for options in (AttentionOptions(), AttentionOptions(window=2), AttentionOptions(0.7, 4, 1.3)):
        check_context(PaddedAttention(layout), layout, options, "cpu", torch.float64)


@pytest.mark.parametrize(("lengths", "window"), [((1,), None), ((3, 40, 2), 1)])
def test_a_token_that_sees_only_itself_gets_its_value(lengths, window):
    query, key, value = inputs(Layout(lengths), torch.float64)
    out = PaddedAttention(Layout(lengths)).attend(0, query, key, value, AttentionOptions(window=window))
    torch.testing.assert_close(out, value.repeat_interleave(2, dim=1), rtol=0, atol=1e-12)


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
