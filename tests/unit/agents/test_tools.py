"""Tools: which calls are made, with what, and what the policy is told."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from hybrid_rl.agents import calls as calls_module
from hybrid_rl.agents.calls import Caller
from hybrid_rl.agents.tool_calling import call_sync
from hybrid_rl.agents.tools import Functions, fits, with_integers
from hybrid_rl.errors import AgentError
from tests.support.inside.agents import forget_loop, limit_tool


def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: one
        b: other
    """
    return a + b


async def wait_for(name: str) -> str:
    """Wait.

    Args:
        name: of whom
    """
    order.append(f"begin {name}")
    await asyncio.sleep(0.01)
    order.append(f"end {name}")
    return name


def note(name: str) -> str:
    """Note.

    Args:
        name: what
    """
    order.append(name)
    return ""


def fail(kind: Literal["value", "exit", "empty", "image"]) -> Any:
    """Fail.

    Args:
        kind: how (choices: ["value", "exit", "empty", "image"])
    """
    if kind == "exit":
        raise SystemExit(3)
    if kind == "value":
        raise ValueError("Game over.")
    if kind == "empty":
        raise KeyError
    return [{"type": "image", "image": "..."}]


def blocks() -> list[dict[str, str]]:
    """Give text blocks."""
    return [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def rows() -> list[tuple[int, str]]:
    """Give rows of a database."""
    return [(1, "a"), (2, "b")]


def hang(seconds: float) -> str:
    """Hang.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


async def hang_async(seconds: float, blocks_loop: bool) -> str:
    """Hang.

    Args:
        seconds: how long
        blocks_loop: whether everything waits
    """
    if blocks_loop:
        time.sleep(seconds)
    await asyncio.sleep(seconds)
    return "done"


def isolated() -> dict[str, Any]:
    """Functions that travel by value: a process that had to import this file would import torch."""

    def pid() -> int:
        """Tell the process."""
        return os.getpid()

    def die() -> str:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def alarmed() -> str:
        """Limit itself by a signal, as scripts of TRL do."""
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(5)
        signal.alarm(0)
        return str(os.getpid())

    def fail(kind: str) -> str:
        """Fail.

        Args:
            kind: how
        """
        raise ValueError(kind)

    def hang(seconds: float) -> str:
        """Hang.

        Args:
            seconds: how long
        """
        time.sleep(seconds)
        return "done"

    def blocks() -> list[dict[str, str]]:
        """Give text blocks."""
        return [{"type": "text", "text": "one"}]

    return {function.__name__: function for function in (pid, die, alarmed, fail, hang, blocks)}


order: list[str] = []
ALL = [add, wait_for, note, fail, blocks, rows, hang, hang_async]


class Shared:
    """An object whose method is a tool of all trajectories."""

    total = 0

    def push(self, n: int) -> int:
        """Push.

        Args:
            n: how far
        """
        self.total += n
        return self.total


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller(timeout_seconds=0.15)
    yield made
    made.close()


def call(name: str, arguments: Any = None, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **others}


def answers(functions: Functions, *asked: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    counts: Counter[str] = Counter()
    messages = asyncio.run(functions.tools.answer(asked, counts))
    return messages, {name.removeprefix("tool_"): number for name, number in counts.items() if number}


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        (call("add", {"a": 2, "b": 3}), "5"),
        (call("add", {"a": 2}), "3"),
        (call("add", '{"a": 2}'), "3"),
        (call("add", {"a": 2.0}), "3"),  # an integer, says JSON schema, and the function gets an int
        (call("rows"), "[(1, 'a'), (2, 'b')]"),
        (call("blocks", {}), [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]),
    ],
)
def test_results_become_text(caller: Caller, asked: dict[str, Any], content: Any) -> None:
    messages, counts = answers(Functions(ALL, caller), asked)
    assert messages == [{"role": "tool", "name": asked["function"]["name"], "content": content}]
    assert counts == {"calls": 1}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (call("fail", {"kind": "value"}), "{'error': 'Game over.'}"),  # TRL's form, to the letter
        (call("fail", {"kind": "exit"}), "{'error': '3'}"),
        (call("fail", {"kind": "empty"}), "{'error': 'KeyError'}"),
        (call("fail", {"kind": "image"}), "images, audio and video cannot be used yet"),
        (call("fail", {"kind": "other"}), "'kind' must be one of 'value', 'exit', 'empty', 'image', not 'other'"),
        (call("subtract", {"a": 1}), "Tool subtract not found. The tools are: add, wait_for"),
        (call("add", {}), "'a' is missing"),
        (call("add", {"a": 1, "c": 2}), "there is no argument 'c' (it takes a: integer, b: integer)"),
        (call("add", {"a": "1"}), "'a' must be integer, not '1'"),
        (call("add", {"a": True}), "'a' must be integer, not True"),
        (call("add", [1]), "must be an object of names and values, not [1]"),
        (call("add", "{a: 1}"), "the arguments are not valid JSON"),
        (call("hang", {"seconds": 0.4}), "no answer within 0.15 s"),
        (call("hang_async", {"seconds": 9, "blocks_loop": False}), "no answer within 0.15 s (it was cancelled)"),
        (call(["add"]), "Tool ['add'] not found"),  # type: ignore[arg-type]
        ({"type": "retrieval"}, "Unsupported tool call type: retrieval"),
        ("add", "Unsupported tool call type: str"),
    ],
)
def test_what_fails_is_told_to_the_policy(caller: Caller, asked: Any, says: str) -> None:
    messages, counts = answers(Functions(ALL, caller), asked)
    assert messages[0]["role"] == "tool"
    assert says in messages[0]["content"]
    timeouts = {"timeouts": 1} if "within" in says else {}
    assert counts == {"calls": 1, "failures": 1} | timeouts


def test_plain_tools_run_in_order_and_then_all_async_ones_together(caller: Caller) -> None:
    order.clear()
    asked = [call("wait_for", {"name": "a"}), call("note", {"name": "b"}), call("wait_for", {"name": "c"}, id="x1")]
    asked.append(call("note", {"name": "d"}))
    messages, _ = answers(Functions(ALL, caller), *asked)
    assert order == ["b", "d", "begin a", "begin c", "end a", "end c"]
    assert [message["content"] for message in messages] == ["a", "", "c", ""]
    assert [message.get("tool_call_id") for message in messages] == [None, None, "x1", None]


def test_tools_of_many_trajectories_wait_at_once(caller: Caller) -> None:
    """As many threads as calls: 40 sleeps take the time of one."""
    caller.timeout_seconds = 1.9  # less than they take one after another
    tools = Functions([hang], caller).tools

    async def together() -> list[Any]:
        return await asyncio.gather(*(tools.answer([call("hang", {"seconds": 0.05})], Counter()) for _ in range(40)))

    assert [message["content"] for [message] in asyncio.run(together())] == ["done"] * 40


def test_an_async_tool_that_blocks_its_loop_stops_no_other_for_good(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "CANCEL_SECONDS", 0.05)
    monkeypatch.setattr(calls_module, "ANSWER_SECONDS", 0.05)
    functions = Functions(ALL, caller)
    messages, counts = answers(functions, call("hang_async", {"seconds": 0.5, "blocks_loop": True}))
    assert "a blocking call inside `async def`" in messages[0]["content"]
    assert counts == {"calls": 1, "failures": 1, "timeouts": 1}
    assert answers(functions, call("wait_for", {"name": "a"}))[0][0]["content"] == "a"


def test_a_coroutine_that_refuses_to_be_cancelled_is_left_alone(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing blocks the event loop, so that the others go on there."""
    monkeypatch.setattr(calls_module, "CANCEL_SECONDS", 0.05)
    cancelled = []

    async def stubborn() -> None:
        while len(cancelled) < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(1)

    loop = caller.loop
    outcome = asyncio.run(caller.run(stubborn))
    assert "but may go on: let asyncio.CancelledError pass" in str(outcome.error)
    deadline = time.monotonic() + 10
    while len(cancelled) < 2 and time.monotonic() < deadline:  # the second request is on its way to the loop
        time.sleep(0.01)
    assert caller.loop is loop and len(cancelled) == 2


def test_a_call_on_an_event_loop_that_is_given_up_fails_alone(caller: Caller) -> None:
    """Another call blocked the loop: what waits there is cancelled with it, but its trajectory is not."""
    caller.timeout_seconds = 60

    async def main() -> Any:
        asked = asyncio.ensure_future(caller.run(lambda: asyncio.sleep(50)))
        await asyncio.sleep(0.05)
        forget_loop(caller).stop()
        return await asked

    outcome = asyncio.run(main())
    assert isinstance(outcome.error, calls_module.CallTimeoutError)
    assert "another tool blocked the event loop" in str(outcome.error)


def test_whatever_a_tool_raises_or_returns_the_policy_is_told(caller: Caller) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def mute() -> str:
        """Raise."""
        raise Mute

    def forgets() -> Any:
        """Return a coroutine."""
        return wait_for("a")

    messages, counts = answers(Functions([mute, forgets], caller), call("mute"), call("forgets"))
    assert messages[0]["content"] == "{'error': 'Mute'}"
    assert call_sync(mute, {}).failure == ("Mute", "Mute")  # as processes do
    assert "returned a coroutine instead of a value" in messages[1]["content"]
    assert counts["failures"] == 2


def test_too_many_hanging_threads_end_the_run(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MAX_LEFT_BEHIND", 1)
    functions, asked = Functions([hang], caller), call("hang", {"seconds": 1})
    answers(functions, asked)
    with pytest.raises(AgentError, match=r"2 calls of tools or environments hang .*set agents.tool_processes"):
        answers(functions, asked)


def test_hanging_threads_are_daemons_and_end_with_their_call(caller: Caller) -> None:
    before = set(threading.enumerate())
    answers(Functions([hang], caller), call("hang", {"seconds": 0.3}))
    [left] = set(threading.enumerate()) - before
    assert left.daemon
    left.join(2)
    assert not left.is_alive()


def database(works: bool) -> str:
    """Ask.

    Args:
        works: whether it does
    """
    if not works:
        raise RuntimeError("database is down")
    return "row"


def test_a_tool_that_always_fails_is_warned_of_once(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    functions = Functions([database, add], caller)
    fails, works, wrong = (call("database", {"works": value}) for value in (False, True, "?"))
    answers(functions, *[fails] * 9, works, *[fails] * 9, *[wrong] * 5, *[call("add", {"a": 1})] * 2)
    assert not caplog.messages  # never ten in a row
    answers(functions, *[fails] * 20)
    assert len(caplog.messages) == 1
    assert "the last 10 calls of the tool 'database' all failed" in caplog.text
    assert caplog.text.rstrip().endswith("RuntimeError: database is down")
    assert "Traceback" in caplog.text and 'raise RuntimeError("database is down")' in caplog.text
    assert "calls.py" not in caplog.text  # the traceback begins in the user's code


def test_a_method_of_a_shared_object_is_a_tool(caller: Caller) -> None:
    functions, shared = Functions([Shared().push], caller, num_processes=1), Shared()
    shared_functions = Functions([shared.push], caller, num_processes=1)
    assert answers(functions, call("push", {"n": 2}))[0][0]["content"] == "2"
    answers(shared_functions, call("push", {"n": 2}))
    assert shared.total == 2  # not a copy in a process


def test_processes_are_kept_killed_and_replaced() -> None:
    caller = Caller(timeout_seconds=5.0)
    functions = Functions(list(isolated().values()), caller, num_processes=1)
    first, again = (answers(functions, call("pid"))[0][0]["content"] for _ in range(2))
    assert first == again != str(os.getpid())
    messages, counts = answers(functions, call("die"))
    assert "ended with signal SIGKILL" in messages[0]["content"]
    assert counts == {"calls": 1, "failures": 1}
    assert answers(functions, call("fail", {"kind": "no"}))[0][0]["content"] == "{'error': 'no'}"
    assert answers(functions, call("blocks"))[0][0]["content"] == [{"type": "text", "text": "one"}]
    second = answers(functions, call("pid"))[0][0]["content"]
    assert second != first
    limit_tool(functions, "hang", 0.2)
    messages, counts = answers(functions, call("hang", {"seconds": 60}))
    assert "its process was killed" in messages[0]["content"]
    assert counts == {"calls": 1, "failures": 1, "timeouts": 1}
    limit_tool(functions, "hang", 5.0)
    third = answers(functions, call("pid"))[0][0]["content"]
    assert third.isdigit()  # not the late answer of the call before
    assert third not in (first, second)
    functions.close()
    caller.close()
    assert not any(os.path.exists(f"/proc/{one}") for one in (first, second, third))


def test_a_tool_that_sets_a_signal_handler_moves_to_a_process(caplog: pytest.LogCaptureFixture) -> None:
    """A main thread is there only; nothing else of the call changes."""
    caller = Caller(timeout_seconds=5.0)
    functions = Functions([isolated()["alarmed"]], caller)
    [message], counts = answers(functions, call("alarmed"))
    assert message["content"] not in ("", str(os.getpid()))
    assert message["content"].isdigit()
    assert counts == {"calls": 1}
    assert "agents.tool_processes" in caplog.text
    functions.close()
    caller.close()


@pytest.mark.parametrize(
    ("value", "schema", "is_fit"),
    [
        (None, {"type": "integer", "nullable": True}, True),
        (None, {"type": "integer"}, False),
        ([1, 2], {"type": "array", "items": {"type": "integer"}}, True),
        ([1, "2"], {"type": "array", "items": {"type": "integer"}}, False),
        ("a", {"type": ["integer", "string"]}, True),
        (1.5, {"type": "integer"}, False),
        (3, {"type": "number"}, True),
        (False, {"type": "number"}, False),
        ({}, {"type": "object"}, True),
        ("x", {}, True),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, False),
    ],
)
def test_values_fit_schemas(value: Any, schema: dict[str, Any], is_fit: bool) -> None:
    assert fits(value, schema) is is_fit


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        (3.0, {"type": "integer"}, "3"),
        (3, {"type": "integer"}, "3"),
        (3.0, {"type": "number"}, "3.0"),
        (3.0, {"type": ["integer", "null"]}, "3"),
        (3.0, {"type": ["integer", "number"]}, "3.0"),
        (3.0, {"type": "integer", "nullable": True}, "3"),
        (2.0, {"type": "integer", "enum": [1, 2]}, "2"),
        ([1.0, 2], {"type": "array", "items": {"type": "integer"}}, "[1, 2]"),
        ([1.0, "a"], {"type": "array"}, "[1.0, 'a']"),
        (4.0, {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]}, "4"),
        ({"a": 1.0, "b": 1.5}, {"type": "object", "additionalProperties": {"type": "integer"}}, "{'a': 1, 'b': 1.5}"),
        ("3.0", {"type": ["integer", "string"]}, "'3.0'"),
        (True, {"type": "boolean"}, "True"),
    ],
)
def test_whole_floats_reach_functions_as_the_integers_that_they_passed_for(
    value: Any, schema: dict[str, Any], expected: str
) -> None:
    assert repr(with_integers(value, schema)) == expected
