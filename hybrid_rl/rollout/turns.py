"""Turns on a rank's engine: agents run on an event loop, and the rank's own thread steps the engine that answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.trajectory import EndReason
from hybrid_rl.agents.turn_record import TrajectoryRecord
from hybrid_rl.controller import enter_device
from hybrid_rl.engines.base import Beginning, FinishedSample, RolloutRequest, derive_seed
from hybrid_rl.engines.engine_client import EngineClient, Handle
from hybrid_rl.process.threads import CANCEL_SECONDS, LoopThread, LoopWatch
from hybrid_rl.rollout.call import RolloutCall

logger = logging.getLogger("hybrid_rl")

# How soon a rank without work sees an interrupt; also how long ranks that share an engine let each other wait.
IDLE_SECONDS, SHARED_IDLE_SECONDS = 0.05, 0.005
# Agents that have been answered are waited for before the engine goes on, so that instant tools make the same rollout
# every time. What takes longer is not worth waiting for: so long in a rollout, and this share of its time besides.
# A machine that is overloaded makes looks longer, and patience with them.
PATIENCE_SECONDS, PATIENCE_SHARE, LOOK_SECONDS = 0.25, 0.02, 0.002
# Turns of the event loop from an answer to what follows from it, if nothing is waited for: that of a free place in
# `Room` to the first question of a new trajectory is the longest.
SETTLING_TURNS = 8

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
    """The engine of a rank for agents: any number of them ask at once, from coroutines.

    What is asked is submitted before the next step of the engine, in the order of the trajectories, whatever the order
    of the questions. A rollout is either a call of `run`, of whose agents nothing is left after it, or it is between
    `begin` and `suspend`: then coroutines live on between rollouts, and requests wait, with the tokens that were
    generated for them. A rollout of the second kind waits for agents that were answered (`settle`).
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._asks: dict[Handle, Ask] = {}  # the engine has them
        self._waiting: list[Ask] = []
        self._thinking: set[TrajectoryTokens] = set()  # have been answered, and neither asked again nor ended
        self._numbers = itertools.count()
        self._loop: LoopThread | None = None
        self._watch: LoopWatch | None = None
        self._version: int | None = None  # of the rollout under way
        self._latest = 0
        self._is_open = False
        self._seconds, self._since = 0.0, 0.0  # of the rollouts before, and when the present one began
        self._impatience = 0.0  # seconds that were waited for agents in vain
        self._failure: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether questions are answered, now or in the next rollout."""
        return self._is_open

    @property
    def version(self) -> int:
        """That of the weights that answer, or did in the last rollout."""
        return self._latest

    def seconds(self) -> float:
        """The clock of trajectories: the time between rollouts does not count."""
        return self._seconds + (0.0 if self._version is None else time.monotonic() - self._since)

    def start(self, main: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine on the event loop, until it ends or `release` is called."""
        if self._loop is None:
            self._loop = LoopThread("agents", enter_device)
            self._watch = LoopWatch(self._loop)
        self._is_open = True
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
        """Answer a request in this rollout, or in the next; it gets its id when it is submitted. Once the caller is
        cancelled, the engine drops it. asker: the trajectory that it belongs to.

        Raises TrajectoryEndedError if nothing is answered any more, DataError for a request that can never run.
        """
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

    def run(self, main: Callable[[], Coroutine[Any, Any, T]], version: int) -> T:
        """Run a coroutine to its end on the event loop while this thread steps the engine, inside a session of the
        client. version: of the weights that answer.

        With an engine that several ranks share, all of them call this; the last to leave its session ends it. Tasks
        that the coroutine leaves behind are cancelled. Raises what the coroutine raises, and KeyboardInterrupt if an
        interrupt was requested: then it was cancelled.
        """
        self.begin(version)
        ended = threading.Event()
        running = self.start(partial(_tidy, main, ended))
        if self._loop is not None:
            self._watch = LoopWatch(self._loop)  # it warns once, and each rollout may be blocked by another call
        running.add_done_callback(lambda _: self._client.wake())
        try:
            while not running.done():
                self._submit_waiting()
                self._client.advance(idle_seconds=self._idle_seconds)
                self._answer()
                self._look_at_loop()
            return running.result()
        except BaseException:
            running.cancel()
            raise
        finally:
            self._close_up(ended)

    def _close_up(self, ended: threading.Event) -> None:
        """Answer nobody any more, and wait until the coroutine and all its tasks have ended. What the client still has
        of them ends with its session."""
        for ask in self._forgotten():
            if ask.handle is not None:
                self._client.cancel(ask.handle)
            ask.resolve(TrajectoryEndedError("abort"))
        if not ended.wait(2 * CANCEL_SECONDS) and self._loop is not None:
            warn_of_thread()
            self._loop.stop()
            self._loop = self._watch = None

    def _forgotten(self) -> list[Ask]:
        """End the rollout, and return what was asked and is not answered; nothing can be asked any more."""
        self._end()
        with self._lock:
            left = [*self._asks.values(), *self._waiting]
            self._asks, self._waiting, self._is_open = {}, [], False
            self._thinking.clear()
        return left

    def begin(self, version: int) -> None:
        """Answer with weights of this version, inside a session of the client, until `suspend` or `release`."""
        self._impatience, self._failure = 0.0, None
        with self._lock:
            self._version, self._latest, self._since = version, version, time.monotonic()

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

    @property
    def _idle_seconds(self) -> float:
        """How long a step waits that finds nothing to generate."""
        return SHARED_IDLE_SECONDS if self._client.is_shared else IDLE_SECONDS

    def step(self) -> None:
        """Submit what is asked, take a step of the engine, and answer what has finished. A step that finds nothing to
        generate waits a little. Collective over the ranks that share the engine: only the engine's own step raises, and
        `check` what else went wrong."""
        self._beside(self._submit_waiting)
        self._advance(self._idle_seconds)

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
                request = replace(ask.request, id=next(self._numbers))
                try:
                    ask.handle = self._client.submit([request], self._version)
                except Exception as error:  # it can never run: its caller is told
                    self._thinking |= {ask.asker} if ask.asker is not None else set()
                    ask.resolve(error)
                else:
                    self._asks[ask.handle] = ask

    def _advance(self, idle_seconds: float) -> None:
        self._client.advance(idle_seconds=idle_seconds, can_interrupt=False)
        self._beside(self._go_on)

    def _go_on(self) -> None:
        if self._answer():
            self.settle()
        self._look_at_loop()

    def _look_at_loop(self) -> None:
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
            completion = Completion(
                made.completion_ids, made.logprobs, made.versions, made.finish_reason, made.routed_experts
            )
            if made.finish_reason == "abort" and not ask.answer.done():
                begun = Beginning(tuple(made.completion_ids), tuple(made.logprobs), tuple(made.versions))
                ask.request, ask.handle = replace(ask.request, begun=begun), None
                with self._lock:
                    self._waiting.append(ask)
            else:
                ask.resolve(completion)
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
        """Cancel all coroutines, wait until they have ended, and end the event loop; nobody is answered any more. Call
        it when the engine has none of their requests. Idempotent."""
        left, loop = self._forgotten(), self._loop
        self._loop = self._watch = None
        if loop is None:
            return
        loop.stop()
        loop.thread.join(2 * CANCEL_SECONDS)
        if loop.thread.is_alive():
            warn_of_thread()
        for ask in left:  # of agents that ask from another event loop
            ask.resolve(TrajectoryEndedError("abort"))


async def _turns() -> None:
    for _ in range(SETTLING_TURNS):
        await asyncio.sleep(0)


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
    samples of equal prompts in it share keys and values. priority: of two that wait, the lower one goes first. record:
    of its turns; None = nothing is recorded.

    oldest_version: of the weights that have generated for it; None as long as nothing was."""

    def __init__(
        self,
        turns: EngineTurns,
        call: RolloutCall,
        *,
        seed: int,
        group: int,
        priority: int,
        record: TrajectoryRecord | None = None,
    ) -> None:
        self._record = TrajectoryRecord() if record is None else record
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
        recorded = self._record.answer(params, self._turns.version)
        if recorded is not None:
            versions = (version for version in (self.oldest_version, *recorded.versions) if version is not None)
            self.oldest_version = min(versions, default=None)
            return recorded
        request = RolloutRequest(0, tuple(prompt_ids), params, group=self._group, priority=self._priority)
        asking = asyncio.ensure_future(self._turns.complete(request, self))
        self._open.add(asking)
        try:
            completion = await asking
            if completion.finish_reason != "abort":
                self._record.note_answer(params, completion)
            return completion
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
