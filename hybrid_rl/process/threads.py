"""Threads that run calls for others: plain ones one after another, coroutines together on an event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger("hybrid_rl")

JOIN_SECONDS = 1.0
# A cancelled coroutine gets so long to return before its event loop counts as blocked.
CANCEL_SECONDS = 1.0
# An event loop that answers nothing for so long is reported; it is asked so often at most.
BLOCKED_SECONDS, WATCH_SECONDS = 20.0, 1.0

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


class LoopWatch:
    """Reports an event loop that is blocked: nobody's agents go on then, and no limit of time ends them."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._asked = self._answered = time.monotonic()
        self._is_told = False

    def look(self) -> None:
        """Ask the loop whether it is there, and warn, once, if it has not answered for long."""
        now = time.monotonic()
        if self._answered >= self._asked:
            if now - self._answered > min(WATCH_SECONDS, BLOCKED_SECONDS / 4):
                self._asked = now
                self._loop.loop.call_soon_threadsafe(self._note_answer)
        elif not self._is_told and now - self._asked > BLOCKED_SECONDS:
            self._is_told = True
            frame = sys._current_frames().get(self._loop.thread.ident or 0)
            where = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
            logger.warning(
                "no agent has gone on for %.0f s, because a call blocks their event loop: inside of `async def`, await "
                "what takes long, or run it by `await asyncio.to_thread(...)`. It is at\n%s",
                *(BLOCKED_SECONDS, where),
            )

    def _note_answer(self) -> None:
        self._answered = time.monotonic()
