"""Jagged rows and batches: by hand, against lists of rows, and byte for byte through pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.batch import FIELDS, Batch, Jagged, lengths_to_offsets
from hybrid_rl.errors import DataError
from tests.support.batches import assert_same
from tests.support.inside.data import columns_of

ROWS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), min_size=1, max_size=6)


def jagged(rows: list[list[int]], dtype: torch.dtype = torch.int64) -> Jagged:
    return Jagged.from_rows(rows, dtype)


def rows_of(column: Jagged) -> list[list[Any]]:
    return [row.tolist() for row in column]


@pytest.fixture
def batch() -> Batch:
    """Four samples of three groups, one completion empty."""
    return Batch(
        {
            "prompt_ids": jagged([[1], [2, 3], [4], [5, 6, 7]]),
            "completion_ids": jagged([[10, 11], [], [12], [13, 14, 15]]),
            "rollout_logprobs": jagged([[-1, -2], [], [-3], [-4, -5, -6]], torch.float32),
            "completion_mask": jagged([[1, 0], [], [1], [1, 1, 1]], torch.bool),
            "group": torch.tensor([7, 3, 7, 9]),
            "rewards": torch.tensor([0.5, float("nan"), 1.0, 0.1], dtype=torch.float64),
            "prompt": ["a", "b", [{"role": "user"}], None],
        }
    )


# ------------------------------------------------------------------------------------------------------------ Jagged


def test_jagged_by_hand() -> None:
    column = jagged([[1, 2], [], [3]])
    assert column.offsets.tolist() == [0, 2, 2, 3]
    assert column.lengths.tolist() == [2, 0, 1]
    assert column.row_index().tolist() == [0, 0, 2]
    assert [column[i].tolist() for i in (0, 1, 2, -1, -3)] == [[1, 2], [], [3], [3], [1, 2]]
    assert rows_of(column.with_values(column.values * 10)) == [[10, 20], [], [30]]


def test_jagged_carries_inner_dims() -> None:
    column = Jagged(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 3]))
    assert rows_of(column) == [[[0, 1]], [[2, 3], [4, 5]]]
    assert rows_of(column.select(torch.tensor([1]))) == [[[2, 3], [4, 5]]]


def test_no_rows_at_all() -> None:
    column = Jagged.from_rows([], torch.int64)
    assert (len(column), list(column)) == (0, [])


@given(rows=ROWS, data=st.data())
def test_select_is_indexing_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    """Any indices, repeated, in any order, counted from the end as well."""
    indices = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8))
    chosen = jagged(rows).select(torch.tensor(indices, dtype=torch.int64))
    assert rows_of(chosen) == [rows[i] for i in indices]


@given(rows=ROWS, data=st.data())
def test_slices_are_those_of_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    """Also backwards, with steps, and beyond the ends."""
    ends = st.none() | st.integers(-12, 12)
    part = slice(data.draw(ends), data.draw(ends), data.draw(st.none() | st.sampled_from([-3, -1, 1, 2])))
    assert rows_of(jagged(rows)[part]) == rows[part]


def test_rows_by_numbers_that_are_no_ints_and_by_what_is_no_number() -> None:
    column = jagged([[1, 2], [], [3]])
    assert column[np.int64(-1)].tolist() == [3] and column[torch.tensor(0)].tolist() == [1, 2]
    for wrong in ("rewards", 1.0, [0, 1], None, torch.tensor([0, 1])):
        with pytest.raises(TypeError, match=r"a number or a slice, not by .* of type .*; select\("):
            column[wrong]  # type: ignore[call-overload]


@pytest.mark.parametrize("index", [2, -3])
def test_rows_that_do_not_exist(index: int) -> None:
    column = jagged([[1], [2]])
    with pytest.raises(IndexError):
        column[index]
    with pytest.raises(IndexError):
        column.select(torch.tensor([index]))


@pytest.mark.parametrize(
    "offsets",
    [[0, 2], [1, 3], [0, 2, 1, 3], [], [[0, 3]], [0.0, 3.0]],
    ids=["short", "not from 0", "falling", "none", "two dims", "float"],
)
def test_offsets_that_do_not_fit(offsets: list[Any]) -> None:
    kept = torch.tensor(offsets)
    with pytest.raises(DataError, match="offsets must"):
        Jagged(torch.arange(3), kept if offsets else kept.long())


def test_lengths_to_offsets() -> None:
    assert lengths_to_offsets([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert lengths_to_offsets(torch.tensor([], dtype=torch.int64)).tolist() == [0]


# ------------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize("name", FIELDS)
def test_field_table_is_complete(name: str) -> None:
    field = FIELDS[name]
    assert field.doc and field.writer in {"collector", "driver", "actor", "reference", "critic", "teacher"}
    assert (field.dtype is None) == (field.align == "object")
    if field.masked is not None:
        torch.tensor(field.masked, dtype=field.dtype)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "at least one column"),
        ({"reward": torch.zeros(1)}, "unknown column 'reward'; did you mean 'rewards'?"),
        ({"group": [1]}, "'group' must be a Tensor, not list"),
        ({"prompt": torch.zeros(1)}, "'prompt' must be a list, not Tensor"),
        ({"prompt_ids": torch.zeros(1)}, "'prompt_ids' must be a Jagged, not Tensor"),
        ({"rewards": torch.zeros(1)}, "'rewards' must have dtype torch.float64, not torch.float32"),
        ({"completion_mask": jagged([[1]])}, "'completion_mask' must have dtype torch.bool, not torch.int64"),
        ({"group": torch.tensor(3)}, r"'group' must be \[N\], not \[\]"),
        ({"group": torch.zeros(2, 2, dtype=torch.int64)}, r"'group' must be \[N\], not \[2, 2\]"),
        ({"group": torch.tensor([1, 2]), "prompt": ["a"]}, r"number of samples: \{'group': 2, 'prompt': 1\}"),
        (
            {"completion_ids": jagged([[1], [2, 3]]), "advantages": jagged([[1, 2], [3]], torch.float32)},
            "'advantages' is not aligned with completion_ids",
        ),
    ],
)
def test_columns_that_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Batch(columns)


def test_prompts_need_not_align_with_completions() -> None:
    batch = Batch({"prompt_ids": jagged([[1, 2], []]), "completion_ids": jagged([[], [1]])})
    assert batch.num_samples == 2


def test_batch_is_never_changed(batch: Batch) -> None:
    before = dict(batch)
    scored = batch.with_columns(trajectory=torch.arange(4))
    assert dict(batch) == before and set(scored) - set(batch) == {"trajectory"}
    assert scored["group"] is batch["group"]
    with pytest.raises(DataError, match=r"\['group'\] are already in the batch"):
        batch.with_columns(group=torch.arange(4))
    with pytest.raises(TypeError):
        batch["group"] = torch.arange(4)  # type: ignore[index]
    with pytest.raises(TypeError):
        columns_of(batch)["group"] = torch.arange(4)
    columns = {"group": torch.arange(4)}
    own = Batch(columns)
    columns["group"] = torch.zeros(4, dtype=torch.int64)
    assert own["group"].tolist() == [0, 1, 2, 3]


def test_with_columns_checks_the_whole_batch(batch: Batch) -> None:
    with pytest.raises(DataError, match="not aligned"):
        batch.with_columns(advantages=jagged([[1], [], [1], [1, 1, 1]], torch.float32))


def test_without(batch: Batch) -> None:
    assert set(batch) - set(batch.without("prompt", "rewards")) == {"prompt", "rewards"}
    with pytest.raises(DataError, match=r"\['values'\] are not in the batch"):
        batch.without("prompt", "values")


def test_missing_column_names_its_writer(batch: Batch) -> None:
    with pytest.raises(KeyError, match="no column 'ref_logprobs'; reference writes it"):
        batch["ref_logprobs"]


# --------------------------------------------------------------------------------------------- select, concat, groups


@pytest.mark.parametrize("as_index", [list, torch.tensor])
def test_select_takes_every_column_along(batch: Batch, as_index: Callable[[list[int]], Any]) -> None:
    chosen = batch.select(as_index([3, -3, 3]))
    assert rows_of(chosen["completion_ids"]) == [[13, 14, 15], [], [13, 14, 15]]
    assert rows_of(chosen["prompt_ids"]) == [[5, 6, 7], [2, 3], [5, 6, 7]]
    assert chosen["group"].tolist() == [9, 3, 9]
    assert chosen["prompt"] == [None, "b", None]


def test_select_nothing(batch: Batch) -> None:
    nothing = batch.select([])
    assert nothing.num_samples == 0 and set(nothing) == set(batch) and nothing.group_rows() == []


@pytest.mark.parametrize("mask", [torch.tensor([True, False, False, True]), torch.tensor([0.0, 3.0])])
def test_select_refuses_what_is_no_index(batch: Batch, mask: torch.Tensor) -> None:
    """A mask read as indices would silently be samples 1, 0, 0, 1."""
    with pytest.raises(DataError, match="int64 indices"):
        batch.select(mask)


def test_concat_undoes_a_split(batch: Batch) -> None:
    joined = Batch.concat([batch.select([0, 1]), batch.select([]), batch.select([2, 3])])
    assert_same(joined, batch)


def test_concat_refuses_other_columns(batch: Batch) -> None:
    with pytest.raises(DataError, match="differ in their columns"):
        Batch.concat([batch, batch.without("prompt")])


def test_group_rows_in_order_of_first_appearance(batch: Batch) -> None:
    assert batch.group_rows() == [[0, 2], [1], [3]]


# ------------------------------------------------------------------------------------------------------------- pickle


def addresses(batch: Batch) -> dict[str, int]:
    return {n: (c.values if isinstance(c, Jagged) else c).data_ptr() for n, c in batch.items() if n != "prompt"}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_in_band(batch: Batch, protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(batch, protocol))
    assert_same(batch, copy)
    assert list(copy) == list(batch)
    copy["group"].add_(1)
    assert batch["group"].tolist() == [7, 3, 7, 9]


def test_out_of_band_pickle_moves_no_bytes(batch: Batch) -> None:
    """The unpickled tensors lie at the addresses of the originals, and the stream holds none of their bytes."""
    big = batch.without("group").with_columns(group=torch.arange(4), trajectory=torch.arange(4))
    big = Batch.concat([big] * 2000)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(big.without("prompt"), protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 2500
    again = pickle.loads(stream, buffers=buffers)
    assert_same(big.without("prompt"), again)
    assert addresses(again) == addresses(big.without("prompt"))
    again["trajectory"][0] = 99
    assert big["trajectory"][0] == 99


def test_out_of_band_read_only_memory_is_not_written(batch: Batch) -> None:
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    received = [bytes(buffer.raw()) for buffer in buffers]
    copy = pickle.loads(stream, buffers=received)
    copy["group"].zero_()
    assert_same(batch, pickle.loads(stream, buffers=received))


def test_views_arrive_whole(batch: Batch) -> None:
    """A strided view, and one that starts inside its storage."""
    strided, inside = torch.arange(8)[::2], torch.arange(9)[5:]
    odd = Batch({"group": strided, "trajectory": inside})
    copy = pickle.loads(pickle.dumps(odd, 5))
    assert copy["group"].tolist() == [0, 2, 4, 6] and copy["trajectory"].tolist() == [5, 6, 7, 8]
