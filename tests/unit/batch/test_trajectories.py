"""Samples by trajectory: order, first and last turns, and keys that contradict each other."""

from __future__ import annotations

import pytest
import torch

from hybrid_rl.batch import Batch, SampleKey, Trajectories
from hybrid_rl.batch.trajectories import key_order, numbered, sample_keys
from hybrid_rl.errors import DataError

KEYS = [(9, 1), (4, 0), (9, 2), (7, 1), (9, 0), (7, 0)]


def batch_of(keys: list[tuple[int, int]], groups: list[int] | None = None) -> Batch:
    trajectory, turn = torch.tensor(keys).T
    columns = {"trajectory": trajectory, "turn": turn, "group": torch.tensor(groups or [0] * len(keys))}
    return Batch(columns)


def test_turns_are_found_wherever_they_stand() -> None:
    batch = batch_of(KEYS)
    found = Trajectories.of(batch)
    assert found.index.tolist() == [0, 1, 0, 2, 0, 2]  # in order of first appearance: 9, 4, 7
    assert found.order.tolist() == [4, 0, 2, 1, 5, 3]
    assert found.first.tolist() == [4, 1, 5] and found.last.tolist() == [2, 1, 3]
    assert found.num_trajectories == 3 and not found.are_in_order
    assert sample_keys(found.last_turns(batch)) == [(9, 2), (4, 0), (7, 1)]
    assert Trajectories.of(batch.select(found.order)).are_in_order


def test_samples_in_the_order_of_their_keys() -> None:
    batch = batch_of(KEYS)
    assert sample_keys(batch.select(key_order(batch))) == sorted(KEYS)


def test_without_the_columns_each_sample_is_a_trajectory() -> None:
    found = Trajectories.of(Batch({"group": torch.tensor([3, 3, 1])}))
    assert found.index.tolist() == found.first.tolist() == found.last.tolist() == [0, 1, 2] and found.are_in_order


def test_no_samples() -> None:
    empty = batch_of(KEYS).select([])
    found = Trajectories.of(empty)
    assert found.num_trajectories == 0 and found.are_in_order and not sample_keys(empty)


def test_keys_are_said_as_they_are_counted() -> None:
    assert [str(SampleKey(12)), str(SampleKey(12, 3))] == ["12", "12 turn 3"]
    assert max(SampleKey(12, 3), SampleKey(12)).turn == 3


def test_ids_are_numbered_as_they_come() -> None:
    assert numbered(torch.tensor([5, 2, 5, 9, 2])).tolist() == [0, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("keys", "groups", "message"),
    [
        ([(3, 0), (4, 0), (3, 0)], [0, 0, 0], "two samples are turn 0 of trajectory 3"),
        ([(3, 0), (4, 0), (4, 1)], [0, 1, 2], "trajectory 4 is in the groups 1 and 2"),
    ],
)
def test_keys_that_contradict_each_other(keys: list[tuple[int, int]], groups: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Trajectories.of(batch_of(keys, groups))
