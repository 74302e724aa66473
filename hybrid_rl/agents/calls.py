"""Calls of the user's code, each with a time limit: tools, and the methods of environments."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from hybrid_rl.controller import enter_device
from hybrid_rl.errors import AgentError
from hybrid_rl.process.threads import CANCEL_SECONDS, JOIN_SECONDS, CallThread, LoopThread, answer_of

# Threads and event loops that are left behind because a call hangs in them, before the run ends.
MAX_LEFT_BEHIND = 64
# An event loop that nothing blocks answers within this time.
ANSWER_SECONDS = 0.5


class CallTimeoutError(Exception):
    """A call past its time limit."""


class Outcome(NamedTuple):
    """What a call came to. error: what it raised; value is meaningless then."""

    value: Any
    error: BaseException | None = None


class Caller:
    """Runs plain functions in threads and coroutines on one event loop, apart from the caller's own.

    A plain call past the limit cannot be ended: its thread is left behind and takes no further call. A coroutine is
    cancelled; one that catches that and goes on is left alone. One that blocks the event loop is left behind with it,
    as are all others that wait there, and later ones run on a fresh loop.

    timeout_seconds: limit of a call. Methods are called from event loops, which may differ from call to call.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._idle: list[CallThread] = []
        self._left: list[threading.Thread] = []
        self._loop: LoopThread | None = None
        self._lock = threading.Lock()

    async def call(self, function: Callable[[], Any], thread: CallThread | None = None) -> Outcome:
        """Call a function. thread: the one to run in, after its earlier calls, whose time counts too; it stays in use
        even if the call hangs (see `leave`). None: any. Raises AgentError if too many calls hang."""
        used = thread or self._take()
        future = used.start(lambda: _outcome(function))
        try:
            outcome = await answer_of(future, self.timeout_seconds)
        finally:
            is_left = not future.done() and not future.cancel()
            if thread is None and is_left:
                used.stop()  # as soon as the call returns, if ever
                self._note_left(used.thread)
            elif thread is None:
                self._idle.append(used)
        if outcome is not None:
            return outcome
        self.check_left()
        return self._late("it still runs: threads cannot be killed" if is_left else "an earlier call still runs")

    async def run(self, make: Callable[[], Awaitable[Any]]) -> Outcome:
        """Await what `make` returns, on the event loop of this caller. Raises AgentError if too many calls hang."""
        loop = self.loop
        future = loop.start(_awaited(make, self.timeout_seconds))
        try:
            outcome = await answer_of(future, self.timeout_seconds + CANCEL_SECONDS)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Outcome(None, CallTimeoutError("it was cancelled, because another tool blocked the event loop"))
        finally:
            if not future.done():
                future.cancel()
        if outcome is not None:
            return self._late("it was cancelled") if isinstance(outcome.error, CallTimeoutError) else outcome
        if await answer_of(loop.start(_there()), ANSWER_SECONDS):
            return self._late("it was cancelled, but may go on: let asyncio.CancelledError pass")
        with self._lock:
            if self._loop is loop:
                self._loop = None
                loop.stop()
                self._left.append(loop.thread)
        self.check_left()
        return self._late("and could not be cancelled, because a blocking call inside `async def` holds the event loop")

    @property
    def loop(self) -> LoopThread:
        """The thread with the event loop of coroutines."""
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread("tool loop", enter_device)
            return self._loop

    def leave(self, thread: CallThread) -> None:
        """Give up a thread that `call` was given, in which a call may hang."""
        thread.stop()
        self._note_left(thread.thread)

    def check_left(self) -> None:
        """Raise AgentError if too many threads are left behind."""
        with self._lock:
            self._left = [thread for thread in self._left if thread.is_alive()]
            number = len(self._left)
        if number > MAX_LEFT_BEHIND:
            raise AgentError(
                f"{number} calls of tools or environments hang in threads, which cannot be killed; give the tools time "
                "limits of their own, or set agents.tool_processes for plain functions, so that they can be killed "
                f"(agents.tool_timeout_seconds={self.timeout_seconds})"
            )

    def close(self) -> None:
        """End threads and loop; those that hang are not waited for."""
        with self._lock:
            idle, self._idle, loop, self._loop = self._idle, [], self._loop, None
        for thread in idle:
            thread.stop()
        if loop is not None:
            loop.stop()
            loop.thread.join(JOIN_SECONDS)

    def _take(self) -> CallThread:
        try:
            return self._idle.pop()
        except IndexError:
            return CallThread("tool call", enter_device)

    def _note_left(self, thread: threading.Thread) -> None:
        with self._lock:
            self._left.append(thread)

    def _late(self, why: str) -> Outcome:
        return Outcome(None, CallTimeoutError(f"no answer within {self.timeout_seconds:g} s ({why})"))


def offered(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some keyword arguments that a function takes: all, if it has **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return {name: value for name, value in keywords.items() if takes_all or name in names}


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(function())
    except BaseException as error:  # SystemExit too: the user's code may not end the run
        return Outcome(None, error)


async def _there() -> bool:
    return True


async def _awaited(make: Callable[[], Awaitable[Any]], seconds: float) -> Outcome:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return Outcome(await make())
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Outcome(None, error)  # the function's own cancellation, leaking out
    except BaseException as error:
        return Outcome(None, CallTimeoutError() if isinstance(error, TimeoutError) and limit.expired() else error)
