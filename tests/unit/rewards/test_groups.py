"""Whole groups in one call: with threads, coroutines and processes, and when a call fails."""

import asyncio
import math

import numpy as np
import pytest

from hybrid_rl.batch import SampleKey
from hybrid_rl.rewards import RewardInput, RewardRunner, group_reward

NAN = math.nan


def groups(*sizes):
    inputs = [(group, place) for group, size in enumerate(sizes) for place in range(size)]
    return [RewardInput(SampleKey(10 * g + p), f"prompt {g}", str(p), [p], {}, group=g) for g, p in inputs]


@group_reward
def rank_in_group(prompts, completions):
    assert len(set(prompts)) == 1, prompts
    return [sorted(completions).index(text) / len(completions) for text in completions]


async def _async(prompts, completions):
    await asyncio.sleep(0)
    return rank_in_group(prompts, completions)


@pytest.mark.parametrize(("function", "num_processes"), [(rank_in_group, 0), (_async, 0), (rank_in_group, 2)])
def test_every_call_holds_one_whole_group(function, num_processes):
    with RewardRunner(function, score_by="group", num_processes=num_processes) as runner:
        inputs = groups(3, 2, 1)
        mixed = [inputs[i] for i in (0, 3, 1, 5, 2, 4)]
        result = runner.score(mixed, None)
    assert [key.trajectory for key in result.keys] == [0, 10, 1, 20, 2, 11] and not result.failures
    np.testing.assert_allclose(result.rewards, [0, 0, 1 / 3, 0, 2 / 3, 1 / 2])


@pytest.mark.parametrize(("is_async", "num_processes"), [(False, 0), (True, 0), (False, 1)])
def test_a_call_that_fails_masks_its_group_and_is_not_cut(is_async, num_processes):
    def f(completions, prompts, log_metric):
        log_metric("calls", len(completions))
        if prompts[0] == "prompt 1" and "1" in completions:
            raise ValueError("cannot compare")
        return [1.0] * len(completions)

    async def g(completions, prompts, log_metric):
        return f(completions, prompts, log_metric)

    with RewardRunner([g if is_async else f], score_by="group", num_processes=num_processes) as runner:
        result = runner.score(groups(2, 3), None)
    np.testing.assert_array_equal(result.rewards, [1.0, 1.0, NAN, NAN, NAN])
    assert [failure.key.trajectory for failure in result.failures] == [10, 11, 12]
    # Only the whole call of the first group counts: nothing was tried one by one.
    assert result.metrics == {"calls": [(2.0, 2)]}
