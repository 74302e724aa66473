"""Turns of agents that outlive a rollout: what they ask at its end, or between two, is answered in the next one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, TypeVar

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.trajectory import Completion
from hybrid_rl.controller import enter_device
from hybrid_rl.engines.base import Beginning, FinishedSample, RolloutRequest
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.process.threads import CANCEL_SECONDS, LoopThread, LoopWatch
from hybrid_rl.rollout.turns import (
    IDLE_SECONDS,
    SHARED_IDLE_SECONDS,
    Ask,
    EngineTurns,
    TrajectoryTokens,
    warn_of_thread,
)

# Agents that have been answered are waited for before the engine goes on, so that instant tools make the same rollout
# every time. What takes longer is not worth waiting for: so long in a rollout, and this share of its time besides.
# A machine that is overloaded makes looks longer, and patience with them.
PATIENCE_SECONDS, PATIENCE_SHARE, LOOK_SECONDS = 0.25, 0.02, 0.002
# Turns of the event loop from an answer to what follows from it, if nothing is waited for: that of a free place in
# `Room` to the first question of a new trajectory is the longest.
SETTLING_TURNS = 8

T = TypeVar("T")


class HeldTurns(EngineTurns):
    """The engine of a rank for agents that go on from one rollout to the next. Between rollouts their coroutines live;
    requests wait, with the tokens that were generated for them.

    What is asked is submitted by `step`, in the order of the trajectories, whatever the order of the questions.
    """

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self._waiting: list[Ask] = []
        self._quiet = threading.Condition(self._lock)
        self._thinking: set[TrajectoryTokens] = set()  # have been answered, and neither asked again nor ended
        self._watch: LoopWatch | None = None
        self._seconds, self._since = 0.0, 0.0  # of the rollouts before, and when the present one began
        self._impatience = 0.0  # seconds that were waited for agents in vain
        self._failure: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether questions are answered, now or in the next rollout."""
        return self._loop is not None

    def seconds(self) -> float:
        """The clock of trajectories: the time between rollouts does not count."""
        return self._seconds + (0.0 if self._version is None else time.monotonic() - self._since)

    def start(self, main: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine on the event loop, until it ends or `release` is called."""
        if self._loop is None:
            self._loop = LoopThread("held agents", enter_device)
            self._watch = LoopWatch(self._loop)
        return self._loop.start(main())

    def enter(self, asker: TrajectoryTokens) -> None:
        """Note that a trajectory begins."""
        with self._quiet:
            self._thinking.add(asker)

    def leave(self, asker: TrajectoryTokens) -> None:
        """Note that a trajectory has ended, and asks nothing more."""
        with self._quiet:
            self._thinking.discard(asker)
            self._quiet.notify_all()
        self._client.wake()

    async def complete(self, request: RolloutRequest, asker: TrajectoryTokens | None = None) -> Completion:
        """Answer a request in this rollout, or in the next. Raises as `EngineTurns.complete` does, but waits for a
        rollout if none is under way."""
        loop = asyncio.get_running_loop()
        ask = Ask(request, loop, loop.create_future(), asker)
        with self._quiet:
            if not self.is_open:
                raise TrajectoryEndedError("abort")
            self._waiting.append(ask)
            self._rest(asker)
        self._client.wake()
        try:
            return await ask.answer
        except asyncio.CancelledError:
            with self._quiet:
                if ask in self._waiting:
                    self._waiting.remove(ask)
                handle = ask.handle
            if handle is not None:
                self._client.cancel(handle)
            raise

    def _rest(self, asker: TrajectoryTokens | None) -> None:
        """Note that nothing is awaited of a trajectory; the lock is held."""
        if asker is not None:
            self._thinking.discard(asker)
            self._quiet.notify_all()

    # ------------------------------------------------------------------------------------------------- rollouts

    def begin(self, version: int) -> None:
        """Answer with weights of this version, inside a session of the client, until `suspend` or `release`."""
        self._impatience, self._failure = 0.0, None
        with self._lock:
            self._version, self._since = version, time.monotonic()

    def _end(self) -> None:
        with self._lock:
            self._seconds, self._version = self.seconds(), None

    def settle(self) -> None:
        """Wait until every trajectory that has begun or was answered asks again or has ended; in vain only for a short
        time of each rollout. Those that take longer are not waited for again."""
        while self._loop is not None and self._version is not None:
            share = PATIENCE_SHARE * (time.monotonic() - self._since)
            most = int((PATIENCE_SECONDS + share - self._impatience) / LOOK_SECONDS)
            with self._quiet:
                num_looks = 0
                while self._thinking and num_looks < most:
                    num_looks += not self._quiet.wait(LOOK_SECONDS)
                is_quiet = not self._thinking
                self._thinking.clear()
            if is_quiet:
                # Where an answer leads without waiting for anything, such as to the beginning of the next trajectory.
                ran = self._loop.start(_turns())
                while not ran.done() and num_looks < most + 1:
                    num_looks += 1
                    wait([ran], LOOK_SECONDS)
                is_quiet = ran.done()
            if not is_quiet:
                self._impatience += num_looks * LOOK_SECONDS
                return
            with self._quiet:
                if not self._thinking:
                    return

    def step(self) -> None:
        """Submit what is asked, take a step of the engine, and answer what has finished. A step that finds nothing to
        generate waits a little. Collective over the ranks that share the engine: only the engine's own step raises, and
        `check` what else went wrong."""
        self._beside(self._submit_waiting)
        self._advance(SHARED_IDLE_SECONDS if self._client.is_shared else IDLE_SECONDS)

    @property
    def num_begun(self) -> int:
        """Tokens of answers that were broken off."""
        with self._lock:
            return sum(len(ask.request.begun.token_ids) for ask in self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing to generate."""
        return not (self._asks or self._waiting)

    def _submit_waiting(self) -> None:
        with self._lock:
            waiting = sorted(self._waiting, key=lambda ask: (ask.request.priority, ask.request.params.seed))
            self._waiting = []
            assert self._version is not None, "no rollout is under way"
            for ask in waiting:
                try:
                    self._submit(ask, self._version)
                except Exception as error:  # it can never run: its caller is told
                    self._thinking |= {ask.asker} if ask.asker is not None else set()
                    ask.resolve(error)

    def _advance(self, idle_seconds: float) -> None:
        self._client.advance(idle_seconds=idle_seconds, can_interrupt=False)
        self._beside(self._go_on)

    def _go_on(self) -> None:
        if self._answer():
            self.settle()
        if self._watch is not None:
            self._watch.look()

    def _beside(self, work: Callable[[], None]) -> None:
        """Do what this rank does between two steps of the engine. If it fails, the rank goes on stepping: the others
        count on as many steps, and would wait for it where it does not come any more. They learn of it at `check`."""
        try:
            work()
        except Exception as error:
            self._failure = self._failure or error

    def check(self) -> None:
        """Raise what went wrong beside the engine's steps. To be called where all ranks tell each other how far they
        are."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _answer(self) -> bool:
        """Answer those whose requests have finished; let those wait whose requests were broken off. Returns whether
        anybody was answered."""
        answers: list[tuple[Ask, FinishedSample]] = []
        with self._lock:
            for handle in [handle for handle in self._asks if not handle.num_unfinished]:
                ask = self._asks.pop(handle)
                answers += [(ask, made) for made in handle.take()]
            open_asks = Counter(id(ask.asker) for ask in (*self._asks.values(), *self._waiting))
            for ask, made in answers:
                asker = ask.asker
                if asker is None:
                    continue
                asker.oldest_version = min(
                    (version for version in (asker.oldest_version, *made.versions) if version is not None),
                    default=None,
                )
                if made.finish_reason != "abort" and not ask.answer.done() and not open_asks[id(asker)]:
                    self._thinking.add(asker)
        for ask, made in answers:
            found = Completion(made.completion_ids, made.logprobs, made.versions, made.finish_reason)
            if made.finish_reason == "abort" and not ask.answer.done():
                begun = Beginning(tuple(made.completion_ids), tuple(made.logprobs), tuple(made.versions))
                ask.request, ask.handle = replace(ask.request, begun=begun), None
                with self._lock:
                    self._waiting.append(ask)
            else:
                ask.resolve(found)
        return any(made.finish_reason != "abort" for _, made in answers)

    def suspend(self) -> None:
        """Break off what the engine runs: it waits for the next rollout. Collective over the ranks that share the
        engine, which take the same number of steps."""
        with self._lock:
            handles = list(self._asks)
        for handle in handles:
            self._client.cancel(handle)
        is_first = True
        while (is_first or self._client.is_busy) if self._client.is_shared else self._asks:
            self._advance(0.0)
            is_first = False
        self._end()

    def release(self) -> None:
        """Cancel all coroutines, and wait until they have ended; nobody is answered any more. Call it when the engine
        has none of their requests. Idempotent."""
        self._end()
        with self._lock:
            left = [*self._asks.values(), *self._waiting]
            self._asks, self._waiting, loop, self._loop = {}, [], self._loop, None
            self._watch = None  # of that loop, which is closed soon
            self._thinking.clear()
        if loop is None:
            return
        loop.stop()
        loop.thread.join(2 * CANCEL_SECONDS)
        if loop.thread.is_alive():
            warn_of_thread()
        for ask in left:  # of agents that ask from another event loop
            ask.resolve(TrajectoryEndedError("abort"))

    close = release


async def _turns() -> None:
    for _ in range(SETTLING_TURNS):
        await asyncio.sleep(0)
