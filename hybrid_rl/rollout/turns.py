"""Turns on a rank's engine: agents run on an event loop, and the rank's own thread steps the engine that answers."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.trajectory import Completion, EndReason
from hybrid_rl.engines.base import RolloutRequest, derive_seed
from hybrid_rl.engines.client import EngineClient, Handle
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.process.interrupts import interrupt_requested
from hybrid_rl.rewards.threads import LoopThread
from hybrid_rl.rollout.call import RolloutCall

logger = logging.getLogger("hybrid_rl")

IDLE_SECONDS = 0.05  # how soon an interrupt is seen while nothing is generated
CANCEL_SECONDS = 1.0  # what coroutines get to end in after they were cancelled
# Ranks that share an engine, and have nothing to generate, meet again after this share of the time for which that has
# been so; within these bounds, in seconds.
SHARED_IDLE_SHARE, SHARED_IDLE_SECONDS = 0.05, (0.0005, 0.005)

T = TypeVar("T")


@dataclass(eq=False)
class _Ask:
    """A request of an agent, and the future that it awaits. handle: once the client has it."""

    request: RolloutRequest
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Completion]
    handle: Handle | None = field(default=None)

    def resolve(self, found: Completion | BaseException) -> None:
        """Answer it, from any thread; nothing happens if nobody waits any more."""

        def set_answer() -> None:
            if self.answer.done():
                return
            if isinstance(found, BaseException):
                self.answer.set_exception(found)
            else:
                self.answer.set_result(found)

        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(set_answer)


class EngineTurns:
    """The engine of a rank for agents: any number of them ask at once, from coroutines.

    max_running: requests that the client is given at once, as many as the engine runs together. The others wait here,
    where those that go on with a trajectory pass those that begin one: a trajectory under way holds an environment and
    cached prefixes.
    """

    def __init__(self, client: EngineClient, *, max_running: int) -> None:
        self._client, self._max_running = client, max_running
        self._lock = threading.Lock()  # of what waits and what runs
        self._waiting: list[tuple[bool, int, _Ask]] = []  # a heap: begins a trajectory, order of arrival
        self._running: dict[int, _Ask] = {}
        self._wakes = threading.Event()  # something has arrived, or all is done
        self._numbers = itertools.count()
        self._loop: LoopThread | None = None
        self._version: int | None = None  # of the rollout under way

    @property
    def is_open(self) -> bool:
        """Whether a rollout is under way."""
        return self._version is not None

    # ---------------------------------------------------------------------------------------------- agents' side

    async def complete(self, request: RolloutRequest, *, begins: bool) -> Completion:
        """Answer a request; its id is set here. begins: it is the first of its trajectory. Cancelled with its caller.

        Raises TrajectoryEndedError if no rollout is under way, DataError for a request that can never run.
        """
        loop = asyncio.get_running_loop()
        ask = _Ask(replace(request, id=next(self._numbers)), loop, loop.create_future())
        with self._lock:
            if not self.is_open:
                raise TrajectoryEndedError("abort")
            heapq.heappush(self._waiting, (begins, ask.request.id, ask))
        self._wakes.set()
        try:
            return await ask.answer
        except BaseException:
            with self._lock:
                if ask.handle is not None:
                    self._client.cancel(ask.handle)
            self._wakes.set()
            raise

    # ---------------------------------------------------------------------------------------------- engine's side

    def run(self, main: Callable[[], Coroutine[Any, Any, T]], version: int) -> T:
        """Run a coroutine to its end on the event loop while this thread steps the engine, inside a session of the
        client. version: of the weights that answer.

        With an engine that several ranks share, all of them call this, and go on stepping together until the last of
        them leaves its session. Tasks that the coroutine leaves behind are cancelled. Raises what the coroutine
        raises, and KeyboardInterrupt if an interrupt was requested: then it was cancelled.
        """
        if self._loop is None:
            self._loop = LoopThread("agents")
        ended = threading.Event()
        self._wakes.clear()
        self._version = version
        running = self._loop.start(_tidy(main, ended))
        running.add_done_callback(lambda _: self._wakes.set())
        try:
            self._drive(running, self._loop)
            result = running.result()
            if not ended.is_set():
                self._leave_behind()
            return result
        except BaseException:
            running.cancel()
            if not ended.wait(2 * CANCEL_SECONDS):
                self._leave_behind()
            raise
        finally:
            self._close_up()

    def _drive(self, running: Future[Any], loop: LoopThread) -> None:
        """Step the engine until the coroutine has ended."""
        idle_since = time.monotonic()
        while not running.done():
            if interrupt_requested():
                raise KeyboardInterrupt
            self._wakes.clear()
            self._feed()
            if self._client.has_work or self._client.is_shared:
                self._client.step()
                self._collect()
            if self._client.has_work:
                idle_since = time.monotonic()
                continue
            seconds = IDLE_SECONDS
            if self._client.is_shared:
                low, high = SHARED_IDLE_SECONDS
                seconds = min(max((time.monotonic() - idle_since) * SHARED_IDLE_SHARE, low), high)
            # A loop that is blocked, as by time.sleep inside of `async def`, makes no progress.
            loop.loop.call_soon_threadsafe(mark_progress)
            if not running.done():
                self._wakes.wait(seconds)

    def _feed(self) -> None:
        """Give the client as many requests as the engine runs at once."""
        assert self._version is not None
        with self._lock:
            while self._waiting and len(self._running) < self._max_running:
                ask = heapq.heappop(self._waiting)[-1]
                if ask.answer.done():  # its caller was cancelled
                    continue
                try:
                    ask.handle = self._client.submit([ask.request], self._version)
                except Exception as error:
                    ask.resolve(error)
                else:
                    self._running[ask.request.id] = ask

    def _collect(self) -> None:
        """Answer the agents whose requests have finished."""
        with self._lock:
            finished = [ask for ask in self._running.values() if ask.handle and not ask.handle.num_unfinished]
            for ask in finished:
                del self._running[ask.request.id]
        for ask in finished:
            assert ask.handle is not None
            for made in ask.handle.take():
                ask.resolve(Completion(made.completion_ids, made.logprobs, made.versions, made.finish_reason))

    def _close_up(self) -> None:
        """Answer nobody any more. What the client still has of them ends with its session."""
        with self._lock:
            self._version = None
            left = [*(ask for *_, ask in self._waiting), *self._running.values()]
            self._waiting.clear()
            self._running.clear()
        for ask in left:
            if ask.handle is not None:
                self._client.cancel(ask.handle)
            ask.resolve(TrajectoryEndedError("abort"))

    def _leave_behind(self) -> None:
        """Begin again on another event loop: something blocks this one, or refuses to end."""
        logger.warning(
            "agents did not end within %.0f s after they were cancelled: a call blocks their event loop, or catches "
            "asyncio.CancelledError and goes on; their thread is left behind, perhaps still running. Inside of "
            "`async def`, await what takes long, or run it by asyncio.to_thread",
            2 * CANCEL_SECONDS,
        )
        if self._loop is not None:
            self._loop.stop()
            self._loop = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop, outside of a rollout: to open or close what agents keep there."""
        if self._loop is None:
            self._loop = LoopThread("agents")
        return self._loop.start(coroutine)

    def close(self) -> None:
        """End the event loop and its thread; one that hangs is not waited for. Idempotent."""
        if self._loop is not None:
            self._loop.stop()
            self._loop.thread.join(CANCEL_SECONDS)
            self._loop = None


async def _tidy(main: Callable[[], Coroutine[Any, Any, T]], ended: threading.Event) -> T:
    """Run a coroutine, and cancel the tasks that it leaves behind."""
    others = asyncio.all_tasks()
    try:
        return await main()
    finally:
        left = asyncio.all_tasks() - others
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_SECONDS)
        if all(task.done() for task in left):
            ended.set()


class TrajectoryTokens:
    """The TokenSource of one trajectory. call: the rollout that it is part of. seed: of the run. group: of its row;
    samples of equal prompts in it share keys and values."""

    def __init__(self, turns: EngineTurns, call: RolloutCall, *, seed: int, group: int) -> None:
        self._turns, self._call, self._seed, self._group = turns, call, seed, group
        self._begins = True
        self._ended: EndReason | None = None
        self._open: set[asyncio.Task[Completion]] = set()

    async def complete(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed_parts: Sequence[int | str]
    ) -> Completion:
        """Generate at most max_tokens tokens, as `TokenSource.complete`. Raises TrajectoryEndedError once `close` was
        called, also if it waits meanwhile."""
        if self._ended is not None:
            raise TrajectoryEndedError(self._ended)
        call, begins, self._begins = self._call, self._begins, False
        params = replace(
            call.params,
            max_tokens=max_tokens,
            stop_strings=(*call.params.stop_strings, *stop),
            seed=derive_seed(self._seed, call.params.seed, call.purpose, *seed_parts),
        )
        request = RolloutRequest(0, tuple(prompt_ids), params, group=self._group)
        asking = asyncio.ensure_future(self._turns.complete(request, begins=begins))
        self._open.add(asking)
        try:
            return await asking
        except asyncio.CancelledError:
            asking.cancel()
            if self._ended is not None:
                raise TrajectoryEndedError(self._ended) from None
            raise
        finally:
            self._open.discard(asking)

    def close(self, reason: EndReason) -> None:
        """Generate nothing more. Answers that are under way are cancelled, and the engine drops them."""
        self._ended = self._ended or reason
        for asking in self._open:
            asking.get_loop().call_soon_threadsafe(asking.cancel)
