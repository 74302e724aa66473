"""Reward processes: real hangs, real deaths, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from hybrid_rl.batch import SampleKey
from hybrid_rl.errors import ConfigError, RewardError
from hybrid_rl.rewards import RewardInput, RewardRunner, TrainerState, exact_match

pytestmark = pytest.mark.slow  # the file as a whole

NAN = float("nan")


def samples(*completions):
    return [
        RewardInput(SampleKey(10 + i), "p", text, [i], {"answer": text.upper()}) for i, text in enumerate(completions)
    ]


def reasons(result):
    return [(failure.key.trajectory, failure.reason) for failure in result.failures]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def pid_function():
    def pid(completions, log_extra):
        log_extra("pid", [os.getpid()] * len(completions))
        return [1.0] * len(completions)

    return pid


def test_closures_lambdas_coroutines_logs_and_state_through_two_processes():
    offset = 100

    def closure(completions, log_extra, log_metric, **kwargs):
        log_extra("pid", [os.getpid()] * len(completions))
        log_metric("size", len(completions))
        return [offset + float(text) for text in completions]

    async def slow(completions, trainer_state, **kwargs):
        await asyncio.sleep(0.01)
        return [trainer_state] * len(completions)

    functions = [closure, lambda answer: [len(a) for a in answer], slow]
    with RewardRunner(functions, num_processes=2) as runner:
        result = runner.score(samples("1", "22", "3"), 7)
        again = runner.score(samples("1", "22", "3"), 7)
    np.testing.assert_array_equal(result.values, [[101, 1, 7], [122, 2, 7], [103, 1, 7]])
    assert result.metrics == {"size": [(1.0, 1), (2.0, 2)]}
    np.testing.assert_array_equal(again.values, result.values)
    assert os.getpid() not in result.extras["pid"].values()
    assert list(result.extras["pid"]) == [SampleKey(10 + i) for i in range(3)]
    assert not result.failures


def test_processes_start_at_first_use_are_kept_and_end_with_close():
    with RewardRunner(pid_function(), num_processes=1) as runner:
        assert runner._loop is None
        pids = {runner.score(samples("a"), None).extras["pid"][SampleKey(10)] for _ in range(3)}
        assert len(pids) == 1
        assert is_alive(*pids)
    with pytest.raises(ProcessLookupError):  # reaped, not only dead
        os.kill(*pids, 0)
    runner.close()


def test_a_hanging_sample_is_killed_and_only_it_is_masked():
    def f(completions):
        while "hang" in completions:
            pass
        return [1.0] * len(completions)

    with RewardRunner([f, pid_function()], num_processes=1, timeout_seconds=0.5) as runner:
        before = runner.score(samples("a"), None).extras["pid"][SampleKey(10)]
        result = runner.score(samples("a", "hang", "b"), None)
        assert not is_alive(before)
        assert runner.score(samples("a"), None).rewards == [2.0]
    np.testing.assert_array_equal(result.rewards, [2.0, NAN, 2.0])
    assert reasons(result) == [(11, "timeout")]
    assert "killed" in result.failures[0].detail


def test_a_sample_that_ends_its_process_is_masked_and_the_process_replaced():
    def f(completions):
        if "exit" in completions:
            os._exit(3)
        if "crash" in completions:
            os.kill(os.getpid(), signal.SIGSEGV)
        return [1.0] * len(completions)

    with RewardRunner(f, num_processes=1) as runner:
        result = runner.score(samples("a", "exit", "b", "crash"), None)
        assert runner.score(samples("a"), None).rewards == [1.0]
    np.testing.assert_array_equal(result.rewards, [1.0, NAN, 1.0, NAN])
    assert reasons(result) == [(11, "died"), (13, "died")]
    assert "exit code 3" in result.failures[0].detail
    assert "SIGSEGV" in result.failures[1].detail


@pytest.mark.parametrize("score_by", ["sample", "group"])
def test_a_process_that_is_killed_once_costs_no_sample(tmp_path, score_by):
    mark = tmp_path / "mark"

    def f(completions):
        if "odd" in completions and len(completions) > 1:
            raise ValueError("odd")
        if mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [1.0] * len(completions)

    with RewardRunner(f, num_processes=1, score_by=score_by) as runner:
        for texts in (["a"], ["a", "b"], ["odd", "b"])[: 3 if score_by == "sample" else 2]:
            mark.touch()
            result = runner.score(samples(*texts), None)
            assert result.rewards.tolist() == [1.0] * len(texts) and not result.failures and not mark.exists()
            assert [number for number, _ in result.retried.values()] == [len(texts)]


def test_a_process_that_is_killed_while_it_loads_is_replaced(tmp_path):
    mark = tmp_path / "mark"
    mark.touch()

    def one(path):
        if os.path.exists(path):
            os.unlink(path)
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    class One:
        def __reduce__(self):
            return one, (str(mark),)

    value = One()
    with RewardRunner(lambda completions: [value] * len(completions), num_processes=1) as runner:
        assert runner.score(samples("a", "b"), None).rewards.tolist() == [1.0, 1.0] and not mark.exists()


def test_a_base_exception_is_reported_with_its_traceback_too():
    """It does not end the process; the collector of the samples ends the run because of it."""

    class Unforgiving(BaseException):
        pass

    def refuse(completions, log_extra):
        log_extra("pid", [os.getpid()] * len(completions))
        if "b" in completions:
            raise Unforgiving("by the function")
        return [1.0] * len(completions)

    with RewardRunner(refuse, num_processes=1) as runner:
        before, result, after = (runner.score(samples(text), None) for text in "abc")
    assert reasons(result) == [(10, "ended")]
    assert "Unforgiving: by the function" in result.failures[0].detail and "in refuse" in result.failures[0].detail
    assert before.extras["pid"] == after.extras["pid"]


def test_after_eight_samples_that_end_their_process_the_rest_is_given_up():
    """Also if other samples do not fail, so that the function is not at fault."""

    def f(completions):
        if "end" in completions:
            os._exit(1)
        return [1.0] * len(completions)

    with RewardRunner(f, num_processes=1) as runner:
        result = runner.score(samples("a", *["end"] * 12, "b"), None)
    np.testing.assert_array_equal(result.rewards, [1.0, *[NAN] * 13])
    assert ["not called again: 8 samples" in failure.detail for failure in result.failures] == [False] * 8 + [True] * 5


def test_killing_a_process_also_kills_what_the_function_started(tmp_path):
    pid_file = tmp_path / "pid"

    def f(completions):
        child = subprocess.Popen(["sleep", "3600"])
        pid_file.write_text(str(child.pid))
        child.wait()

    with RewardRunner(f, num_processes=1, timeout_seconds=1.0) as runner:
        assert reasons(runner.score(samples("a"), None)) == [(10, "timeout")]
    wait_until(lambda: not is_alive(int(pid_file.read_text())))


DAEMON = """
import os, sys, time
for _ in range(2):  # as daemons do: the child of a child that has ended, in a session of its own
    if os.fork():
        os._exit(0)
    os.setsid()
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(3600)
"""


def starting_daemons(folder, end):
    """A function that leaves a process behind, in a session of its own, with every call."""

    def f(completions):
        pid_file = folder / completions[0]
        subprocess.run([sys.executable, "-c", DAEMON, str(pid_file)], check=True)
        while not pid_file.exists():
            time.sleep(0.01)
        if completions[0] == "end":
            end()
        return [1.0] * len(completions)

    return f


needs_subreaper = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sessions of their own are not found")


@needs_subreaper
@pytest.mark.parametrize("how", ["close", "timeout", "exit", "killed"])
def test_a_daemon_that_a_function_started_ends_with_its_process(tmp_path, how):
    ends = {
        "close": lambda: None,
        "timeout": lambda: time.sleep(3600),
        "exit": lambda: os._exit(3),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    limit = 6.0 if how == "timeout" else None
    with RewardRunner(starting_daemons(tmp_path, ends[how]), num_processes=1, timeout_seconds=limit) as runner:
        runner.score(samples("a"), None)
        first = int((tmp_path / "a").read_text())
        assert is_alive(first)  # as long as the process, which may want it in the next call
        failures = reasons(runner.score(samples("end"), None))
        assert failures == {"close": [], "timeout": [(10, "timeout")]}.get(how, [(10, "died")])
        second = int((tmp_path / "end").read_text())
        assert is_alive(first) == is_alive(second) == (how == "close")
    assert not is_alive(first) and not is_alive(second)


@needs_subreaper
def test_a_daemon_does_not_outlive_a_killed_trainer(tmp_path):
    first = f"import subprocess; subprocess.run([sys.executable, '-c', {DAEMON!r}, {str(tmp_path / 'pid')!r}]); "
    script, [pid] = start_script(tmp_path, ["sleeps"], "time.sleep(3600)", first)
    wait_until(lambda: (tmp_path / "pid").exists())
    daemon = int((tmp_path / "pid").read_text())
    assert is_alive(daemon)
    script.kill()
    script.communicate()
    wait_until(lambda: not is_alive(pid) and not is_alive(daemon))


def test_submissions_of_single_samples_use_all_processes():
    def meet(completions, log_extra, answer):
        log_extra("pid", [os.getpid()])
        time.sleep(0.3)
        return [1.0]

    with RewardRunner(meet, num_processes=2) as runner:
        futures = [runner.submit(samples("a"), None) for _ in range(8)]
        pids = {runner.join(samples("a"), f.result(20)).extras["pid"][SampleKey(10)] for f in futures}
    assert len(pids) == 2


def test_close_during_a_call_answers_its_future(tmp_path):
    started = tmp_path / "started"

    def f(completions):
        started.write_text(str(os.getpid()))
        time.sleep(3600)

    runner = RewardRunner(f, num_processes=1)
    future = runner.submit(samples("a"), None)
    wait_until(lambda: started.exists() and started.read_text())
    runner.close()
    with pytest.raises(RewardError, match="closed before"):
        future.result(10)
    assert not is_alive(int(started.read_text()))


def test_a_function_that_cannot_travel_is_refused_at_construction():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"'f' cannot be sent.*lock"):

        def f(completions):
            return [lock]

        RewardRunner(f, num_processes=1)


class BreaksOnLoading:
    def __call__(self, completions):
        return [1.0]

    def __reduce__(self):
        return exec, ("raise ImportError('no such thing here')",)


def test_functions_that_cannot_be_loaded_raise_from_the_future():
    with (
        RewardRunner(BreaksOnLoading(), num_processes=1) as runner,
        pytest.raises(RewardError, match="no such thing here"),
    ):
        runner.score(samples("a"), None)


def test_long_texts_travel_whole_in_both_directions():
    def f(completions, log_extra):
        log_extra("text", completions)
        return [float(len(text)) for text in completions]

    inputs = samples("ab" * 1_500_000, "c")
    with RewardRunner(f, num_processes=1) as runner:
        result = runner.score(inputs, None)
    assert result.rewards.tolist() == [3e6, 1.0]
    assert result.extras["text"] == {SampleKey(10): inputs[0].completion, SampleKey(11): "c"}


def test_arguments_that_cannot_travel_raise_from_the_future():
    with (
        RewardRunner(lambda completions, trainer_state: [1.0], num_processes=1) as runner,
        pytest.raises(RewardError, match="trainer_state"),
    ):
        runner.score(samples("a"), (x for x in ()))


SCRIPT = """
    import os, re, sys, time
    from hybrid_rl.batch import SampleKey
    from hybrid_rl.rewards import RewardInput, RewardRunner

    def sleeps(completions, **kwargs):
        os.write(1, b"%d\\n" % os.getpid())
        {first}time.sleep(3600)

    def holds_the_gil(completions, **kwargs):
        os.write(1, b"%d\\n" % os.getpid())
        re.match('(a*)*b', 'a' * 60)

    runners = [RewardRunner(function, num_processes=1) for function in {functions}]
    for runner in runners:
        runner.submit([RewardInput(SampleKey(0), "p", "c", [], {{}})], None)
    {end}
"""


def start_script(tmp_path, functions, end, first=""):
    """A user's script without `if __name__ == "__main__"`; returns it and the processes of its reward functions. first:
    what `sleeps` does before it sleeps."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).format(functions=f"[{', '.join(functions)}]", end=end, first=first))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    script = subprocess.Popen([sys.executable, str(path)], **streams, text=True, env=env)
    return script, [int(script.stdout.readline()) for _ in functions]


def test_processes_do_not_outlive_a_killed_trainer(tmp_path):
    script, pids = start_script(tmp_path, ["sleeps", "holds_the_gil"], "time.sleep(3600)")
    assert len(set(pids)) == 2 and all(map(is_alive, pids))
    script.kill()
    script.communicate()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_processes_end_with_a_script_that_forgets_close(tmp_path):
    """The script ends while the function runs, however long that took to start."""
    script, [pid] = start_script(tmp_path, ["sleeps"], "sys.stdin.read()")
    script.stdout.close()
    script.stdin.close()
    assert script.wait(20) == 0
    wait_until(lambda: not is_alive(pid))


def test_a_reward_process_does_not_import_torch():
    """Not even if state and reward are the library's own."""

    def modules(completions, trainer_state):
        return [float("torch" in sys.modules or trainer_state is None and "numpy" in sys.modules)]

    with RewardRunner(modules, num_processes=1) as runner:
        assert runner.score(samples("a"), None).rewards == [0.0]
    with RewardRunner([modules, exact_match], num_processes=1) as runner:
        assert runner.score(samples("a"), TrainerState(1, 2, 0.5)).rewards == [0.0]


def test_a_fork_does_not_close_the_pool_of_its_parent():
    """Its atexit would wait for a lock that a thread of the parent held when it forked."""
    with RewardRunner(pid_function(), num_processes=1) as runner:
        before = runner.score(samples("a"), None).extras["pid"]
        with runner._lock:
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                runner.close()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert runner.score(samples("a"), None).extras["pid"] == before


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_fork_that_comes_back_from_a_function_is_reported(how):
    """Whichever of the two answers came first: the child's, which is another number, is never taken."""

    def forks(completions):
        child = os.fork()
        if child == 0:
            if how == "raises":
                raise ValueError("in the child")
            return [99.0] * len(completions)
        os.waitpid(child, 0)
        return [1.0] * len(completions)

    with RewardRunner(forks, num_processes=1) as runner:
        message = "reward function 'forks', or one .* forked its process, and the child came back .* os._exit"
        with pytest.raises(RewardError, match=message):
            runner.score(samples("a", "b"), None)


def test_a_fork_that_ends_itself_is_a_function_s_own_business():
    def forks(completions, log_extra):
        child = os.fork()
        if child == 0:
            sys.exit(7)
        os.waitpid(child, 0)
        log_extra("pid", [os.getpid()] * len(completions))
        return [2.0] * len(completions)

    with RewardRunner(forks, num_processes=1) as runner:
        found = [runner.score(samples("a", "b"), None) for _ in range(3)]
        assert [result.rewards.tolist() for result in found] == [[2.0, 2.0]] * 3
        assert len({result.extras["pid"][SampleKey(10)] for result in found}) == 1
