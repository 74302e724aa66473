"""Reward functions inside the trainer's process: plain ones in one thread, coroutines on one event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from hybrid_rl.process.threads import CANCEL_SECONDS, JOIN_SECONDS, CallThread, LoopThread, answer_of
from hybrid_rl.rewards.calling import CallOutcome, call_async, call_sync, failed_call
from hybrid_rl.rewards.functions import RewardFunction

logger = logging.getLogger("hybrid_rl")


def on_device() -> None:
    """Make the GPU of the rank that of this thread."""
    # Not above: a reward process imports this package for a reward or a state that is of it, and must not import torch
    # for that.
    from hybrid_rl.controller import enter_device

    enter_device()


def dtype_kept(call: Callable[[], CallOutcome], name: str) -> CallOutcome:
    """Call a function, and put torch's default dtype back if it has set another, which would be that of training."""
    torch = sys.modules.get("torch")
    if torch is None:
        return call()
    before = torch.get_default_dtype()
    try:
        return call()
    finally:
        if (after := torch.get_default_dtype()) != before:
            torch.set_default_dtype(before)
            logger.warning(
                "the reward function %s has set torch's default dtype to %s, which is that of training too, so it is "
                "%s again: pass dtype= to what needs another one, or set reward_processes",
                *(name, after, before),
            )


class ThreadCaller:
    """Calls in this process: plain functions one after another in a thread, all coroutines together on an event loop.

    A plain call past the limit is left behind with its thread: Python threads cannot be killed, so it may go on using
    the CPU (or holding the GIL: then even the limit comes late). A coroutine past the limit is cancelled; one that
    blocks the event loop cannot be, and is left behind with the loop, while the other calls begin again on a fresh one.
    The remedy is `num_processes`: processes can be killed. The event loop lives until then, so clients that functions
    keep between calls stay usable.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self.timeout_seconds = timeout_seconds
        self._one_at_a_time = asyncio.Semaphore(1)
        self._thread: CallThread | None = None
        self._loop: tuple[LoopThread, asyncio.Future[None]] | None = None  # the future: done when it is left behind

    def slot(self, spec: RewardFunction) -> AbstractAsyncContextManager[Any]:
        """Return what is held during a call."""
        return nullcontext() if spec.is_async else self._one_at_a_time

    async def call(self, spec: RewardFunction, arguments: Callable[[], dict[str, Any]], count: int) -> CallOutcome:
        """Call a function once, over `count` samples."""
        return await (self._await if spec.is_async else self._call)(spec, arguments, count)

    async def _call(self, spec: RewardFunction, arguments: Callable[[], dict[str, Any]], count: int) -> CallOutcome:
        self._thread = self._thread or CallThread("reward call", on_device)
        call = partial(call_sync, spec.function, arguments(), count, spec.log_names)
        future = self._thread.start(partial(dtype_kept, call, spec.name))
        if (outcome := await answer_of(future, self.timeout_seconds)) is not None:
            return outcome
        self._thread.stop()
        self._thread = None
        return failed_call(
            "timeout",
            f"gave no answer within {self.timeout_seconds} s; its thread cannot be killed and was left behind, "
            "perhaps still running: set reward_processes to have such calls killed",
            is_left_behind=True,
        )

    async def _await(self, spec: RewardFunction, arguments: Callable[[], dict[str, Any]], count: int) -> CallOutcome:
        limit = None if self.timeout_seconds is None else self.timeout_seconds + CANCEL_SECONDS
        while True:
            if self._loop is None:
                self._loop = LoopThread("reward loop", on_device), asyncio.get_running_loop().create_future()
            thread, is_left = self._loop
            call = call_async(spec.function, arguments(), count, spec.log_names, self.timeout_seconds)
            if (outcome := await answer_of(thread.start(call), limit, is_left)) is not None:
                return outcome
            if not is_left.done():
                break
        is_left.set_result(None)
        thread.stop()
        self._loop = None
        return failed_call(
            "timeout",
            f"gave no answer within {self.timeout_seconds} s and could not be cancelled, because this or another "
            "coroutine blocks the event loop (a blocking call inside `async def`); set reward_processes to have "
            "such calls killed",
            is_left_behind=True,
        )

    def close(self) -> None:
        """End the threads; one that hangs is not waited for."""
        for thread in (self._thread, self._loop and self._loop[0]):
            if thread is not None:
                thread.stop()
                thread.thread.join(JOIN_SECONDS)
