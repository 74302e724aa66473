"""The buffer of the synchronous loop: one batch, and only a fresh one."""

import pytest
import torch

from hybrid_rl.batch import Batch, store
from hybrid_rl.errors import NotYetSupportedError
from hybrid_rl.rollout.buffer import SampleBuffer


def batch(*versions):
    oldest = torch.tensor([min(row, default=-1) for row in versions], dtype=torch.int64)
    return Batch({"oldest_version": oldest})


def test_a_batch_goes_in_and_the_same_one_comes_out():
    buffer, made = SampleBuffer(), batch([3, 3], [3])
    buffer.put(made)
    assert len(buffer) == 1
    assert buffer.take(3) is made
    assert len(buffer) == 0


def test_a_second_batch_is_refused_until_the_first_was_taken_or_forgotten():
    buffer = SampleBuffer()
    buffer.put(batch([1]))
    with pytest.raises(ValueError, match="capacity 0 is full"):
        buffer.put(batch([1]))
    assert len(buffer) == 1
    buffer.clear()
    assert len(buffer) == 0
    buffer.put(batch([1]))


def test_nothing_to_take():
    with pytest.raises(ValueError, match="the buffer is empty"):
        SampleBuffer().take(1)


@pytest.mark.parametrize(
    ("max_staleness", "version", "fits"), [(0, 5, False), (1, 5, False), (2, 5, True), (0, 3, True)]
)
def test_the_oldest_token_decides_how_stale_a_batch_is(max_staleness, version, fits):
    buffer = SampleBuffer(max_staleness=max_staleness)
    buffer.put(batch([5, 5], [3, 4]))
    if fits:
        assert buffer.take(version).num_samples == 2
    else:
        with pytest.raises(ValueError, match=f"2 policy versions old, more than max_staleness={max_staleness}"):
            buffer.take(version)


def test_a_batch_without_tokens_is_never_stale():
    buffer = SampleBuffer()
    buffer.put(batch([], []))
    assert buffer.take(9).num_samples == 2


def test_settings_that_do_not_work():
    with pytest.raises(NotYetSupportedError, match="capacity=1"):
        SampleBuffer(capacity=1)
    with pytest.raises(ValueError, match="max_staleness=-1"):
        SampleBuffer(max_staleness=-1)


def test_what_lies_on_workers_is_held_and_judged_alike():
    """Only the [N]-sized column is looked at; nothing is fetched."""

    def fetch(_handle):
        raise AssertionError("a block was fetched")

    made = batch([5], [4]).with_columns(prompt=["a", "b"])
    ref = store(made, lambda block: block).with_get(fetch)
    buffer = SampleBuffer(max_staleness=1)
    buffer.put(ref)
    with pytest.raises(ValueError, match="2 policy versions old"):
        buffer.take(6)
    assert buffer.take(5) is ref
