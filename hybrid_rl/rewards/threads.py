"""Reward functions inside the trainer's process: plain ones in one thread, coroutines on one event loop."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from hybrid_rl.rewards.calling import CallOutcome, call_async, call_sync, failed_call
from hybrid_rl.rewards.functions import RewardInput
from hybrid_rl.rewards.isolation import (
    MAX_ALIKE_SAMPLES,
    Task,
    are_alike,
    call_and_isolate,
    given_up,
    is_cut,
    repeated,
)
from hybrid_rl.rewards.results import Part

JOIN_SECONDS = 1.0
# A cancelled coroutine gets so long to return before its event loop counts as blocked.
CANCEL_SECONDS = 1.0

SYNC_RETRIED = frozenset({"raised"})
ASYNC_RETRIED = frozenset({"raised", "timeout"})

CallItem = tuple[Callable[[], CallOutcome], "Future[CallOutcome]"]


def on_own_device(body: Callable[[], None]) -> Callable[[], None]:
    """What a thread runs, on the GPU of its rank."""
    # Not above: a reward process imports this package for a reward or a state that is of it, and shall not for that
    # import torch.
    from hybrid_rl.controller import enter_device

    def run() -> None:
        enter_device()
        body()

    return run


class CallThread:
    """A daemon thread that runs one call at a time, and can be left behind by its owner."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[CallItem | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=on_own_device(self._run), name="reward call", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.inbox.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, call, future  # the samples of the last call are not kept while waiting for the next

    def call(self, call: Callable[[], CallOutcome], timeout_seconds: float) -> CallOutcome | None:
        """The outcome, or None when there is none after `timeout_seconds`; the thread is then no longer usable."""
        future: Future[CallOutcome] = Future()
        self.inbox.put((call, future))
        try:
            return future.result(timeout_seconds)
        except TimeoutError:
            if future.done():
                return future.result()
            self.stop()  # takes effect if the call ever returns
            return None

    def stop(self) -> None:
        self.inbox.put(None)


class SyncLane:
    """Runs plain functions one after another in a background thread.

    A call past the limit is abandoned with its thread: Python threads cannot be killed, so it may go on using the
    CPU (or holding the GIL: then even the limit comes late). The next call gets a fresh thread. The remedy is
    `num_processes`, where the process is killed.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self.timeout_seconds = timeout_seconds
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.call_thread: CallThread | None = None

    def start(self, task: Task) -> None:
        """Queue a task; returns at once."""
        if self.thread is None:
            self.thread = threading.Thread(target=on_own_device(self._run), name="reward scoring", daemon=True)
            self.thread.start()
        self.tasks.put(task)

    def close(self) -> None:
        self.tasks.put(None)
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(JOIN_SECONDS)
        if self.call_thread is not None:
            self.call_thread.stop()

    def _run(self) -> None:
        while (task := self.tasks.get()) is not None:
            try:
                parts = call_and_isolate(partial(self._call, task), task, SYNC_RETRIED)
            except BaseException as error:
                task.fail(error)
            else:
                task.done(parts)
                del parts
            del task

    def _call(self, task: Task, inputs: Sequence[RewardInput]) -> CallOutcome:
        spec = task.function
        call = partial(call_sync, spec.function, task.arguments(inputs), len(inputs), spec.log_names)
        if self.timeout_seconds is None:
            return call()
        if self.call_thread is None:
            self.call_thread = CallThread()
        outcome = self.call_thread.call(call, self.timeout_seconds)
        if outcome is None:
            self.call_thread = None
            return failed_call(
                "timeout",
                f"gave no answer within {self.timeout_seconds} s; its thread cannot be killed and was left behind, "
                "perhaps still running: set reward_processes to have such calls killed",
            )
        return outcome


class RunningCalls:
    """Deadlines of the calls on one event loop, so that a blocked loop is noticed from outside."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.deadlines: dict[int, tuple[float, Task]] = {}

    def set_deadline(self, task: Task, timeout_seconds: float) -> None:
        with self.lock:
            self.deadlines[id(task)] = (time.monotonic() + timeout_seconds + CANCEL_SECONDS, task)

    def remove(self, task: Task) -> None:
        with self.lock:
            self.deadlines.pop(id(task), None)

    def take_if_overdue(self) -> tuple[list[Task], list[Task]]:
        """When a call is overdue: all overdue tasks, and all others; both are then no longer listed. Else nothing."""
        now = time.monotonic()
        with self.lock:
            entries = list(self.deadlines.values())
            overdue = [task for deadline, task in entries if deadline < now]
            if not overdue:
                return [], []
            self.deadlines.clear()
        return overdue, [task for deadline, task in entries if deadline >= now]


class AsyncLane:
    """Awaits coroutine functions on one event loop in its own thread; all calls, of all submissions, run concurrently.

    The loop lives as long as the lane, so clients that functions keep between calls stay usable. A call past the
    limit is cancelled, then its samples are tried one by one, at the same time. A coroutine that blocks the loop
    cannot be cancelled: what is overdue by then fails as timed out, the loop is left behind, and a fresh one takes
    over the other calls (which begin anew) and later ones.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self.timeout_seconds = timeout_seconds
        self.running = RunningCalls()
        self.closed = threading.Event()
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self.watcher: threading.Thread | None = None

    def start(self, task: Task) -> None:
        """Begin a task; returns at once."""
        if self.timeout_seconds is not None:
            self.running.set_deadline(task, self.timeout_seconds)
            if self.watcher is None:
                self.watcher = threading.Thread(target=self._watch, name="reward watch", daemon=True)
                self.watcher.start()
        with self.lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                run = on_own_device(partial(self._run_loop, self.loop))
                self.thread = threading.Thread(target=run, name="reward loop", daemon=True)
                self.thread.start()
            loop = self.loop
            future = asyncio.run_coroutine_threadsafe(self._score(task), loop)
        future.add_done_callback(partial(self._finish, task, loop))

    def close(self) -> None:
        self.closed.set()
        with self.lock:
            if self.loop is not None and not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.loop.stop)
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(JOIN_SECONDS)

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    async def _call(self, task: Task, inputs: Sequence[RewardInput]) -> Part:
        spec = task.function
        arguments = task.arguments(inputs)
        return inputs, await call_async(spec.function, arguments, len(inputs), spec.log_names, self.timeout_seconds)

    async def _score(self, task: Task) -> list[Part]:
        part = await self._call(task, task.inputs)
        if not is_cut(task, part[1], ASYNC_RETRIED):
            return [part]
        if self.timeout_seconds is not None and asyncio.get_running_loop() is self.loop:
            self.running.set_deadline(task, self.timeout_seconds)
        # What raised is tried with a few first: a service that is down is not asked once for every sample.
        num_first = MAX_ALIKE_SAMPLES if part[1].failure is not None and part[1].failure[0] == "raised" else None
        parts = await self._each(task, task.inputs[:num_first], part[1])
        rest = task.inputs[num_first:] if num_first else []
        if not rest or are_alike(parts):
            return [*parts, *given_up(rest, parts)]
        if self.timeout_seconds is not None and asyncio.get_running_loop() is self.loop:
            self.running.set_deadline(task, self.timeout_seconds)
        return [*parts, *await self._each(task, rest, part[1])]

    async def _each(self, task: Task, inputs: Sequence[RewardInput], failed: CallOutcome) -> list[Part]:
        """Samples called alone, at the same time."""
        singles = await asyncio.gather(*(self._call(task, [sample]) for sample in inputs))
        return [repeated(samples, outcome, failed) for samples, outcome in singles]

    def _finish(self, task: Task, loop: asyncio.AbstractEventLoop, future: "Future[list[Part]]") -> None:
        if loop is not self.loop:
            return  # the loop was left behind: its tasks have been answered, or begun anew
        self.running.remove(task)
        if future.cancelled():
            return  # the lane is closing: the runner answers what is open
        error = future.exception()
        if error is not None:
            task.fail(error)
        else:
            task.done(future.result())

    def _watch(self) -> None:
        assert self.timeout_seconds is not None
        while not self.closed.wait(min(1.0, self.timeout_seconds / 2)):
            overdue, others = self.running.take_if_overdue()
            if overdue:
                self._leave_loop()
            detail = (
                f"gave no answer within {self.timeout_seconds} s and could not be cancelled, because this or another "
                "coroutine blocks the event loop (a blocking call inside `async def`); set reward_processes to have "
                "such calls killed"
            )
            for task in overdue:
                task.done([(task.inputs, failed_call("timeout", detail))])
            for task in others:
                self.start(task)

    def _leave_loop(self) -> None:
        with self.lock:
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.loop.stop)
            self.loop = None
