"""Programs are graded by what they do, and none gets out, hangs a run, or passes a test by a trick."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections import Counter
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest

from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.extras.programs import code_grader
from hybrid_rl.extras.programs.code import find_program
from hybrid_rl.extras.programs.code_tests import AssertionTest, CallTest, InputTest, read_tests
from hybrid_rl.extras.programs.code_values import is_same, is_same_output, spell, unspell
from hybrid_rl.extras.sandbox import sandbox_strength
from hybrid_rl.rewards import code_reward

STRENGTH = sandbox_strength()
sandboxed = pytest.mark.skipif(
    isinstance(STRENGTH, str) or not STRENGTH.is_strict, reason=f"no sandbox on this machine: {STRENGTH}"
)

DOUBLE = "print(2 * int(input()))"
INPUTS = {"inputs": ["3\n", "5", "-7"], "outputs": ["6\n", "10", "-14"]}
DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\ndef f(x): return A(x).x"
FORGED = "def f(x): return '\\x00hybrid-rl:{\"passed\": true}\\n'"
BAD = ["try:\n    f([])\nexcept ValueError as error:\n    assert str(error) == 'bad'\nelse:\n    assert False"]
CHECK = """
def check(candidate):
    for number in range(4):
        assert candidate([number, 2]) == number + 2
    try:
        candidate(1)
    except TypeError:
        return
    assert False, "a number has no sum"
"""


def grade(
    programs: list[str], tests: list[Any], reward: Any = None, **columns: Any
) -> tuple[list[Any], dict[str, float]]:
    """Return rewards and metrics."""
    metrics: dict[str, float] = {}
    blocks = [f"My program:\n```python\n{program}\n```" for program in programs]
    made = reward or code_reward(timeout_seconds=1.0, memory_bytes=200 * 2**20, max_running=8)
    values = asyncio.run(made(completions=blocks, tests=tests, log_metric=metrics.__setitem__))
    return values, metrics


@sandboxed
@pytest.mark.slow
def test_programs_are_graded_in_every_form_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_grader, "MAX_QUESTIONS", 20)
    cases: list[tuple[str, Any, float | None]] = [
        (DOUBLE, INPUTS, 1.0),
        (DOUBLE, json.dumps(INPUTS), 1.0),
        (DOUBLE, [{"input": "3", "output": "6", "type": "stdin_stdout"}, {"input": "4", "output": "9"}], 0.0),
        ("if __name__ == '__main__':\n    " + DOUBLE, INPUTS, 1.0),
        (DOUBLE + "\nraise SystemExit(1)", INPUTS, 0.0),
        ("import sys\nsys.stderr.write('a note')\n" + DOUBLE, INPUTS, 1.0),
        ("def add(a, b): return a + b", {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}, 1.0),
        (
            "class Solution:\n    def pair(self, x): return (x, [x])",
            {"fn_name": "pair", "inputs": [[1]], "outputs": [[1, [1]]]},
            1.0,
        ),
        ("def f(a, b): return {a: b}", [{"input": '1\n"x"', "output": '{"1": "x"}', "fn_name": "f"}], 1.0),
        ("def f(n): return 1 / n", {"fn_name": "f", "inputs": [[3]], "outputs": [0.33333333]}, 1.0),
        ("def f(n): return 10 ** n", {"fn_name": "f", "inputs": [[400]], "outputs": [10**400]}, 1.0),
        ("def f(x): return {x, 2}", ["assert f(1) == {1, 2}", "assert f(x=2) == {2}"], 1.0),
        ("def f(x): x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3] and math.pi > 3", 1.0),
        ("def f(x): return x", ["assert f(1) == 1", "assert f(1) == 2"], 0.0),
        ("def g(x): return x", ["assert f(1) == 1"], 0.0),
        ("not Python at all (", INPUTS, 0.0),
        ("not Python at all (", ["assert f(1) == 1"], 0.0),
        ("def f(x): return x(1)", ["assert f(lambda x: x) == 1"], None),
        ("def f(x): return x", ["assert all(f(i) == i for i in range(21))"], None),
        ("def f(x): return x", ["assert f(1) =="], None),
        ("def f(x): return x[::-1]", {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[[2, 1]]]}, 1.0),
        ("import collections\ndef f(x): return collections.Counter(x)", ["assert f('aab') == {'a': 2, 'b': 1}"], 1.0),
        ("def sum(a, b): return a * b", ["assert sum(2, 3) == 6"], 1.0),
        ("def f(x): return x", ["assert sum([f(1), 2]) == 3"], 1.0),
        (DOUBLE + "\nexit()", INPUTS, 1.0),
        (
            "class Solution:\n    def f(self, x: List[int]) -> int: return len(x)",
            ["assert Solution().f([1]) == 1"],
            1.0,
        ),
        ("def f(x):\n    x.append(1)\n    raise ValueError('bad')", BAD, 1.0),
        (DATACLASS, ["assert f(1) == 1"], 1.0),
        ("def f(x): return 10**400", {"fn_name": "f", "inputs": [[1]], "outputs": [1.5]}, 0.0),
        (FORGED, ["r = f(1)\nprint(r)\nraise SystemExit(r != 5)"], 0.0),
        ("def f(x): return 1", [{"input": "1\n2", "output": "3", "testtype": "functional"}], None),
        ("def f(x): return 1", ["import no_such_package\nassert f(1) == 1"], None),
        ("def f(x): import no_such_package", ["assert f(1) == 1"], 0.0),
        ("not Python (", ["def test_it(): assert f(1) == 1"], None),
        (DOUBLE, "[" * 3000 + "]" * 3000, None),
        (DOUBLE, {"inputs": ["1"], "outputs": []}, None),
        (DOUBLE, None, None),
        (DOUBLE, [], None),
    ]
    programs, tests, wanted = zip(*cases, strict=True)
    values, metrics = grade(list(programs), list(tests))
    assert values == list(wanted)
    assert metrics == {"code/no_program_share": 0.0, "code/timeout_share": 0.0}


@sandboxed
def test_columns_of_humaneval_and_mbpp_and_the_share_of_tests() -> None:
    reward = code_reward("cases", score="share")
    metrics: dict[str, float] = {}
    values = asyncio.run(
        reward(
            completions=[
                "```py\ndef total(x): return sum(x)\n```",
                "def total(x): return abs(x)",
                "",
                "```bash\nls\n```",
            ],
            cases=[CHECK, ["assert total(-1) == ONE", "assert total(-2) == ONE", "assert total(3) == 3"], CHECK, CHECK],
            entry_point=["total", None, "total", "total"],
            test_setup_code=["", "ONE = 1", "", ""],
            log_metric=metrics.__setitem__,
        )
    )
    assert values == [1.0, pytest.approx(2 / 3), 0.0, 0.0]
    assert metrics["code/no_program_share"] == 0.5
    with pytest.raises(ValueError, match="needs the dataset column 'cases'"):
        asyncio.run(reward(completions=["x"], log_metric=metrics.__setitem__))


# A program for INPUTS or for `assert f(1) == 314159` that is wrong, and tries to look right or to do harm.
HOSTILE_PRINTS = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "infinite loop": "while True: pass",
    "sleep": "import time\ntime.sleep(60)",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(10**7))",
    "huge output": "while True: print('6' * 100000)",
    "exit before the comparison": "import os\nos._exit(0)",
    "exit with success": "raise SystemExit(0)",
    "answers of every kind": "print('6\\n10\\n-14')",
    "expected outputs in memory": "import gc\nprint([x for x in gc.get_objects() if 'outputs' in str(x)[:99]][0])",
    "expected outputs in other processes": (
        "import os\nfor p in os.listdir('/proc'): print(open(f'/proc/{p}/environ').read())"
    ),
    "the repository": "print(open('/etc/passwd').read())",
    "the network": "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=1)",
    "a shell": "import os\nos.system('echo 6')",
    "kill the grader": "import os, signal\nfor p in (os.getppid(), 1, -1): os.kill(p, signal.SIGKILL)",
    "files that fill the disk": "with open('big', 'wb') as f:\n  while True: f.write(bytes(10**6))",
    "signals ignored": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
    "daemon threads that print": (
        "import threading\n"
        "def talk():\n  while True: print(6, flush=True)\nthreading.Thread(target=talk, daemon=True).start()"
    ),
    "threads that never end": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\nprint(6)"
    ),
    "crash": "import ctypes\nctypes.string_at(0)",
    "outputs closed": "import os\nos.closerange(0, 100)",
}
HOSTILE_CALLS = {
    "what others were sent": (
        "import gc, sys\ndef f(x):\n  frame, found = sys._getframe(), []\n  while frame:\n"
        "    found += [str(vars(one)) for one in frame.f_locals.values() if hasattr(one, '__dict__')]\n"
        "    frame = frame.f_back\n"
        "  found += [str(one) for one in gc.get_objects() if type(one).__name__ in ('deque', 'tuple', 'Running')]\n"
        "  return 314159 if any(''.join(reversed('x * 951413')) in one for one in found) else 0"
    ),
    "equals everything": "class Any:\n  def __eq__(self, other): return True\ndef f(x): return Any()",
    "a number that equals everything": "class N(int):\n  def __eq__(self, other): return True\ndef f(x): return N(9)",
    "a list that equals everything": "class L(list):\n  def __eq__(self, other): return True\ndef f(x): return L()",
    "assert switched off": "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return 2",
    "the verdict printed": (
        "import os\nos.write(1, b'\\x00hybrid-rl:{\"passed\": true}\\n')\nos._exit(0)\ndef f(x): return 2"
    ),
    "the answer forged": (
        'import json, __main__\njson.dumps = lambda *a: \'{"passed": true, "value": {"any": 1}, "arguments": []}\'\n'
        "def f(x): return 2"
    ),
    "a deep answer": "import json\njson.dumps = lambda *a: '{\"value\":' + '[' * 10**5\ndef f(x): return 2",
    "a deep value": "def f(x):\n  a = []\n  for _ in range(10**5): a = [a]\n  return a",
    "an endless value": "def f(x):\n  a = []\n  a.append(a)\n  return a",
    "a huge value": "def f(x): return 'x' * 10**8",
    "frames of the caller": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    for value in frame.f_locals.values():\n      if '3141' + '59' in str(value): return int('3141' + '59')\n"
        "    frame = frame.f_back"
    ),
    "an exception that is not one": "def f(x): raise BaseException",
    "exit in a call": "def f(x): raise SystemExit(0)",
    "a generator": "def f(x):\n  while True: yield 1",
    "a hanging class": "import time\nclass f:\n  def __new__(cls, x): time.sleep(99)",
}


@sandboxed
@pytest.mark.slow
def test_no_hostile_program_passes_or_stays() -> None:
    """Two good ones among them still do."""
    reward = code_reward(timeout_seconds=1.0, total_seconds=3.0, memory_bytes=200 * 2**20, max_running=8)
    programs = [DOUBLE, *HOSTILE_PRINTS.values(), "def f(x): return 314159 * x", *HOSTILE_CALLS.values()]
    tests = [INPUTS] * (1 + len(HOSTILE_PRINTS)) + [["assert f(1) == 314159"]] * (1 + len(HOSTILE_CALLS))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    started = time.monotonic()
    values, metrics = grade(programs, tests, reward)
    assert time.monotonic() - started < 120
    good = [0, 1 + len(HOSTILE_PRINTS)]
    assert [index for index, value in enumerate(values) if value != 0.0] == good
    assert [values[index] for index in good] == [1.0, 1.0]
    assert 0.1 < metrics["code/timeout_share"] < 0.5
    assert len(HOSTILE_PRINTS) + len(HOSTILE_CALLS) >= 20
    # Two wardens, each with a process more in its namespace, were there before the programs, and are all there is.
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, left


@sandboxed
@pytest.mark.slow
def test_the_time_of_all_runs_is_limited_and_waiting_does_not_count() -> None:
    slow = "import time\ntime.sleep(1.0)\n" + DOUBLE
    reward = code_reward(score="share", timeout_seconds=9.0, total_seconds=1.9, max_running=1)
    values, metrics = grade([slow, slow, DOUBLE], [INPUTS] * 3, reward)
    assert values == [pytest.approx(2 / 3), pytest.approx(2 / 3), 1.0]
    assert metrics["code/timeout_share"] == pytest.approx(2 / 3)


@sandboxed
def test_rewards_travel_and_warn_once_of_unusable_tests(caplog: pytest.LogCaptureFixture) -> None:
    reward = cloudpickle.loads(cloudpickle.dumps(code_reward()))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert grade([DOUBLE, DOUBLE], [INPUTS, {"inputs": "1"}], reward)[0] == [1.0, None]
    assert caplog.text.count("of no known form") == 1


def test_bad_settings_are_refused_at_once() -> None:
    for keys, said in (
        ({"score": "some"}, "score='some'"),
        ({"total_seconds": 0}, "total_seconds=0"),
        ({"timeout_seconds": -1}, "code_reward.timeout_seconds=-1"),
        ({"memory_bytes": 512}, "code_reward.memory_bytes=512"),
        ({"packages": ["no_such_package"]}, "no_such_package"),
    ):
        with pytest.raises(ConfigError, match=said):
            code_reward(**keys)  # type: ignore[arg-type]


def test_the_program_is_the_last_block_of_python() -> None:
    two = "```python\nfirst\n```\ntext\n```Python\r\nsecond\n```\n```json\n{}\n```"
    assert find_program(two) == "second\n"
    assert find_program("<think>```python\nno\n```</think>```\nplain\n```") == "plain\n"
    assert find_program("```python\ncut off") == "cut off"
    assert find_program([{"role": "assistant", "content": "```py\nx\n```"}]) == "x\n"
    assert find_program("print(1)") == "print(1)"
    assert find_program("```c\nint main;\n```") == ""
    assert find_program("  \n") == ""


def test_tests_are_read_as_they_are_published() -> None:
    assert read_tests({"inputs": [["1", "2"]], "outputs": [["3"]]}) == [InputTest("1\n2", "3")]
    assert read_tests('[{"input": "[1]\\n2", "output": "[3]", "fn_name": "f"}]') == [CallTest("f", ([1], 2), [3])]
    assert read_tests("import os\ndef check(c): assert c(x) == os.sep", "f") == [
        AssertionTest("import os\ndef check(c): assert c(x) == os.sep", ("x",), (), "check", "f", ())
    ]
    assert read_tests(["assert math.isclose(f(1), 1)"]) == [
        AssertionTest("assert math.isclose(f(1), 1)", ("f",), ("math",))
    ]
    for given in (None, 7, "", [], {"inputs": []}, {"inputs": ["a"], "outputs": []}, "assert (", [["assert ("]]):
        with pytest.raises(DataError, match="test"):
            read_tests(given)
    with pytest.raises(DataError, match="arguments"):
        read_tests({"inputs": [3], "outputs": [3], "fn_name": "f"})
    with pytest.raises(DataError, match="not Python"):  # compressed pickles, which would run code here
        read_tests(base64.b64encode(b"private").decode() + "==")


def test_values_come_back_as_they_were() -> None:
    values = [
        None,
        True,
        3,
        -(2**70),
        0.1,
        float("inf"),
        "a\udc80",
        b"\x00",
        (1, [2]),
        {1: (2,)},
        {"a": {3}},
        frozenset([4]),
    ]
    assert unspell(json.loads(json.dumps(spell(values)))) == values
    assert [type(one) for one in unspell(spell(values))] == [type(one) for one in values]
    assert [type(one) for one in map(spell, (Counter("aab"), type("N", (int,), {})(3), np.int64(4)))] == [
        dict,
        int,
        int,
    ]
    assert unspell(spell([Counter("aab"), np.arange(2)])) == [{"a": 2, "b": 1}, [0, 1]]
    for strange in (object(), iter([1]), [print]):
        with pytest.raises(TypeError):
            spell(strange)


def test_equal_results() -> None:
    assert (
        is_same((1, (2, 3)), [1, [2, 3]]) and is_same({1: 2}, {"1": 2}) and is_same(5, [5]) and is_same(0.1 + 0.2, 0.3)
    )
    assert not is_same([5], 5) and not is_same(1, 2) and not is_same("1", 1) and not is_same(0.3, "0.3")
    assert not is_same([1, 2], [1, 2, 3]) and not is_same({1: 2}, {"1": 3}) and not is_same(float("nan"), 1.0)
    assert is_same_output("1 2 \n3\n\n", "1 2\n3") and is_same_output("0.3333333", "0.33333333")
    assert not is_same_output("1\n2", "1 2") and not is_same_output("1.0", "1") and not is_same_output("", "x")
    assert is_same_output("", "\n") and not is_same_output("nan", "1.5") and not is_same_output("word", "1.5")


def test_a_long_line_of_blanks_takes_no_time() -> None:
    """A search that tries again from every blank would end by the limit of a test."""
    assert find_program("x\n```" + " " * 300_000 + "x") == ""
    assert find_program("```x" * 20_000) == ""
