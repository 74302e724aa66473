"""References to batches that lie on workers, against the batch itself."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.batch import FIELDS, Batch, BatchRef, Jagged, Piece, store
from hybrid_rl.errors import DataError
from tests.support.batches import assert_same
from tests.support.inside.data import pieces_of

INTS = st.integers(-(2**31), 2**31)


class Store:
    """Where blocks lie. Counts what is fetched."""

    def __init__(self) -> None:
        self.blocks: list[Batch] = []
        self.fetched: list[int] = []

    def put(self, block: Batch) -> int:
        self.blocks.append(block)
        return len(self.blocks) - 1

    def get(self, handle: int) -> Batch:
        self.fetched.append(handle)
        return self.blocks[handle]

    def keep(self, batch: Batch, known: Sequence[str] = ()) -> BatchRef:
        return store(batch, self.put, known).with_get(self.get)


def handles(ref: BatchRef) -> list[Any]:
    return [handle for piece in pieces_of(ref) for handle in piece.blocks]


def jagged(rows: list[list[Any]], dtype: torch.dtype = torch.int64) -> Jagged:
    return Jagged.from_rows(rows, dtype)


def batch_of(samples: Sequence[Sequence[int]]) -> Batch:
    """A batch with columns of every kind; a sample is its completion, with a group in front."""
    rows = [list(sample[1:]) for sample in samples]
    return Batch(
        {
            "completion_ids": jagged(rows),
            "rollout_logprobs": jagged(rows, torch.float32),
            "group": torch.tensor([sample[0] for sample in samples], dtype=torch.int64),
            "rewards": torch.tensor([len(row) / 2 for row in rows], dtype=torch.float64),
            "finish_reason": ["stop" if row else "abort" for row in rows],
            "prompt": [{"text": str(sample)} for sample in samples],
        }
    )


def extra_of(batch: Batch) -> Batch:
    """What a later call adds: a column of each kind."""
    ids = batch["completion_ids"]
    return Batch(
        {
            "old_logprobs": ids.with_values(-ids.values.float()),
            "mini_batch": batch["group"] % 3,
            "extra": [{"length": length} for length in ids.lengths.tolist()],
        }
    )


SAMPLES = st.lists(st.lists(INTS, min_size=1, max_size=4), min_size=1, max_size=5)
ONE = [[7, 10, 11], [3], [7, 12], [9, 13, 14, 15]]


# ------------------------------------------------------------------------------------------------ against the oracle


@settings(deadline=None, max_examples=40)
@given(ranks=st.lists(SAMPLES, min_size=1, max_size=4), data=st.data())
def test_whatever_is_done_to_it_it_is_the_batch(ranks: list[list[list[int]]], data: st.DataObject) -> None:
    """Any sequence of selections, joins, new columns, merges and trips through pickle, on blocks of several ranks."""
    blocks = Store()
    batch = Batch.concat([batch_of(samples) for samples in ranks])
    ref = BatchRef.concat([blocks.keep(batch_of(samples)) for samples in ranks])
    for action in data.draw(
        st.lists(st.sampled_from(["select", "concat", "merge", "with_columns", "pickle"]), max_size=6)
    ):
        size = batch.num_samples
        if action == "select":
            indices = data.draw(st.lists(st.integers(-size, size - 1), max_size=7) if size else st.just([]))
            batch, ref = batch.select(indices), ref.select(indices)
        elif action == "concat":
            times = data.draw(st.integers(1, 2))
            batch, ref = Batch.concat([batch] * times), BatchRef.concat([ref] * times)
        elif action == "merge" and "old_logprobs" not in ref.columns and "turn" not in ref.columns:
            extra = extra_of(batch)
            batch = batch.with_columns(**extra)
            ref = ref.merge(blocks.keep(batch, known=ref.columns))  # as a worker answers: with all of its columns
        elif action == "with_columns" and "turn" not in ref.columns:
            column = torch.arange(size)
            batch, ref = batch.with_columns(turn=column), ref.with_columns(turn=column)
        elif action == "pickle":
            ref = pickle.loads(pickle.dumps(ref)).with_get(blocks.get)
        assert ref.num_samples == batch.num_samples
        assert ref.columns == set(batch)
    assert_same(ref.load(), batch)
    assert_same(ref.resolve(blocks.get), batch)
    small = {name for name in batch if FIELDS[name].align == "sample"} | {"finish_reason"}
    assert set(ref) == small and len(ref) == len(small)
    assert_same(Batch(dict(ref)), Batch({name: batch[name] for name in small}))
    assert ref.group_rows() == batch.group_rows()


@settings(deadline=None, max_examples=40)
@given(samples=SAMPLES, data=st.data())
def test_what_is_split_and_joined_again_is_in_order(samples: list[list[int]], data: st.DataObject) -> None:
    """As the ranks of a call get their parts, and the driver puts their answers in order."""
    blocks, batch = Store(), batch_of(samples)
    ref = blocks.keep(batch)
    home = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(samples), max_size=len(samples))))
    parts = [(home == rank).nonzero()[:, 0] for rank in range(3)]
    answers = []
    for part in parts:
        mine = ref.select(part).resolve(blocks.get)  # ranks without samples among them
        assert_same(mine, batch.select(part))
        answers.append(blocks.keep(mine.with_columns(**extra_of(mine)), known=ref.columns))
    joined = ref.merge(BatchRef.concat(answers).select(torch.cat(parts).argsort()))
    assert_same(joined.resolve(blocks.get), batch.with_columns(**extra_of(batch)))


# ---------------------------------------------------------------------------------------------------- what lies where


def test_only_numbers_per_sample_are_in_the_reference() -> None:
    blocks = Store()
    ref = blocks.keep(batch_of(ONE))
    assert set(ref) == {"group", "rewards", "finish_reason"}
    assert ref.columns == {*ref, "completion_ids", "rollout_logprobs", "prompt"}
    assert ref["group"].tolist() == [7, 3, 7, 9] and ref["finish_reason"] == ["stop", "abort", "stop", "stop"]
    # Tensors and objects in blocks of their own.
    assert [set(block) for block in blocks.blocks] == [{"completion_ids", "rollout_logprobs"}, {"prompt"}]
    assert blocks.fetched == []
    assert "prompt" not in ref and "group" in ref
    first, advice, columns = repr(ref).splitlines()
    assert first == "BatchRef: 4 samples in 3 groups, reward 0.75 (0 to 1.5)" and "load()" in advice
    assert columns == "  columns: completion_ids, finish_reason, group, prompt, rewards, rollout_logprobs"


def test_objects_stay_where_they_are_unless_asked_for() -> None:
    blocks = Store()
    ref = BatchRef.concat([blocks.keep(batch_of(ONE)), blocks.keep(batch_of(ONE[:1]))])
    found = ref.resolve(blocks.get, objects=False)
    assert set(found) == ref.columns - {"prompt"}
    assert blocks.fetched == [0, 2]
    assert set(ref.resolve(blocks.get)) == ref.columns
    assert blocks.fetched == [0, 2, 0, 2, 1, 3]


def test_known_columns_are_not_kept_a_second_time() -> None:
    blocks, batch = Store(), batch_of(ONE)
    ref = blocks.keep(batch)
    answer = blocks.keep(batch.with_columns(**extra_of(batch)), known=ref.columns)
    assert answer.columns == {"old_logprobs", "mini_batch", "extra"}
    assert [set(block) for block in blocks.blocks[2:]] == [{"old_logprobs"}, {"extra"}]


def test_an_answer_that_adds_nothing() -> None:
    """A call that computed nothing for this algorithm, on two ranks: the batch is what it was."""
    blocks, batch = Store(), batch_of(ONE)
    ref = blocks.keep(batch)
    nothing = BatchRef.concat([blocks.keep(batch.select(part), known=ref.columns) for part in ([3, 1], [0, 2])])
    assert (nothing.num_samples, nothing.columns, len(blocks.blocks)) == (4, frozenset(), 2)
    nothing = pickle.loads(pickle.dumps(nothing)).select([2, 1, 3, 0])
    assert_same(ref.merge(nothing).load(), batch)
    assert nothing.merge(nothing).num_samples == 4


def test_blocks_that_no_sample_needs_are_let_go() -> None:
    """A block lives as long as its handle: selecting is what frees it."""

    class Handle:
        def __init__(self, batch: Batch) -> None:
            self.batch = batch

    def get(handle: Handle) -> Batch:
        return handle.batch

    ref = BatchRef.concat([store(batch_of([sample]), Handle) for sample in ONE])
    alive = [weakref.ref(handle) for handle in handles(ref)]
    assert len(alive) == 8
    chosen = ref.select([2, 2, 0])
    del ref
    gc.collect()
    assert [handle() is not None for handle in alive] == [True, False, True, False, True, False, True, False]
    assert len(handles(chosen)) == 4
    assert_same(chosen.resolve(get), batch_of(ONE).select([2, 2, 0]))
    del chosen
    gc.collect()
    assert not any(handle() for handle in alive)


def test_a_whole_block_in_order_is_not_copied() -> None:
    blocks, batch = Store(), batch_of(ONE)
    found = blocks.keep(batch).select(range(4)).resolve(blocks.get)
    assert found["completion_ids"].values.data_ptr() == batch["completion_ids"].values.data_ptr()


def test_no_samples_still_have_columns() -> None:
    """A rank may get nothing of a mini-batch: the dtypes come from one block, the others are let go."""
    blocks = Store()
    ref = BatchRef.concat([blocks.keep(batch_of(ONE)), blocks.keep(batch_of(ONE))])
    empty = ref.select([])
    assert empty.num_samples == 0 and len(handles(empty)) == 2
    assert_same(empty.load(), batch_of(ONE).select([]))
    assert_same(empty.select([]).load(), batch_of(ONE).select([]))
    blocks.fetched.clear()
    assert_same(BatchRef.concat([empty, ref.select([5])]).load(), batch_of(ONE).select([1]))
    assert blocks.fetched == [2, 3]  # nothing of the empty one
    assert_same(BatchRef.concat([empty, empty]).load(), batch_of(ONE).select([]))


# ------------------------------------------------------------------------------------------------------------ by hand


def test_a_piece_by_hand() -> None:
    """Samples in blocks (1, 0, 1) at rows (0, 1, 1)."""
    blocks = [Batch({"group": torch.tensor([10, 11])}), Batch({"group": torch.tensor([20, 21, 22])})]
    piece = Piece(("group",), (0, 1), torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1]))
    assert piece.resolve(blocks.__getitem__)["group"].tolist() == [20, 11, 21]
    chosen = piece.select(torch.tensor([2, 0, 2]))
    assert chosen.blocks == (1,)
    assert chosen.block.tolist() == [0, 0, 0] and chosen.row.tolist() == [1, 0, 1]
    assert chosen.resolve(blocks.__getitem__)["group"].tolist() == [21, 20, 21]


def test_pickle_leaves_the_way_to_fetch_behind() -> None:
    """It is another one in every process."""
    blocks = Store()
    ref = pickle.loads(pickle.dumps(blocks.keep(batch_of(ONE))))
    with pytest.raises(DataError, match="was not made by a worker group: it cannot be loaded here"):
        ref.load()
    assert_same(ref.with_get(blocks.get).load(), batch_of(ONE))


# ------------------------------------------------------------------------------------------------------------- refused


def test_columns_that_lie_elsewhere_or_nowhere() -> None:
    ref = Store().keep(batch_of(ONE))
    with pytest.raises(KeyError, match=r"column 'prompt' is kept on the workers; load\(\) brings the whole batch here"):
        ref["prompt"]
    with pytest.raises(KeyError, match="batch has no column 'values'; it has"):
        ref["values"]


@pytest.mark.parametrize("place", [0, slice(2), 1.5, torch.tensor([0, 1])])
def test_samples_are_not_taken_by_brackets(place: Any) -> None:
    batch = batch_of(ONE)
    for held in (batch, Store().keep(batch)):
        with pytest.raises(TypeError, match=r"by the names of its columns .* not by .*; samples\(\) lists its samples"):
            held[place]


@pytest.mark.parametrize("name", ["group", "completion_ids", "prompt"])
def test_no_column_is_overwritten_wherever_it_lies(name: str) -> None:
    blocks, batch = Store(), batch_of(ONE)
    ref = blocks.keep(batch)
    with pytest.raises(DataError, match=rf"columns \['{name}'\] are already in the batch"):
        ref.with_columns(**{name: batch[name]})
    with pytest.raises(DataError, match=rf"columns \['{name}'\] are already in the batch"):
        ref.merge(blocks.keep(Batch({name: batch[name]})))


def test_sizes_and_columns_that_do_not_fit() -> None:
    blocks, batch = Store(), batch_of(ONE)
    ref = blocks.keep(batch)
    with pytest.raises(DataError, match="columns differ in their number of samples"):
        ref.with_columns(turn=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match="references of 4 and 3 samples cannot be merged"):
        ref.merge(blocks.keep(extra_of(batch.select([0, 1, 2]))))
    with pytest.raises(DataError, match="references differ in their columns"):
        BatchRef.concat([ref, ref.with_columns(turn=torch.zeros(4, dtype=torch.int64))])
    piece = Piece(("prompt",), (0,), torch.zeros(4, dtype=torch.int64), torch.arange(4))
    with pytest.raises(DataError, match=r"columns \['prompt'\] are in the batch twice"):
        BatchRef({}, [piece, piece])
    with pytest.raises(DataError, match=r"one number of samples, not \[3, 4\]"):
        BatchRef({}, [piece], num_samples=3)
    with pytest.raises(DataError, match=r"one number of samples, not \[\]"):
        BatchRef({})
    with pytest.raises(DataError, match="dtype"):
        ref.with_columns(turn=torch.zeros(4))


@pytest.mark.parametrize("indices", [torch.tensor([True, False, True, False]), [0.0, 1.0]])
def test_a_mask_is_no_index(indices: Any) -> None:
    for batch in (batch_of(ONE), Store().keep(batch_of(ONE))):
        with pytest.raises(DataError, match="selected by int64 indices"):
            batch.select(indices)


@pytest.mark.parametrize("index", [4, -5])
def test_samples_that_do_not_exist(index: int) -> None:
    with pytest.raises(IndexError):
        Store().keep(batch_of(ONE)).select([index])
