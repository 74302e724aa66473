"""RewardRunner inside the trainer's process: all ways in which a function can succeed or fail."""

import asyncio
import math
import threading
import time

import numpy as np
import pytest
import torch

from hybrid_rl.batch import SampleKey
from hybrid_rl.errors import ConfigError, DataError, RewardError
from hybrid_rl.rewards import RewardInput, RewardRunner

NAN = math.nan


def samples(*completions):
    return [
        RewardInput(SampleKey(10 + i), "p", text, [i], {"answer": text.upper()}) for i, text in enumerate(completions)
    ]


def run(functions, inputs, **options):
    with RewardRunner(functions, **options) as runner:
        return runner.score(inputs, "state")


def reasons(result):
    return [(failure.function, failure.key.trajectory, failure.reason) for failure in result.failures]


def number(completions, **kwargs):
    return [float(text) for text in completions]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
def test_one_raising_sample_masks_only_itself_and_its_traceback_is_kept(asynchronous):
    calls = []

    def recorded(completions):
        calls.append(len(completions))
        return number(completions)

    async def recorded_async(completions):
        return recorded(completions)

    function = recorded_async if asynchronous else recorded
    result = run([function, lambda completions: [1.0] * len(completions)], samples("1", "oops", "3"))
    np.testing.assert_array_equal(result.rewards, [2.0, NAN, 4.0])
    assert reasons(result) == [(function.__name__, 11, "raised")]
    assert calls == [3, 1, 1, 1]
    detail = result.failures[0].detail
    assert "could not convert string to float: 'oops'" in detail
    assert "in recorded" in detail
    assert "call_sync" not in detail and "call_async" not in detail


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize(("num_processes", "first"), [(0, 12), (1, 12), (2, 6)])
def test_a_function_that_is_down_is_not_asked_once_for_every_sample(tmp_path, asynchronous, num_processes, first):
    """12 samples: the call, and 8 of them alone. The errors are alike although each text names another sample."""
    asked = tmp_path / "asked"

    def down(completions):
        with open(asked, "a") as file:
            file.write(f"{len(completions)} ")
        raise ConnectionError(f"no answer for {completions}")

    async def down_async(completions):
        down(completions)

    result = run(down_async if asynchronous else down, samples(*"abcdefghijkl"), num_processes=num_processes)
    counts = sorted(map(int, asked.read_text().split()))
    assert counts == (8 * [1] + [12] if first == 12 else 12 * [1] + [6, 6])
    assert len(result.failures) == 12 and {failure.reason for failure in result.failures} == {"raised"}
    (name,) = result.retried
    number, detail = result.retried[name]
    assert number == (8 if first == 12 else 12) and "ConnectionError: no answer for ['a', 'b'" in detail
    assert ("not called again: 8 samples" in result.failures[-1].detail) == (first == 12)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
def test_one_good_sample_among_the_first_shows_that_samples_are_at_fault(asynchronous):
    def f(completions):
        return number(completions)

    async def f_async(completions):
        return f(completions)

    result = run(f_async if asynchronous else f, samples(*7 * ["bad"], "1", "bad", "2", "3"))
    np.testing.assert_array_equal(result.rewards, [*7 * [NAN], 1.0, NAN, 2.0, 3.0])
    (retried,) = result.retried.values()
    assert retried[0] == 11


def test_exceptions_at_other_lines_are_not_alike():
    def f(completions):
        if completions == ["a"]:
            raise ValueError("here")
        if completions != ["1"]:
            raise ValueError("there")
        return [1.0]

    result = run(f, samples("a", *8 * ["b"], "1"))
    assert result.rewards[-1] == 1.0 and len(result.failures) == 9


def test_only_repeated_calls_are_counted():
    assert run(number, samples("1", "2")).retried == {}
    assert run(number, samples("oops")).retried == {}
    assert run(number, samples("1", "oops"), score_by="group").retried == {}


@pytest.mark.parametrize(("error", "reason"), [(SystemExit, "ended"), (KeyboardInterrupt, "interrupt")])
@pytest.mark.parametrize("options", [{}, {"num_processes": 1}], ids=["thread", "process"])
def test_a_call_that_asks_the_program_to_end_is_not_repeated(error, reason, options):
    """It is not called again sample by sample."""

    def f(completions):
        raise error("by the function")

    result = run(f, samples("a", "b"), **options)
    assert reasons(result) == [("f", 10, reason), ("f", 11, reason)]
    assert result.failures[0].detail.endswith(f"{error.__name__}: by the function")


def test_logs_of_a_failed_call_are_dropped_and_those_of_its_repetition_kept():
    def f(completions, log_extra, log_metric):
        log_extra("text", completions)
        log_metric("calls", 1)
        return number(completions)

    result = run(f, samples("1", "oops", "3"))
    assert result.extras == {"text": {SampleKey(10): "1", SampleKey(12): "3"}}
    assert result.metrics == {"calls": [(1.0, 1), (1.0, 1)]}


class Unprintable:
    def __str__(self):
        raise ZeroDivisionError("no text")


def endless():
    found = []
    found.append(found)
    return found


UNWRITABLE = [{("a", 1): 2}, endless(), Unprintable(), [[Unprintable()]]]


@pytest.mark.parametrize("value", UNWRITABLE, ids=["tuple key", "holds itself", "no text", "deep"])
def test_a_value_that_no_record_can_hold_fails_only_its_sample(value):
    """It does not fail the run later, when the update is done and its records are written."""

    def f(completions, log_extra):
        log_extra("odd", [value if text == "b" else text for text in completions])
        return [1.0] * len(completions)

    result = run(f, samples("a", "b", "c"))
    assert reasons(result) == [("f", 11, "raised")]
    assert r"log_extra('odd', ...): value 0 of type" in result.failures[0].detail
    assert "cannot be written as JSON" in result.failures[0].detail
    np.testing.assert_array_equal(result.rewards, [1.0, NAN, 1.0])
    assert result.extras == {"odd": {SampleKey(10): "a", SampleKey(12): "c"}}


def test_later_changes_do_not_reach_what_was_logged():
    shared = [1]

    def f(completions, log_extra):
        log_extra("list", [shared] * len(completions))
        shared.append(shared)
        return [1.0] * len(completions)

    assert run(f, samples("a")).extras == {"list": {SampleKey(10): [1]}}


class Refusing(list):
    def tolist(self):
        raise Unforgiving("no list")


class Unforgiving(BaseException):
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("at", ["call", "values"])
def test_whatever_a_function_raises_is_its_own_failure(asynchronous, at):
    """A BaseException too, and what the returned values raise when they are read."""

    def f(completions):
        if at == "call":
            raise Unforgiving("by the function")
        return Refusing()

    async def g(completions):
        return f(completions)

    (failure,) = run(g if asynchronous else f, samples("a")).failures
    assert failure.reason == "ended" and "Unforgiving: " in failure.detail
    assert ("by the function" if at == "call" else "no list") in failure.detail


def test_wrong_count_fails_the_whole_call_without_another():
    calls = []

    def f(completions):
        calls.append(len(completions))
        return [1.0]

    assert reasons(run(f, samples("1", "2"))) == [("f", 10, "count"), ("f", 11, "count")]
    assert calls == [2]


def test_a_coroutine_from_a_plain_function_is_explained():
    async def inner():
        return [1.0]

    assert "async def" in run(lambda completions: inner(), samples("a")).failures[0].detail


def test_submit_returns_before_the_function_and_submissions_may_overlap():
    gate = threading.Event()

    def waits(completions):
        assert gate.wait(10)
        return number(completions)

    with RewardRunner(waits) as runner:
        first, second = runner.submit(samples("1"), None), runner.submit(samples("2"), None)
        assert not first.done()
        gate.set()
        assert runner.join(samples("1"), first.result(10)).rewards == [1.0]
        assert runner.join(samples("2"), second.result(10)).rewards == [2.0]


def test_without_samples_nothing_is_called():
    result = run(lambda completions: 1 / 0, [])
    assert result.values.shape == (0, 1)
    assert result.rewards.shape == (0,)


def test_coroutines_run_concurrently():
    """Those of two functions, in two submissions: none goes on before all four have come."""
    barriers = []

    async def meets(completions):
        barriers[:] = barriers or [asyncio.Barrier(4)]
        await asyncio.wait_for(barriers[0].wait(), 10)
        return number(completions)

    with RewardRunner([meets, meets]) as runner:
        futures = [runner.submit(samples(str(i)), None) for i in range(2)]
        scored = [runner.join(samples(str(i)), future.result(10)) for i, future in enumerate(futures)]
        assert [result.rewards[0] for result in scored] == [0.0, 2.0]


def test_a_cancellation_inside_an_async_function_is_its_own_failure():
    async def f(completions):
        raise asyncio.CancelledError

    assert reasons(run(f, samples("1"))) == [("f", 10, "raised")]


def test_a_hanging_coroutine_is_cancelled_and_only_its_sample_masked():
    cancelled = []

    async def f(completions):
        try:
            await asyncio.sleep(3600 if "hang" in completions else 0)
        except asyncio.CancelledError:
            cancelled.append(len(completions))
            raise
        return [1.0] * len(completions)

    result = run(f, samples("a", "hang", "b"), timeout_seconds=0.2)
    np.testing.assert_array_equal(result.rewards, [1.0, NAN, 1.0])
    assert reasons(result) == [("f", 11, "timeout")]
    assert cancelled == [3, 1]


def test_a_timeout_error_of_the_function_itself_is_raised_not_timeout():
    async def f(completions):
        raise TimeoutError("the judge did not answer")

    assert reasons(run(f, samples("a"), timeout_seconds=10)) == [("f", 10, "raised")]


def test_a_hanging_plain_function_is_left_behind_and_the_next_call_gets_a_fresh_thread():
    release = threading.Event()
    threads = []

    def f(completions):
        threads.append(threading.current_thread())
        if "hang" in completions:
            release.wait(30)
        return [1.0] * len(completions)

    with RewardRunner(f, timeout_seconds=0.2) as runner:
        hung = runner.score(samples("hang", "a"), None)
        assert reasons(hung) == [("f", 10, "timeout"), ("f", 11, "timeout")]
        assert "set reward_processes" in hung.failures[0].detail
        assert runner.score(samples("a"), None).rewards == [1.0]
        assert runner.score(samples("b"), None).rewards == [1.0]
        assert threads[0] is not threads[1]
        assert threads[1] is threads[2]
        release.set()
        threads[0].join(10)
        assert not threads[0].is_alive()


def test_an_answer_that_comes_too_late_is_dropped(caplog):
    """Silently, also if the runner is closed by then."""
    release = threading.Event()
    threads = []

    def f(completions):
        threads.append(threading.current_thread())
        release.wait(30)
        return [5.0] * len(completions)

    async def g(completions):
        return f(completions)

    result = run([f, g], samples("a"), timeout_seconds=0.1)
    release.set()
    for thread in threads:
        thread.join(10)
    assert reasons(result) == [("f", 10, "timeout"), ("g", 10, "timeout")]
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads) and not caplog.records


def test_calls_on_a_loop_that_is_left_behind_begin_again():
    """What was under way on a blocked event loop begins again on a fresh one."""
    release = threading.Event()
    started = []

    async def f(completions):
        started.append(completions[0])
        await asyncio.sleep(0.3)
        if completions == ["hang"] and started.count("hang") == 1:
            release.wait(30)
        await asyncio.sleep(0.3)
        return [1.0] * len(completions)

    with RewardRunner(f, timeout_seconds=1.0) as runner:
        hung = runner.submit(samples("hang"), None)
        time.sleep(0.25)
        other = runner.submit(samples("other"), None)
        assert reasons(runner.join(samples("hang"), hung.result(20))) == [("f", 10, "timeout")]
        assert runner.join(samples("other"), other.result(20)).rewards == [1.0]
        release.set()
    assert started == ["hang", "other", "other"]


def test_close_is_idempotent_answers_open_futures_and_refuses_new_work():
    release = threading.Event()

    async def waits(completions):
        await asyncio.sleep(3600)

    runner = RewardRunner([waits, lambda completions: release.wait(30)])
    future = runner.submit(samples("a"), None)
    threading.Timer(0.1, release.set).start()
    runner.close()
    runner.close()
    with pytest.raises(RewardError, match="closed before"):
        future.result(10)
    with pytest.raises(RewardError, match="is closed"):
        runner.submit(samples("a"), None)


def test_closing_ends_the_threads():
    async def f(completions):
        return [1.0]

    def reward_threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("reward")}

    before = reward_threads()
    run([f, lambda completions: [1.0]], samples("a"), timeout_seconds=1.0)
    deadline = time.monotonic() + 10
    while reward_threads() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not reward_threads() - before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [NAN]}, "the weight of reward function '<lambda>' is nan; use a finite number"),
        ({"weights": ["1"]}, "is '1'; use a finite"),
        ({"available_columns": ["answers"]}, "requires the parameter 'answer'"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RewardRunner(lambda completions, answer: [0.0], **options)


def test_repeated_keys_are_refused():
    with RewardRunner(number) as runner:
        for refuse in (lambda twice: runner.submit(twice, None), lambda twice: runner.join(twice, [])):
            with pytest.raises(DataError, match="repeated keys: 10; give each its own"):
                refuse(samples("1") * 2)


def test_a_function_that_changes_the_default_dtype_is_told_and_undone(caplog):
    def careless(completions):
        torch.set_default_dtype(torch.float64)
        return [torch.ones(()).item() for _ in completions]

    try:
        result = run([careless], samples("a", "b"))
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(result.rewards, [1, 1])
    assert "the reward function careless has set torch's default dtype to torch.float64" in caplog.text
