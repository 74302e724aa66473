"""Threads for calls of users' code, and threads that run event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def start_thread(name: str, body: Callable[[], None], enter: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread, which does not keep the process from ending. enter: is called in it first."""

    def run() -> None:
        enter()
        body()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class LoopThread:
    """A thread that runs an event loop. enter: is called in it first."""

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
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
