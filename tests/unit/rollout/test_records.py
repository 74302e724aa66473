"""Samples as a person reads them."""

import math

import pytest
import torch

from hybrid_rl.batch import Batch, Jagged, SampleKey
from hybrid_rl.rollout.sample_records import sample_records


def batch(extra=({}, {})):
    return Batch(
        {
            "group": torch.tensor([4, 4]),
            "trajectory": torch.tensor([8, 9]),
            "turn": torch.tensor([0, 1]),
            "prompt": ["1+1=", [{"role": "user", "content": "2"}]],
            "completion": ["2", ""],
            "rewards": torch.tensor([2.5, math.nan], dtype=torch.float64),
            "function_rewards": [[2.0, 0.5], [math.nan, 1.0]],
            "finish_reason": ["stop", "length"],
            "extra": list(extra),
        }
    )


def test_one_record_per_sample():
    """What has no reward is null: JSON has no NaN. Groups and trajectories count from the step's first."""
    assert sample_records(3, batch(), ["exact", "short"], (3, 6)) == [
        {
            "step": 3,
            "group": 1,
            "trajectory": 2,
            "turn": 0,
            "prompt": "1+1=",
            "completion": "2",
            "reward": 2.5,
            "rewards": {"exact": 2.0, "short": 0.5},
            "finish_reason": "stop",
        },
        {
            "step": 3,
            "group": 1,
            "trajectory": 3,
            "turn": 1,
            "prompt": [{"role": "user", "content": "2"}],
            "completion": "",
            "reward": None,
            "rewards": {"exact": None, "short": 1.0},
            "finish_reason": "length",
        },
    ]


def test_what_a_function_logged_for_some_samples_is_a_column_of_all():
    records = sample_records(1, batch([{"b": 1}, {"a": 2}]), ["exact", "short"], (0, 0))
    assert [record["extra"] for record in records] == [{"a": None, "b": 1}, {"a": 2, "b": None}]
    assert list(records[0]["extra"]) == ["a", "b"]


def test_no_samples_no_records():
    assert sample_records(1, batch().select([]), ["exact", "short"], (0, 0)) == []


def test_names_that_are_not_those_of_the_rewards():
    with pytest.raises(ValueError):
        sample_records(1, batch(), ["exact"], (0, 0))


def test_columns_of_the_dataset_are_bounded():
    rows = [{"answer": "2", "long": "x" * 3000, "ids": [1, 2], "set": {1}, "nan": math.nan}, {}]
    first, second = sample_records(1, batch().with_columns(row=rows), ["exact", "short"], (0, 0))
    assert first["row"]["answer"] == "2" and first["row"]["ids"] == [1, 2] and first["row"]["set"] == '"{1}"'
    assert first["row"]["long"] == "x" * 2000 + "... (3,000 characters)" and first["row"]["nan"] == "NaN"
    assert "row" not in second and "advantage" not in second


def test_the_advantage_is_the_mean_over_what_the_policy_made():
    advantages = Jagged.from_rows([[1.0, 2.0, 9.0], [5.0]], torch.float32)
    mask = advantages.with_values(torch.tensor([True, True, False, False]))
    made = batch().with_columns(advantages=advantages, completion_mask=mask)
    records = sample_records(1, made, ["exact", "short"], (0, 0), {SampleKey(9, 1): {"text": ["a"]}})
    assert [record["advantage"] for record in records] == [1.5, None]
    assert [record.get("token_values") for record in records] == [None, {"text": ["a"]}]
