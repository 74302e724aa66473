"""Environments: made once, reset often, one for each trajectory, each in a thread of its own."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid_rl.agents.agent_setup import AgentSetup, setup_tools
from hybrid_rl.agents.calls import Caller, CallTimeoutError
from hybrid_rl.agents.environments import (
    Environment,
    EnvironmentFailedError,
    EnvironmentKind,
    EnvironmentPool,
    with_observation,
)
from hybrid_rl.config import AgentConfig
from hybrid_rl.errors import ConfigError
from tests.support.inside.agents import environments_of, on_thread_of


class Counting:
    """Counts what happens to its instances."""

    made = 0
    closed: list[int] = []

    def __init__(self) -> None:
        type(self).made += 1
        self.number = type(self).made
        self.thread = threading.current_thread()
        self.database = sqlite3.connect(":memory:")  # refuses other threads
        self.open_calls = self.most_open_calls = 0

    @property
    def broken(self) -> int:
        raise RuntimeError("properties are not read")

    def reset(self, **row: Any) -> str | None:
        self.database.execute("select 1")
        self.row = row
        return row.get("say")

    def step(self, n: int) -> int:
        """Step.

        Args:
            n: how far
        """
        self.open_calls += 1
        self.most_open_calls = max(self.most_open_calls, self.open_calls)
        time.sleep(0.02)
        self.open_calls -= 1
        return n + len(self.database.execute("select 1").fetchall())

    def slow(self, seconds: float) -> str:
        """Take long.

        Args:
            seconds: how long
        """
        time.sleep(seconds)
        return "done"

    @staticmethod
    def rules() -> str:
        """Tell the rules."""
        return "none"

    @classmethod
    def of_size(cls, size: int) -> "Counting":
        return cls()

    def _private(self) -> int:
        return 1

    def close(self) -> None:
        self.database.close()
        self.closed.append(self.number)


@pytest.fixture
def caller() -> Iterator[Caller]:
    Counting.made, Counting.closed = 0, []
    made = Caller(timeout_seconds=0.3)
    yield made
    made.close()


def pool_of(caller: Caller, *factories: Callable[[], Any]) -> EnvironmentPool:
    return EnvironmentPool(
        [EnvironmentKind(None if len(factories) == 1 else str(n), f) for n, f in enumerate(factories)], caller
    )


def test_an_instance_is_used_by_one_trajectory_at_a_time_and_again_later(caller: Caller) -> None:
    pool = pool_of(caller, Counting)

    async def run() -> None:
        (first, seen), (second, nothing) = await asyncio.gather(pool.take(None, {"say": "hi"}), pool.take(None, {}))
        assert (seen, nothing) == ("hi", None)
        assert first.instance is not second.instance
        assert first.instance.row == {"say": "hi"}
        pool.give_back(first)
        pool.give_back(first)  # a second time changes nothing
        third, _ = await pool.take(None, {"say": "again"})
        assert third.instance is first.instance
        fourth, _ = await pool.take(None, {})
        assert Counting.made == 3
        assert fourth.instance not in (second.instance, third.instance)

    asyncio.run(run())
    pool.close()
    assert sorted(Counting.closed) == [1, 2, 3]


def test_plain_methods_of_one_instance_never_run_at_once(caller: Caller) -> None:
    """Ten calls of one instance take turns in the thread in which it was made; those of ten instances do not wait for
    each other."""
    kind = EnvironmentKind(None, Counting)
    pool = EnvironmentPool([kind], caller)

    async def run() -> None:
        one, _ = await pool.take(None, {})
        outcomes = await asyncio.gather(*(one.call("step", {"n": n}) for n in range(10)))
        assert [outcome.value for outcome in outcomes] == list(range(1, 11))
        assert one.instance.most_open_calls == 1
        others = [environment for environment, _ in await asyncio.gather(*(pool.take(None, {}) for _ in range(10)))]
        everyone = threading.Barrier(10)  # breaks unless ten calls are there at once
        outcomes = await asyncio.gather(*(on_thread_of(other, everyone.wait) for other in others))
        assert sorted(outcome.value for outcome in outcomes) == list(range(10))

    asyncio.run(run())
    pool.close()


def test_an_instance_in_which_a_call_hangs_is_not_used_again(caller: Caller) -> None:
    pool = pool_of(caller, Counting)

    async def run() -> None:
        first, _ = await pool.take(None, {})
        outcome = await first.call("slow", {"seconds": 0.8})
        assert "no answer within 0.3 s" in str(outcome.error)
        outcome = await first.call("step", {"n": 1})  # waits for the call that hangs
        assert "an earlier call still runs" in str(outcome.error)
        pool.give_back(first)
        second, _ = await pool.take(None, {})
        assert second.instance is not first.instance

    asyncio.run(run())
    for _ in range(100):
        if Counting.closed:
            break
        time.sleep(0.05)
    assert Counting.closed == [1]  # by its own thread, when the call had ended
    pool.close()


def test_tools_fail_at_once_while_a_call_past_its_limit_runs(caller: Caller) -> None:
    kind = EnvironmentKind(None, Counting)

    async def run() -> None:
        environment = Environment(kind, caller)
        await environment.make()
        kind.look_at(environment.instance)
        await environment.call("reset", {})
        tools = {tool.name: tool for tool in environment.tools()}
        await tools["slow"].run({"seconds": 0.9})  # the limit is 0.3
        start = time.monotonic()
        outcomes = [await tools["step"].run({"n": 1}) for _ in range(3)]
        assert time.monotonic() - start < 0.3
        assert all(isinstance(outcome.error, CallTimeoutError) for outcome in outcomes)
        while not environment.is_idle:
            await asyncio.sleep(0.01)
        assert (await tools["step"].run({"n": 1})).value == "2"
        environment.end()

    asyncio.run(run())


class Failing(Counting):
    """Cannot be reset on the instances with these numbers."""

    bad: tuple[int, ...] = ()

    def reset(self, **row: Any) -> str | None:
        if self.number in self.bad:
            raise ConnectionError("the server is gone")
        return f"instance {self.number}"


def test_a_method_that_an_instance_lacks_fails_as_a_call(caller: Caller) -> None:
    environment, _ = asyncio.run(pool_of(caller, Counting).take(None, {}))
    outcome = asyncio.run(environment.call("get_reward", {}))
    assert str(outcome.error) == "Counting has no get_reward()"


def test_a_reset_that_fails_is_tried_once_more_on_a_new_instance(caller: Caller) -> None:
    Failing.made, Failing.bad = 0, (1, 3, 4)
    pool = pool_of(caller, Failing)

    async def run() -> None:
        environment, seen = await pool.take(None, {})
        assert seen == "instance 2"
        with pytest.raises(
            EnvironmentFailedError, match=r"reset\(\) .* failed 2 times.*ConnectionError: the server is"
        ):
            await pool.take(None, {})
        pool.give_back(environment)
        assert (await pool.take(None, {}))[1] == "instance 2"
        last, _ = await pool.take(None, {})
        pool.give_back(last)
        pool.give_back(environment)
        Failing.bad = (2,)
        assert (await pool.take(None, {}))[1] == "instance 6"  # not 5, which is free: it may have the same fault

    asyncio.run(run())
    pool.close()
    assert sorted(Failing.closed) == [1, 2, 3, 4, 5, 6]


class SlowToEnd(Failing):
    """The instances that cannot be reset take a while to close."""

    def close(self) -> None:
        if self.number in self.bad:
            time.sleep(0.5)
        super().close()


def test_closing_waits_for_what_was_given_up(caller: Caller) -> None:
    SlowToEnd.made, SlowToEnd.bad, SlowToEnd.closed = 0, (1,), []
    pool = pool_of(caller, SlowToEnd)
    assert asyncio.run(pool.take(None, {}))[1] == "instance 2"
    pool.close()
    assert sorted(SlowToEnd.closed) == [1, 2]


def test_an_environment_that_cannot_be_made_or_is_not_known_says_so(caller: Caller) -> None:
    pool = pool_of(caller, lambda: 1 / 0, Counting)
    with pytest.raises(EnvironmentFailedError, match="cannot be made: ZeroDivisionError"):
        asyncio.run(pool.take("0", {}))
    with pytest.raises(
        EnvironmentFailedError, match=r"environment='2' is not in environment_factory \(it has '0', '1'"
    ):
        asyncio.run(pool.take("2", {}))


class Picky:
    """Takes some columns only."""

    def reset(self, target: Any, prompt: Any = None) -> None:
        self.given = {"target": target, "prompt": prompt}


def test_reset_gets_copies_of_the_columns_that_it_takes(caller: Caller) -> None:
    row = {"target": [1], "prompt": "p", "other": 2}
    picky, _ = asyncio.run(pool_of(caller, Picky).take(None, row))
    assert picky.instance.given == {"target": [1], "prompt": "p"}
    assert picky.instance.given["target"] is not row["target"]
    every, _ = asyncio.run(pool_of(caller, Counting).take(None, row))
    assert every.instance.row == row


USER = {"role": "user", "content": "Play."}
HELLO = {"role": "user", "content": "Hello."}
LOUD = {"role": "user", "content": "Play.!"}
BLOCK = {"type": "text", "text": "Play."}


@pytest.mark.parametrize(
    ("prompt", "observation", "expected"),
    [
        ([USER], None, [USER]),
        ([USER], " Go", [{"role": "user", "content": "Play. Go"}]),
        (
            [HELLO, {"role": "assistant", "content": "?"}, USER],
            "!",
            [HELLO, {"role": "assistant", "content": "?"}, LOUD],
        ),
        ([{"role": "user", "content": ""}], "Go", [{"role": "user", "content": "Go"}]),
        (
            [USER, {"role": "assistant", "content": "I"}],
            " Go",
            [{"role": "user", "content": "Play. Go"}, {"role": "assistant", "content": "I"}],
        ),
        (
            [{"role": "user", "content": [BLOCK]}],
            "Go",
            [{"role": "user", "content": [BLOCK, {"type": "text", "text": "Go"}]}],
        ),
        ([USER], [BLOCK], [{"role": "user", "content": [BLOCK, BLOCK]}]),
        (
            [{"role": "system", "content": "s"}],
            "Go",
            [{"role": "system", "content": "s"}, {"role": "user", "content": "Go"}],
        ),
    ],
)
def test_an_observation_goes_to_the_last_message_of_the_user(prompt: Any, observation: Any, expected: Any) -> None:
    before = repr(prompt)
    assert with_observation(prompt, observation) == expected
    assert repr(prompt) == before


@pytest.mark.parametrize("observation", [3, {"type": "text", "text": "x"}, [{"type": "image", "image": 1}]])
def test_an_observation_is_text(observation: Any) -> None:
    with pytest.raises(EnvironmentFailedError, match="text blocks, or None"):
        with_observation([USER], observation)


def setup_of(factory: Any, tools: Any = ()) -> AgentSetup:
    return setup_tools(tools, factory, AgentConfig(tool_timeout_seconds=2.0))


def test_public_methods_are_tools_except_the_reserved_ones(caller: Caller) -> None:
    setup = setup_of(Counting)
    [kind] = setup.kinds
    assert list(kind.schemas) == ["rules", "slow", "step"]
    assert (kind.class_name, kind.has_reward, setup.sources) == ("Counting", False, [])
    assert Counting.made == 1
    agent = setup.tool_agent(AgentConfig())
    pool = environments_of(agent)
    assert pool is not None
    environment, _ = asyncio.run(pool.take(None, {}))
    assert Counting.made == 1  # the instance that was looked at is the first that is used
    assert environment.instance.thread is not threading.main_thread()
    agent.close()
    assert Counting.closed == [1]


def test_what_was_looked_at_is_closed_if_nobody_takes_it(caller: Caller) -> None:
    setup = setup_of(Counting)
    setup.close()
    setup.close()
    time.sleep(0.1)
    assert Counting.closed == [1]


class NoReset:
    pass


class Broken:
    def __init__(self) -> None:
        raise ValueError


class NoHint:
    def reset(self) -> None: ...

    def move(self, direction) -> str:  # type: ignore[no-untyped-def]
        """Move."""
        return ""


class SameName:
    def reset(self) -> None: ...

    def add(self) -> str:
        """Add."""
        return ""


def add() -> str:
    """Add."""
    return ""


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (NoReset, "a NoReset without a method reset()"),
        (NoHint, "begins with an underscore"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        ({"kitchen": Broken}, "environment_factory cannot make Broken (environment='kitchen'): ValueError"),
        (Counting.__init__, "it is called without arguments"),
        (SameName(), "pass its class"),
        ({}, "an empty dict"),
        ({1: Counting}, "names are text"),
        (SameName, "two tools are named 'add'"),
    ],
)
def test_unusable_environments_are_refused(factory: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        setup_of(factory, [add])
    assert says in str(caught.value)
