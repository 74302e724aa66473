"""Threads that run calls for others: plain ones one after another, coroutines together on an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

JOIN_SECONDS = 1.0
# A cancelled coroutine gets so long to return before its event loop counts as blocked.
CANCEL_SECONDS = 1.0

T = TypeVar("T")
Enter = Callable[[], object]  # what a thread does first, such as choosing its GPU


def start_thread(name: str, body: Callable[[], None], enter: Enter) -> threading.Thread:
    """Start a daemon thread: it does not keep the process alive."""

    def run() -> None:
        enter()
        body()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class CallThread:
    """A thread that runs one plain call at a time, and can be left behind if a call hangs."""

    def __init__(self, name: str, enter: Enter) -> None:
        self.calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._num_open = 0
        self._lock = threading.Lock()
        self.thread = start_thread(name, self._run, enter)

    def _run(self) -> None:
        while (item := self.calls.get()) is not None:
            call, future = item
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # an exception that cannot even be formatted
                    self._note(-1)
                    future.set_exception(error)
                else:
                    self._note(-1)
                    future.set_result(result)
                    del result
            else:
                self._note(-1)
            del item, call, future  # what the last call held is not kept while waiting for the next

    def _note(self, change: int) -> None:
        with self._lock:
            self._num_open += change

    @property
    def is_idle(self) -> bool:
        """Whether no call runs or waits."""
        return not self._num_open

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Run a call after those before it. It can be cancelled until it begins."""
        future: Future[T] = Future()
        self._note(1)
        self.calls.put((call, future))
        return future

    def stop(self) -> None:
        """End the thread, as soon as its calls have returned."""
        self.calls.put(None)


class LoopThread:
    """A thread that runs an event loop."""

    def __init__(self, name: str, enter: Enter) -> None:
        self.loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self.thread = start_thread(name, self._run, enter)

    def _run(self) -> None:
        async def wait() -> None:
            await self._ending.wait()

        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(wait())

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine together with all others."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        """Cancel what is still running and end the thread, as soon as nothing blocks the loop."""
        self.loop.call_soon_threadsafe(self._ending.set)


async def answer_of(future: Future[T], seconds: float | None, *others: asyncio.Future[None]) -> T | None:
    """Wait for an answer; None if there is none after so many seconds, or when one of the others is done."""
    answer = asyncio.wrap_future(future)
    waited: list[asyncio.Future[Any]] = [answer, *others]
    await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return answer.result() if answer.done() else None
