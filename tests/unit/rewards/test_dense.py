"""Rewards of single tokens: accepted forms, sums, and errors for wrong ones."""

import functools
import math
import re

import numpy as np
import pytest
import torch

from hybrid_rl.batch import SampleKey
from hybrid_rl.rewards import RewardInput, RewardRunner, dense_reward
from hybrid_rl.rewards.calling import CallLog, check_values

NAN = math.nan


def samples(*lengths):
    return [RewardInput(SampleKey(10 + i), "p", "c" * n, list(range(n)), {}) for i, n in enumerate(lengths)]


def score(functions, inputs, **options):
    with RewardRunner(functions, **options) as runner:
        return runner.score(inputs, None)


@dense_reward
def ascending(completion_ids):
    return [[0.5 * token for token in ids] for ids in completion_ids]


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def test_a_reward_is_the_sum_of_its_tokens_and_both_are_weighted():
    result = score([ascending, length], samples(3, 1, 0), weights=[2.0, -1.0])
    # Tokens 0, 1, 2 get 0, .5, 1: 1.5 in all. Twice that, less the length.
    np.testing.assert_array_equal(result.values, [[1.5, 3.0], [0.0, 1.0], [0.0, 0.0]])
    np.testing.assert_array_equal(result.rewards, [0.0, -1.0, 0.0])
    assert [row.tolist() for row in result.token_rewards] == [[0.0, 1.0, 2.0], [0.0], []]
    assert not result.failures


def test_numbers_and_none_may_be_mixed_with_sequences():
    @dense_reward
    def mixed(completion_ids):
        return [[1.0, 2.0], 5.0, None]

    result = score([mixed, length], samples(2, 3, 1))
    np.testing.assert_array_equal(result.values, [[3.0, 2.0], [5.0, 3.0], [NAN, 1.0]])
    np.testing.assert_array_equal(result.rewards, [5.0, 8.0, 1.0])
    assert [row.tolist() for row in result.token_rewards] == [[1.0, 2.0], [0.0] * 3, [0.0]]


@pytest.mark.parametrize(
    "row",
    [
        [1, 2.5],
        (True, np.float32(2.5)),
        np.array([1, 2.5]),
        torch.tensor([1, 2.5], requires_grad=True),
        torch.tensor([1, 2.5], dtype=torch.bfloat16),
    ],
    ids=["list", "tuple", "array", "tensor", "bfloat16"],
)
def test_rows_of_every_kind(row):
    checked = check_values([row], CallLog(1))
    assert checked.tokens == {0: [1.0, 2.5]} and checked.values == [3.5] and not checked.errors


@pytest.mark.parametrize(
    ("row", "reason", "says"),
    [
        ([1.0], "count", "returned 1 token rewards for a completion of 2 tokens"),
        ([], "count", "returned 0 token rewards"),
        ([1.0, NAN], "nan", "returned nan"),
        (torch.tensor([1.0, math.inf]), "nan", "returned inf"),
        ([1e308, 1e308], "nan", "add up to inf"),
        ([1.0, [2.0]], "type", r"\[2.0\] of type list is not a number"),
        ([1.0, None], "type", "None"),
        (["1", "2"], "type", "'1' of type str"),
        (np.ones((1, 2)), "type", r"array of shape \(1, 2\)"),
        ("12", "type", "of type str"),
    ],
)
def test_a_bad_row_fails_only_its_sample(row, reason, says):
    @dense_reward
    def f(completion_ids):
        return [row if len(ids) == 2 else [1.0] * len(ids) for ids in completion_ids]

    result = score(f, samples(2, 3))
    assert [(failure.key.trajectory, failure.reason) for failure in result.failures] == [(10, reason)]
    assert re.search(says, result.failures[0].detail)
    np.testing.assert_array_equal(result.rewards, [NAN, 3.0])
    assert [row.tolist() for row in result.token_rewards] == [[0.0, 0.0], [1.0, 1.0, 1.0]]


def test_an_error_of_a_function_without_the_mark_names_the_decorator():
    result = score(lambda completion_ids: [[0.5] * len(ids) for ids in completion_ids], samples(2))
    assert result.failures[0].reason == "type"
    assert "hybrid_rl.rewards.dense_reward" in result.failures[0].detail


def test_through_processes_objects_and_partials():
    # Defined here, so that they travel by value: the process need not import this file, and torch with it.
    @dense_reward
    def halves(completion_ids):
        return [[0.5 * token for token in ids] for ids in completion_ids]

    @dense_reward
    class Rated:
        def __call__(self, completion_ids, scale):
            return [[scale] * len(ids) for ids in completion_ids]

    rated = functools.partial(Rated(), scale=0.25)
    with RewardRunner([rated, halves], num_processes=1) as runner:
        assert runner.is_dense and [spec.is_dense for spec in runner.functions] == [True, True]
        result = runner.score(samples(2), None)
    assert result.token_rewards[0].tolist() == [0.25, 0.75]
    with RewardRunner(length) as runner:
        assert not runner.is_dense
