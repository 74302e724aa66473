"""Weighted sums, masking, and the judgement and report of failures."""

import math

import numpy as np
import pytest
import torch

from hybrid_rl.batch import SampleKey
from hybrid_rl.errors import RewardError
from hybrid_rl.rewards import (
    GivenReward,
    RewardFailure,
    RewardInput,
    RewardResult,
    RewardRunner,
    check_failure_share,
    format_failures,
)
from hybrid_rl.rewards.calling import CallLog, CallOutcome, call_sync, check_values, failed_call
from hybrid_rl.rewards.results import assemble, cause_of

SAMPLES = [RewardInput(SampleKey(key), "p", "c", [], {}) for key in (7, 3, 5)]


def outcome(*values, errors=None, extras=None, metrics=(), tokens=None):
    return CallOutcome(list(values), errors or {}, None, extras or {}, list(metrics), tokens or {})


def result_with(rewards, failures=()):
    rewards = np.array(rewards)
    return RewardResult(
        [SampleKey(i) for i in range(len(rewards))], rewards[:, None], rewards, list(failures), {}, {}, [], {}
    )


def test_weighted_sum_leaves_out_none_and_masks_failures():
    parts = [
        (0, (SAMPLES, outcome(1.0, 2.0, 3.0))),
        (1, (SAMPLES[:1], outcome(0.5))),
        (1, (SAMPLES[1:2], failed_call("raised", "boom"))),
        (1, (SAMPLES[2:], outcome(None))),
    ]
    result = assemble(["f", "g"], [2.0, -4.0], SAMPLES, parts)
    np.testing.assert_array_equal(result.rewards, [2.0 * 1.0 - 4.0 * 0.5, math.nan, 2.0 * 3.0])
    np.testing.assert_array_equal(result.values, [[1, 0.5], [2, math.nan], [3, math.nan]])
    assert [key.trajectory for key in result.keys] == [7, 3, 5]
    assert result.rewards.dtype == result.values.dtype == np.float64
    assert result.failures == [RewardFailure("g", SampleKey(3), "raised", "boom")]


def test_none_from_all_functions_masks_and_counts():
    parts = [(0, (SAMPLES, outcome(None, 0.0, None))), (1, (SAMPLES, outcome(None, None, 0.0)))]
    result = assemble(["f", "g"], [1.0, 1.0], SAMPLES, parts)
    np.testing.assert_array_equal(result.rewards, [math.nan, 0.0, 0.0])
    assert [(f.function, f.key.trajectory, f.reason) for f in result.failures] == [("all functions", 7, "none")]


def test_who_gave_no_reward_is_told():
    """Of environments only those that were asked; an agent alone is not called a function."""
    door, shop, agent = GivenReward("Door"), GivenReward("Shop"), GivenReward("agent", is_dense=True)
    asked = RewardInput(SampleKey(1), "p", "c", [], {}, given={"Shop": None})

    def told(*entries, sample=asked):
        with RewardRunner(list(entries)) as runner:
            (failure,) = runner.score([sample], None).failures
            with pytest.raises(RewardError) as raised:
                check_failure_share(1, 1, [failure], 0.0, step=3)
        return failure.detail, str(raised.value)

    detail, error = told(door, shop)
    assert detail == "get_reward() of Shop returned None"
    assert "(the agent: get_reward() of Shop returned None)" in error and "its environment" in error
    assert told(agent)[0].startswith("the agent (or rollout_func) gave no reward")
    assert "reward function" not in told(agent)[1]
    detail, error = told(lambda completions: [None], shop)
    assert detail == "<lambda> returned None for this sample; get_reward() of Shop returned None"
    assert "correct one of them" in error
    assert told(shop, sample=SAMPLES[0])[0] == "no get_reward() was asked, and there is no reward function"


def test_a_trajectory_has_the_sum_of_what_its_turns_got():
    """Trajectory 4: 1 + 2 of f and 10 of g, which says nothing of the first turn; 6: one turn failed; 8:
    nothing applies to one turn of it; 9: to none."""
    keys = [SampleKey(4, 1), SampleKey(6, 0), SampleKey(4, 0), SampleKey(6, 1), *(SampleKey(n, 0) for n in (8, 9))]
    keys.insert(5, SampleKey(8, 1))
    inputs = [RewardInput(key, "p", "c", [1], {}) for key in keys]
    f = outcome(2.0, 1.0, 1.0, 0.0, None, 3.0, None, errors={3: ("raised", "boom")}, tokens={1: [1.0]})
    parts = [(0, (inputs, f)), (1, (inputs, outcome(10.0, None, None, None, None, None, None)))]
    result = assemble(["f", "g"], [1.0, 0.5], inputs, parts, dense=[0])
    np.testing.assert_array_equal(result.rewards, [8, math.nan, 8, math.nan, 3, 3, math.nan])
    nan = math.nan
    np.testing.assert_array_equal(result.values, [[3, 10], [1, nan], [3, 10], [1, nan], [3, nan], [3, nan], [nan, nan]])
    assert [(failure.key, failure.reason) for failure in result.failures] == [((6, 1), "raised"), ((9, 0), "none")]
    assert [tokens.tolist() for tokens in result.token_rewards] == [[0.0]] * 7
    assert "(trajectory 6 turn 1)" in format_failures(result.failures[:1])
    late = assemble(["f", "g"], [1.0, 0.5], inputs, parts, dense=[0], late=[1])
    assert np.isnan(late.rewards).all() and late.values[2].tolist() == [3, 10]


@pytest.mark.parametrize(
    "returned",
    [
        [True, 2, 0.5],
        (np.True_, np.int64(2), np.float32(0.5)),
        np.array([1, 2, 0.5]),
        torch.tensor([1.0, 2.0, 0.5], requires_grad=True),
        list(torch.tensor([1.0, 2.0, 0.5], requires_grad=True)),
    ],
)
def test_numbers_of_every_kind_are_accepted(returned):
    checked = check_values(returned, CallLog(3))
    assert checked.values == [1.0, 2.0, 0.5] and not checked.errors and checked.failure is None


def test_bad_values_fail_only_their_sample():
    checked = check_values([1.0, math.nan, math.inf, "2", 10**400, None, [[1.0]]], CallLog(7))
    reasons = {position: reason for position, (reason, _) in checked.errors.items()}
    assert reasons == {1: "nan", 2: "nan", 3: "type", 4: "nan", 6: "type"}
    assert checked.values[0] == 1.0 and checked.values[5] is None


@pytest.mark.parametrize(
    ("returned", "reason"),
    [([1.0], "count"), ([1.0] * 3, "count"), (np.ones((2, 1)), "type"), (1.0, "type"), (None, "type"), ("ab", "type")],
)
def test_a_wrong_container_fails_the_call(returned, reason):
    assert check_values(returned, CallLog(2)).failure[0] == reason


def test_failure_share():
    failures = [RewardFailure("f", SampleKey(1), "raised", "Traceback ...\nValueError: the user's error")]
    check_failure_share(1, 4, failures, 0.25, step=3)
    check_failure_share(0, 0, [], 0.0, step=3)
    with pytest.raises(RewardError) as raised:
        check_failure_share(1, 4, failures, 0.2, step=3)
    parts = ["step 3", "1 of 4", "25.0%", "max_reward_failure_share=0.2", "reward f", "ValueError: the user's error"]
    for part in parts:
        assert part in str(raised.value)


def test_failure_report_groups_by_function_and_reason():
    failures = [RewardFailure("f", SampleKey(key), "raised", f"line {key}\nend") for key in range(10)]
    failures.insert(3, RewardFailure("g", SampleKey(42), "timeout", "too slow"))
    assert format_failures(failures) == (
        "reward f: 10 samples raised an exception (trajectories 0, 1, 2, 3, 4, 5, 6, 7, ...); first:\n"
        "  line 0\n"
        "  end\n"
        "reward g: 1 sample ran past reward_timeout_seconds (trajectory 42); first:\n"
        "  too slow"
    )
    assert format_failures([]) == ""


@pytest.mark.parametrize(("given", "weights"), [([1e308, 0.0], [1.0, 1.0]), ([1e301, -1e308], [9e200, 9e200])])
def test_the_error_of_an_infinite_sum_of_rewards_says_what_to_do(given, weights, recwarn):
    """Their mean and their advantages would silently be NaN. Other samples are not affected."""
    parts = [(index, (SAMPLES, outcome(value, 2.0, -2.0))) for index, value in enumerate(given)]
    result = assemble(["f", "g"], weights, SAMPLES, parts)
    assert np.isnan(result.rewards).tolist() == [True, False, False]
    (failure,) = result.failures
    assert (failure.key, failure.reason) == (SAMPLES[0].key, "large") and not recwarn
    told = f"the weighted sum of f={given[0]:g}, g={given[1]:g} is beyond 1e+302, so sums over a batch would be"
    assert failure.detail == f"{told} infinite; divide by a constant in the function, or lower reward_weights"


def test_the_cause_comes_first():
    """In the first line of an error; for a traceback it is the exception at its end."""

    def f(log_metric):
        log_metric("step", 1)

    detail = call_sync(f, {}, 1, ["log_metric"]).failure[1]
    cause = "ValueError: log_metric('step', ...) would hide the step of the record; choose another name"
    failures = [RewardFailure("f", SampleKey(1), "raised", detail)]
    with pytest.raises(RewardError) as raised:
        check_failure_share(1, 1, failures, 0.0, step=3)
    first, second, *rest = str(raised.value).splitlines()
    assert first.startswith(f"step 3: 1 of 1 samples (100.0%) have no reward (f: {cause}), more than")
    assert second == f"reward f: 1 sample raised an exception (trajectory 1); first: {cause}"
    assert rest[0] == "  Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("detail", "cause"),
    [
        ("returned nan; rewards must be finite", "returned nan; rewards must be finite"),
        ("too slow\nmore", "too slow"),
        ('Traceback ...\n  File "a", line 1, in f\n    x\n    ^\nValueError: one\n  two', "ValueError: one"),
        ("Traceback ...\nValueError: one", "ValueError: one"),
        ('Traceback ...\n  File "a"\nKeyError: 1\n\nDuring ...\n\nTraceback ...\n  File "b"\nTypeError', "TypeError"),
        ("", ""),
    ],
)
def test_the_cause_of_a_failure(detail, cause):
    assert cause_of(detail) == cause
