"""Each element of the engine's tensors exactly once: what is missing, doubled or beside is counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.tiling import check_tiling
from tests.unit.resharding.loading import Loading


def check(loading: Loading, untraced=(), **changes) -> None:
    """changes: of columns of the copies."""
    trace = loading.trace(untraced)
    check_tiling(replace(trace, copies=replace(trace.copies, **changes)))


def problem(loading: Loading, untraced=(), **changes) -> str:
    with pytest.raises(HandoffError) as caught:
        check(loading, untraced, **changes)
    return str(caught.value)


def rows_of(destination: int, loading: Loading, *parts: tuple[int, int]) -> None:
    target = loading.destinations[destination]
    for begin, end in parts:
        s = loading.source(end - begin, target.shape[1])
        loading.copy(s, [(0, end - begin), (0, target.shape[1])], destination, target[begin:end])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0, 2), (2, 6)], None),
        ([(2, 6), (0, 2)], None),
        ([(0, 6)], None),
        ([(0, 2), (3, 6)], "of 18 elements 3 are missing, 0 written more than once, 0 outside it"),
        ([(0, 3), (2, 6)], "of 18 elements 0 are missing, 3 written more than once, 0 outside it"),
        # As many elements as there should be, but one row twice and one never.
        ([(0, 2), (1, 5)], "of 18 elements 3 are missing, 3 written more than once, 0 outside it"),
        ([(0, 6), (0, 6)], "of 18 elements 0 are missing, 18 written more than once, 0 outside it"),
        ([], "of 18 elements 18 are missing, 0 written more than once, 0 outside it"),
    ],
)
def test_rows(parts, expected):
    loading = Loading()
    d = loading.destination(6, 3)
    rows_of(d, loading, *parts)
    if expected is None:
        check(loading)
    else:
        assert f"d0 [6, 3]: {expected}" in problem(loading)


def test_all_tensors_are_looked_at_and_the_message_counts_them():
    loading = Loading()
    for begin in (0, 1, 0, 2):
        rows_of(loading.destination(6, 3), loading, (begin, 6))
    assert "2 of its 4 tensors, e.g. d1 [6, 3]: of 18 elements 3 are missing" in problem(loading)


def test_padding_beside_and_below():
    loading = Loading()
    s, d = loading.source(4, 5), loading.destination(6, 7)
    target = loading.destinations[d]
    loading.copy(s, [(0, 4), (0, 5)], d, target[:4, :5])
    loading.fill(d, target[4:])
    assert "of 42 elements 8 are missing" in problem(loading)
    loading.fill(d, target[:4, 5:])
    check(loading)
    loading.fill(d, target[3, 4:5])
    assert "1 written more than once" in problem(loading)


def test_strides_that_skip_memory():
    # Rows of 3 at steps of 5: the 2 between them are not the tensor's.
    loading = Loading()
    s, d = loading.source(4, 3), loading.destination(4, 3, strides=(5, 1))
    loading.copy(s, [(0, 4), (0, 3)], d, loading.destinations[d])
    check(loading)
    loading.fill(d, torch.as_strided(loading.destinations[d], (2,), (1,), 3))
    assert "0 are missing, 0 written more than once, 2 outside it" in problem(loading)


def test_a_run_through_the_gaps_of_a_tensor():
    # 12 elements one after the other are as many as the tensor has, but lie in its gaps too.
    loading = Loading()
    d = loading.destination(4, 3, strides=(5, 1))
    run = torch.as_strided(loading.destinations[d], (12,), (1,), 0)
    loading.copy(loading.source(12), [(0, 12)], d, run)
    assert "of 12 elements 4 are missing, 0 written more than once, 4 outside it" in problem(loading)


def test_rows_that_overlap():
    # 4 rows of 4 at steps of 3, in a tensor of 4 x 3: each row's last element is the next one's first.
    loading = Loading()
    d = loading.destination(4, 3)
    loading.copy(loading.source(4, 3), [(0, 4), (0, 3)], d, loading.destinations[d])
    told = problem(loading, high=np.array([[3, 4, 1, 1]]))
    assert "of 12 elements 2 are missing, 2 written more than once" in told


def test_beyond_the_memory():
    loading = Loading()
    d = loading.destination(4)
    loading.copy(loading.source(4), [(0, 4)], d, loading.destinations[d])
    for offset in (-1, 1):
        told = problem(loading, offset=np.array([offset]))
        assert "d0 [4]: 1 copies exceed its memory of 4 elements" in told


def test_one_element_for_many():
    # A source dim that goes nowhere in the destination writes the same elements again and again.
    loading = Loading()
    d = loading.destination(3)
    loading.copy(loading.source(3), [(0, 3)], d, loading.destinations[d])
    told = problem(loading, high=np.array([[3, 2, 1, 1]]), strides=np.array([[1, 0, 0, 0]]))
    assert "0 are missing, 3 written more than once" in told


def test_what_is_loaded_otherwise_is_neither_missing_nor_to_be_written():
    loading = Loading()
    rows_of(loading.destination(6, 3), loading, (0, 6))
    loading.destination(5)
    assert "d1 [5]: of 5 elements 5 are missing" in problem(loading)
    check(loading, untraced=[1])
    assert "d0 [6, 3]: 1 copies write it, though it is loaded in another way" in problem(loading, untraced=[0, 1])


def test_scalars_and_tensors_without_elements():
    loading = Loading()
    scalar = loading.destination()
    loading.destination(0, 4)
    assert "d0 []: of 1 elements 1 are missing" in problem(loading)
    loading.fill(scalar, loading.destinations[scalar])
    check(loading)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_counts_are_those_of_writing_for_real(data):
    """Boxes of a tensor in any order of its dims, dropped and doubled: the same verdict as counting by hand."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = data.draw(st.integers(1, 2))
    for dim in order:
        strides[dim] = step
        step *= shape[dim] + data.draw(st.integers(0, 1))
    loading = Loading()
    d = loading.destination(*shape, strides=strides)
    target = loading.destinations[d]
    counts = torch.zeros(shape, dtype=torch.int64)
    cuts = [sorted({0, n, data.draw(st.integers(0, n))}) for n in shape]
    for cell in np.ndindex(*(len(c) - 1 for c in cuts)):
        box = tuple(slice(c[i], c[i + 1]) for c, i in zip(cuts, cell, strict=True))
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 1, 1, 0, 2]))):
            view = target[box].permute(data.draw(st.permutations(range(len(shape)))))
            loading.copy(loading.source(*view.shape), [(0, n) for n in view.shape], d, view)
            counts[box] += 1
    missing, doubled = int((counts == 0).sum()), int((counts > 1).sum())
    if not missing and not doubled:
        check(loading)
    else:
        expected = f"of {counts.numel()} elements {missing} are missing, {doubled} written more than once, 0 outside it"
        assert expected in problem(loading)
