"""The client of a rank's engine: requests are submitted, awaited and cancelled through it, however it is stepped."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

from hybrid_rl.engines.base import EngineStats, FinishedSample, RolloutRequest, SlotUse, join_line
from hybrid_rl.engines.coordinator import Coordinator, PeerAbortedError, StepMessage
from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.engines.step_cost import StepCost
from hybrid_rl.engines.step_thread import StepThread
from hybrid_rl.errors import DataError, EngineStateError
from hybrid_rl.process import progress
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.process.interrupts import interrupt_requested

# How long ranks that share an engine let each other wait if it has nothing to do: they meet so often for nothing.
IDLE_SECONDS = 0.02


class Handle:
    """Requests that were submitted together. num_unfinished: those that have not finished yet."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self.ids = tuple(request.id for request in requests)
        self.num_unfinished = len(requests)
        self._arrived: list[FinishedSample] = []

    @property
    def is_done(self) -> bool:
        """Whether everything has finished and was taken."""
        return not self.num_unfinished and not self._arrived

    def put(self, sample: FinishedSample) -> None:
        """Keep a finished sample until it is taken."""
        self._arrived.append(sample)
        self.num_unfinished -= 1

    def take(self) -> list[FinishedSample]:
        """Return the samples that have finished since the last call."""
        taken, self._arrived = self._arrived, []
        return taken


class EngineClient:
    """A rank's client of its engine. Requests may be submitted and cancelled at any time, from any thread, also while a
    step runs; they reach the engine at the next step boundary, as many as it lets wait.

    in_thread: step the engine in a separate thread, so that an interrupt or a heartbeat gets through meanwhile.
    coordinator: of the ranks that share the engine, if several do. Then all of them open each session together, and
    `stream`, `wait` and the end of a session are collective: ranks step together until no rank needs the engine.

    engine: for what needs no step boundary (constants, state, policy version, `invalidate`); see `at_rest`.
    """

    def __init__(
        self, engine: RolloutEngine, *, in_thread: bool = False, coordinator: Coordinator | None = None
    ) -> None:
        self.engine = engine
        self._coordinator = coordinator or Coordinator.alone()
        self._thread = StepThread() if in_thread else None
        # Takes one step, wherever the engine is stepped; by the caller who holds `_driver`.
        self._advance: Callable[[], None] = partial(self._thread.run, self._step) if self._thread else self._step
        self._driver = threading.Lock()
        self._lock = threading.Lock()  # of what the next step boundary takes
        self._backlog: deque[RolloutRequest] = deque()  # not in the engine yet, under the engine's ids
        self._message = StepMessage()
        self._asked = threading.Event()  # something was, since the last call of `advance`
        self._handles: dict[int, Handle] = {}  # by the ids of this rank's unfinished requests
        self._is_open = self._is_exclusive = self._begins = False
        # What the ranks that share the engine have to do yet, as far as this one knows.
        self._num_unfinished, self._num_open = 0, 0
        self._use, self._cost = SlotUse(), self._no_cost()

    # ------------------------------------------------------------------------------------------------- sessions

    @contextmanager
    def session(self, *, is_exclusive: bool = False) -> Iterator[None]:
        """Open a session for one rollout call: prompts that begin alike share cached prefixes from its first request to
        its last, and nothing is found of what was generated before. is_exclusive: only the caller that opened it may
        submit.

        Whatever is unfinished at its end is cancelled; after an error, that of all ranks that share the engine. Raises
        EngineStateError inside another session.
        """
        if self._is_open:
            raise EngineStateError(
                "the engine is busy with another rollout; do not generate from a reward function or another thread "
                "meanwhile"
            )
        self._is_open, self._is_exclusive, self._begins = True, is_exclusive, True
        self._num_open = int(self.is_shared)  # what the others do is known after the next step boundary
        try:
            yield
            self._is_open = False
            for handle in set(self._handles.values()):
                self.cancel(handle)
            while self._handles or self._num_unfinished or self._num_open:
                with self._driver:
                    self._advance()
        except BaseException:
            # An engine that is not shared holds only this client's requests; the others of a shared one must be told.
            if self._handles or self._num_open:
                with suppress(EngineStateError):  # of an engine that has failed, which is told by what it failed with
                    self.abort_all()
            raise
        finally:
            self._is_open = self._begins = False

    def stream(
        self, requests: Sequence[RolloutRequest], version: int, *, can_interrupt: bool = True
    ) -> Iterator[list[FinishedSample]]:
        """Run requests to their end, in a session of their own unless one is open; yields what finished after every
        engine step.

        If the consumer stops early, by an error or an interrupt, what still runs is aborted: the engine is left empty.
        Raises KeyboardInterrupt, between two engine steps, if an interrupt was requested and `can_interrupt`.
        """
        joins = self._is_open and not self._is_exclusive
        with nullcontext() if joins else self.session(is_exclusive=True):
            handle = self.submit(requests, version)
            try:
                # A rank that shares the engine stays until no rank has unfinished requests.
                self._num_unfinished = max(self._num_unfinished, int(self.is_shared))
                while not handle.is_done or self._num_unfinished:
                    if can_interrupt and interrupt_requested():
                        raise KeyboardInterrupt
                    with self._driver:
                        self._advance()
                    if finished := handle.take():
                        yield finished
            except BaseException:
                self.cancel(handle)
                raise

    def generate(self, requests: Sequence[RolloutRequest], version: int) -> list[FinishedSample]:
        """Run requests to their end, even if an interrupt is requested: for the few of a probe, which is part of an
        update. Results are in the order of the requests."""
        events = self.stream(requests, version, can_interrupt=False)
        finished = {sample.id: sample for arrived in events for sample in arrived}
        return [finished[request.id] for request in requests]

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, requests: Sequence[RolloutRequest], version: int) -> Handle:
        """Queue requests, to be answered by weights of this version.

        Raises EngineStateError unless the engine is ready at that version, DataError for a request that can never run
        or an id that is in use. Nothing is queued if one request is refused.
        """
        self.engine.check(requests, version)
        handle = Handle(requests)
        with self._lock:
            known = set(self._handles)
            for identity in handle.ids:
                if identity in known:
                    raise DataError(f"request id {identity} is in use")
                known.add(identity)
            self._handles.update(dict.fromkeys(handle.ids, handle))
            shared = (replace(request, id=self._coordinator.shared_id(request.id)) for request in requests)
            join_line(self._backlog, shared)
        self._asked.set()
        return handle

    def poll(self, handle: Handle) -> list[FinishedSample]:
        """Return what has finished of these requests since the last call, after one step at most. Raises
        KeyboardInterrupt, before that step, if an interrupt was requested."""
        with self._driver:
            arrived = handle.take()
            if not arrived and handle.num_unfinished:
                if interrupt_requested():
                    raise KeyboardInterrupt
                self._advance()
                arrived = handle.take()
            return arrived

    def advance(self, *, idle_seconds: float = IDLE_SECONDS, can_interrupt: bool = True) -> None:
        """Take one step, for a loop that submits while others run, and looks into its handles after every step. If
        nothing is left to generate, on any rank that shares the engine, wait until this rank submits or cancels
        something, at most `idle_seconds`, and pass a step boundary.

        Collective over the ranks that share the engine, as long as any of them is inside the session. Raises
        KeyboardInterrupt, before that step, if an interrupt was requested and `can_interrupt`.
        """
        with self._driver:
            if can_interrupt and interrupt_requested():
                raise KeyboardInterrupt
            if not (self.engine.num_unfinished or self._num_unfinished):
                self._asked.wait(idle_seconds)
            self._asked.clear()
            self._advance()

    @property
    def experts_shape(self) -> tuple[int, int] | None:
        """(L, K) of `FinishedSample.routed_experts`; None = the engine does not record experts."""
        return self.engine.experts_shape

    @property
    def is_shared(self) -> bool:
        """Whether several ranks step the engine together: then every step of one waits for one of each other."""
        return self._coordinator.num_ranks > 1

    @property
    def is_busy(self) -> bool:
        """Whether requests were unfinished at the last step boundary: of any rank that shares the engine, so all of
        them find the same."""
        return bool(self._num_unfinished if self.is_shared else self._handles)

    def wake(self) -> None:
        """End the wait of `advance`, if it waits. Thread-safe."""
        self._asked.set()

    def wait(self, handle: Handle) -> list[FinishedSample]:
        """Return the rest of these requests, in the order in which they finish."""
        finished: list[FinishedSample] = []
        while not handle.is_done:
            finished += self.poll(handle)
        return finished

    def cancel(self, handle: Handle) -> None:
        """End these requests; they finish with reason "abort" after the next step. Thread-safe."""
        with self._lock:
            self._asked.set()
            ids = [identity for identity in handle.ids if self._handles.get(identity) is handle]
            mine = {self._coordinator.shared_id(identity): identity for identity in ids}
            for request in [request for request in self._backlog if request.id in mine]:
                self._backlog.remove(request)
                begun, identity = request.begun, mine.pop(request.id)
                made = [*begun.token_ids], [*begun.logprobs], [*begun.versions]
                self._handles.pop(identity).put(FinishedSample(identity, *made, "abort"))
            self._message.aborted += mine  # not those that the engine never had: their ids may come again

    def abort_all(self) -> None:
        """End every request at once, those of all ranks that share the engine; their events are lost."""
        with self._driver:
            if self._thread:
                self._thread.settle(forgets=True)
                self._thread.run(self._abort_all)
            else:
                self._abort_all()

    def stats(self) -> EngineStats:
        """Counters of the engine, answered while a step runs too; those of a shared one count all ranks' requests."""
        stats = self.engine.stats()
        return replace(stats, num_waiting=stats.num_waiting + len(self._backlog))

    def take_use(self) -> SlotUse:
        """Return how full the engine was in the steps since the last call, and what they cost."""
        with self._driver:
            use = replace(self._use, cost=self._cost)
            self._use, self._cost = SlotUse(), self._no_cost()
        return use

    def _no_cost(self) -> StepCost:
        return StepCost(num_ranks=self._coordinator.num_ranks)

    # ---------------------------------------------------------------------------------------------------- steps

    def _step(self) -> None:
        """Pass a step boundary, and run a step of the engine if there is anything to do."""
        mark_progress()
        num_expected, before = self._boundary(generates=True), replace(self.engine.counters)
        generates, start = bool(self.engine.num_unfinished), time.perf_counter()
        try:
            events = self.engine.step() if generates else []
        except BaseException:
            if self.is_shared:
                self._forget()
            raise
        seconds, made = time.perf_counter() - start, self.engine.counters.since(before)
        if generates:
            num_tokens = made.num_generated_tokens - made.num_accepted_tokens
            self._use = self._use.after(num_tokens, made.num_draft_tokens, made.num_accepted_tokens)
            self._cost.add(num_tokens, made.num_prompt_tokens, seconds)
        progress.add_tokens(made.num_generated_tokens / self._coordinator.num_ranks)
        for event in self._coordinator.own(events):
            self._handles.pop(event.id).put(event)
        if self.is_shared:
            self._num_unfinished = self.engine.num_unfinished + num_expected

    def _boundary(self, *, generates: bool) -> int:
        """Carry out what this rank, and all that share the engine, have asked for; the requests still to come.
        generates: a step follows, for which ranks must agree."""
        mine = self._take_message()
        try:
            messages = self._coordinator.exchange(mine, self.engine.policy_version)
            aborting = [rank for rank, message in enumerate(messages) if message.aborts_all]
            if generates and not aborting:
                self._coordinator.check_agreement(messages)
        except BaseException:
            self._forget()
            raise
        if aborting:
            self._end_all()
            raise PeerAbortedError(
                f"rank {aborting[0]} of those that share this engine ended its rollout early, which ended the requests "
                f"of all; that rank reports the reason"
            )
        if self._begins:
            self.engine.begin_rollout()
            self._begins = False
        if requests := [request for message in messages for request in message.requests]:
            self.engine.submit(requests, self.engine.policy_version)
        for message in messages:
            self.engine.abort(message.aborted)
        num_expected = sum(message.num_expected for message in messages)
        if self.is_shared:
            self._num_open = sum(message.is_open for message in messages)
            self._num_unfinished = self.engine.num_unfinished + num_expected
        return num_expected

    def _take_message(self) -> StepMessage:
        """Return what this rank asks for now: of its backlog, as much as the engine has room for."""
        with self._lock:
            mine, self._message = self._message, StepMessage()
            room = self.engine.num_queueable // self._coordinator.num_ranks if self._backlog else 0
            mine.requests = [self._backlog.popleft() for _ in range(min(room, len(self._backlog)))]
            mine.num_expected, mine.is_open = len(self._backlog), self._is_open
        return mine

    def _abort_all(self) -> None:
        self._coordinator.exchange(StepMessage(aborts_all=True), self.engine.policy_version)
        self._end_all()

    def _end_all(self) -> None:
        self._forget()
        if self.engine.num_unfinished:
            self.engine.abort_all()

    def _forget(self) -> None:
        """Expect nothing more: a rank that has failed must not wait for the others at another step boundary."""
        with self._lock:
            for handle in self._handles.values():
                handle.num_unfinished = 0
            self._handles.clear()
            self._backlog.clear()
            self._message = StepMessage()
            self._num_unfinished = self._num_open = 0

    def at_rest(self) -> RolloutEngine:
        """Return the engine between two steps, after everything that was asked for has been carried out: for
        `update_weights`, `sleep` and `wake`. Collective over the ranks that share the engine."""
        with self._driver:
            if self._thread:
                self._thread.settle()
            self._boundary(generates=False)
        return self.engine

    def close(self) -> None:
        """End the engine, and its thread; a second call does nothing."""
        if self._thread is None or self._thread.close():
            self.engine.close()
