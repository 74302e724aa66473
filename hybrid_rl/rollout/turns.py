"""Turns on a rank's engine: agents run on an event loop, and the rank's own thread steps the engine that answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.trajectory import Completion, EndReason
from hybrid_rl.controller import enter_device
from hybrid_rl.engines.base import RolloutRequest, derive_seed
from hybrid_rl.engines.engine_client import EngineClient, Handle
from hybrid_rl.process.threads import CANCEL_SECONDS, JOIN_SECONDS, LoopThread, LoopWatch
from hybrid_rl.rollout.call import RolloutCall

logger = logging.getLogger("hybrid_rl")

# How soon a rank without work sees an interrupt; also how long ranks that share an engine let each other wait.
IDLE_SECONDS, SHARED_IDLE_SECONDS = 0.05, 0.005

T = TypeVar("T")


@dataclass(eq=False)
class Ask:
    """A request of an agent, and the future on its event loop that it awaits. asker: the trajectory that asks; None if
    nothing is to be known of it. handle: of the request in the engine's client, None while it is not there."""

    request: RolloutRequest
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Completion]
    asker: TrajectoryTokens | None = None
    handle: Handle | None = None

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
    """The engine of a rank for agents: any number of them ask at once, from coroutines."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._asks: dict[Handle, Ask] = {}  # unfinished
        self._numbers = itertools.count()
        self._loop: LoopThread | None = None
        self._version: int | None = None  # of the rollout under way

    @property
    def is_open(self) -> bool:
        """Whether a rollout is under way."""
        return self._version is not None

    def seconds(self) -> float:
        """The clock by which the time of trajectories is limited."""
        return time.monotonic()

    def enter(self, asker: TrajectoryTokens) -> None:
        """Note that a trajectory begins."""

    def leave(self, asker: TrajectoryTokens) -> None:
        """Note that a trajectory has ended, and asks nothing more."""

    async def complete(self, request: RolloutRequest, asker: TrajectoryTokens | None = None) -> Completion:
        """Answer a request; its id is set here. Once the caller is cancelled, the engine drops it. asker: the
        trajectory that it belongs to.

        Raises TrajectoryEndedError if no rollout is under way, DataError for a request that can never run.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._version is None:
                raise TrajectoryEndedError("abort")
            ask = Ask(request, loop, loop.create_future(), asker)
            handle = self._submit(ask, self._version)
        try:
            return await ask.answer
        except asyncio.CancelledError:
            self._client.cancel(handle)
            raise

    def _submit(self, ask: Ask, version: int) -> Handle:
        """Queue a request; the lock is held."""
        ask.handle = handle = self._client.submit([replace(ask.request, id=next(self._numbers))], version)
        self._asks[handle] = ask
        return handle

    def run(self, main: Callable[[], Coroutine[Any, Any, T]], version: int) -> T:
        """Run a coroutine to its end on the event loop while this thread steps the engine, inside a session of the
        client. version: of the weights that answer.

        With an engine that several ranks share, all of them call this; the last to leave its session ends it. Tasks
        that the coroutine leaves behind are cancelled. Raises what the coroutine raises, and KeyboardInterrupt if an
        interrupt was requested: then it was cancelled.
        """
        if self._loop is None:
            self._loop = LoopThread("agents", enter_device)
        ended = threading.Event()
        self._version = version
        running = self._loop.start(_tidy(main, ended))
        running.add_done_callback(lambda _: self._client.wake())
        watch = LoopWatch(self._loop)
        idle = SHARED_IDLE_SECONDS if self._client.is_shared else IDLE_SECONDS
        try:
            while not running.done():
                self._client.advance(idle_seconds=idle)
                self._answer()
                watch.look()
            return running.result()
        except BaseException:
            running.cancel()
            raise
        finally:
            self._close_up(ended)

    def _answer(self) -> bool:
        """Answer those whose requests have finished. Returns whether there were any."""
        with self._lock:
            finished = {handle: ask for handle, ask in self._asks.items() if not handle.num_unfinished}
            for handle in finished:
                del self._asks[handle]
        for handle, ask in finished.items():
            for made in handle.take():
                ask.resolve(Completion(made.completion_ids, made.logprobs, made.versions, made.finish_reason))
        return bool(finished)

    def _close_up(self, ended: threading.Event) -> None:
        """Answer nobody any more, and wait until the coroutine and all its tasks have ended. What the client still has
        of them ends with its session."""
        with self._lock:
            self._version = None
            left = dict(self._asks)
            self._asks.clear()
        for handle, ask in left.items():
            self._client.cancel(handle)
            ask.resolve(TrajectoryEndedError("abort"))
        if not ended.wait(2 * CANCEL_SECONDS) and self._loop is not None:
            warn_of_thread()
            self._loop.stop()
            self._loop = None

    def close(self) -> None:
        """End the event loop and its thread; one that hangs is not waited for. Idempotent."""
        if self._loop is not None:
            self._loop.stop()
            self._loop.thread.join(JOIN_SECONDS)
            self._loop = None


def warn_of_thread() -> None:
    """Warn of agents that go on after they were cancelled."""
    logger.warning(
        "agents did not end within %.0f s after they were cancelled: a call blocks their event loop, or catches "
        "asyncio.CancelledError and goes on; their thread is left behind, perhaps still running",
        2 * CANCEL_SECONDS,
    )


async def _tidy(main: Callable[[], Coroutine[Any, Any, T]], ended: threading.Event) -> T:
    """Run a coroutine, and cancel the tasks that it leaves behind. ended: set if all have ended."""
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
    samples of equal prompts in it share keys and values. priority: of two that wait, the lower one goes first.

    oldest_version: of the weights that have generated for it; None as long as nothing was."""

    def __init__(self, turns: EngineTurns, call: RolloutCall, *, seed: int, group: int, priority: int) -> None:
        self._turns, self._call, self._seed, self._group, self._priority = turns, call, seed, group, priority
        self._ended: EndReason | None = None
        self._open: set[asyncio.Task[Completion]] = set()
        self.oldest_version: int | None = None

    async def complete(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed_parts: Sequence[int | str]
    ) -> Completion:
        """Generate at most max_tokens tokens, as `TokenSource.complete`. Raises TrajectoryEndedError once `close` was
        called, also while it waits."""
        if self._ended is not None:
            raise TrajectoryEndedError(self._ended)
        params = replace(
            self._call.params,
            max_tokens=max_tokens,
            stop_strings=(*self._call.params.stop_strings, *stop),
            seed=derive_seed(self._seed, self._call.params.seed, self._call.purpose, *seed_parts),
        )
        request = RolloutRequest(0, tuple(prompt_ids), params, group=self._group, priority=self._priority)
        asking = asyncio.ensure_future(self._turns.complete(request, self))
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
        for asking in tuple(self._open):
            asking.get_loop().call_soon_threadsafe(asking.cancel)
