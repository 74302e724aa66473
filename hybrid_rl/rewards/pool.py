"""Reward functions in separate processes, which can be killed.

Ready-made pools were tried; `pebble.ProcessPool` 5.2, which has a time limit per task and replaces what it kills,
breaks four promises that tests/unit/rewards/test_pool.py holds:

- with spawn and forkserver it imports the user's script again, so that a script needs a `__main__` guard (and fork is
  not safe below a trainer, which has threads and perhaps a CUDA context);
- a process that a function started outlives the kill of its worker;
- a worker in a call outlives a trainer that was killed;
- if a function forks and the child comes back, the child's answer may be taken for the function's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from hybrid_rl.errors import ConfigError, RewardError
from hybrid_rl.process.call_main import FORKED
from hybrid_rl.process.call_process import CallProcess, ProcessEndedError, packed
from hybrid_rl.rewards.calling import CallOutcome, failed_call
from hybrid_rl.rewards.functions import RewardFunction

CALLING = Path(__file__).with_name("calling.py")


def pickle_functions(functions: Sequence[RewardFunction]) -> bytes:
    """Pack all functions as one message for a process. Raises ConfigError naming the one that cannot be pickled."""
    blobs = []
    for spec in functions:
        try:
            blobs.append((spec.name, spec.is_async, cloudpickle.dumps(spec.function)))
        except Exception as error:
            raise ConfigError(
                f"reward function {spec.name!r} cannot be sent to a process ({type(error).__name__}: {error}); make "
                "what it captures picklable, create it inside the function, or set reward_processes=0"
            ) from error
    return packed(blobs)


class RewardProcess(CallProcess):
    """One process that calls reward functions."""

    def __init__(self) -> None:
        from hybrid_rl.controller import child_environment  # imports torch: see `on_device`

        super().__init__(CALLING, child_environment())

    async def start(self, functions: bytes) -> None:
        """Have the functions loaded. Raises RewardError with the process's traceback."""
        problem = await self.load(functions)
        if problem is not None:
            raise RewardError(
                "a reward process cannot load the reward functions; they must be importable there, or be defined in "
                f"the script or notebook itself (or set reward_processes=0): {problem}"
            )

    async def outcome(self, request: bytes, timeout_seconds: float | None) -> CallOutcome:
        """Have one request answered. After "timeout" or "died" the process is gone."""
        try:
            return CallOutcome(*await self.call(request, timeout_seconds))
        except TimeoutError:
            return failed_call("timeout", f"gave no answer within {timeout_seconds} s; its process was killed")
        except ProcessEndedError as error:
            return failed_call("died", f"the reward process ended during the call with {error}")


class ProcessCaller:
    """At most `num_processes` reward processes, started when first needed and kept."""

    def __init__(self, functions: Sequence[RewardFunction], num_processes: int, timeout_seconds: float | None) -> None:
        self.functions = pickle_functions(functions)
        self.timeout_seconds = timeout_seconds
        self.num_processes = num_processes
        self.idle: list[RewardProcess] = []
        self._slots = asyncio.Semaphore(num_processes)

    def slot(self, spec: RewardFunction) -> asyncio.Semaphore:
        """Return what is held during a call."""
        return self._slots

    async def call(self, spec: RewardFunction, arguments: Callable[[], dict[str, Any]], count: int) -> CallOutcome:
        """Call a function once, over `count` samples. Raises RewardError if functions or arguments cannot travel."""
        keywords = arguments()
        try:
            request = cloudpickle.dumps((spec.name, keywords, count, spec.log_names))
        except Exception as error:
            raise RewardError(
                f"the arguments of reward function {spec.name!r} ({', '.join(sorted(keywords))}) cannot be "
                f"sent to a process: {type(error).__name__}: {error}; set reward_processes=0"
            ) from error
        while self.idle and not self.idle[-1].is_alive:
            self.idle.pop().kill()
        process = self.idle.pop() if self.idle else RewardProcess()
        try:
            if process.streams is None:
                await process.start(self.functions)
            outcome = await process.outcome(request, self.timeout_seconds)
        except BaseException:  # a cancellation too: the runner is closing
            process.kill()
            raise
        if process.is_alive:
            self.idle.append(process)
        else:
            process.kill()
        if outcome.failure is not None and outcome.failure[0] == FORKED:
            raise RewardError(
                f"reward function {spec.name!r}, or one that was called before it, forked its process, and "
                "the child came back from the function too, so that there were two answers: end the child inside the "
                "function, with os._exit()"
            )
        return outcome

    def close(self) -> None:
        """Kill and reap all processes. Those in a call end with its cancellation."""
        for process in self.idle:
            process.kill()
