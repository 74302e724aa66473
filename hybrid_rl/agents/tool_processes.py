"""Plain tools in processes of their own, which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from hybrid_rl.agents.calls import Caller, CallTimeoutError, Outcome
from hybrid_rl.agents.tool_calling import ToolOutcome
from hybrid_rl.controller import child_environment
from hybrid_rl.errors import AgentError, ConfigError
from hybrid_rl.process.call_main import FORKED
from hybrid_rl.process.call_process import END_SECONDS, CallProcess, ProcessEndedError, packed

CALLING = Path(__file__).with_name("tool_calling.py")


class ToolFailedError(Exception):
    """What a tool raised in a process; only its text came back. The kind of the exception is a note."""


class ToolKilledError(ToolFailedError):
    """The process of a tool was killed during a call."""


class ToolProcesses:
    """At most `num_processes` processes that call plain functions, started when first needed and kept. A call past its
    time limit is killed with its process, and so is all that it started; time waiting for a process does not count. A
    call whose process is killed from outside is made once more in another one, with the same `call_key`.

    functions: by the names of their tools. caller: on whose event loop the processes are used, and whose time limit
    holds. Raises ConfigError for a function that cannot be sent.
    """

    def __init__(self, functions: Mapping[str, Any], num_processes: int, caller: Caller) -> None:
        self._functions = packed((name, False, _pickled(name, function)) for name, function in functions.items())
        self._caller, self._seconds = caller, caller.timeout_seconds
        self._slots: asyncio.Semaphore | None = None
        self._num_processes = num_processes
        self._idle: list[CallProcess] = []
        self._all: set[CallProcess] = set()

    async def call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Call a function by name. Raises AgentError if processes cannot load the functions."""
        loop = self._caller.loop
        future = loop.start(self._call_again(name, arguments))
        try:
            return await asyncio.wrap_future(future)
        finally:
            future.cancel()

    async def _call_again(self, name: str, arguments: dict[str, Any]) -> Outcome:
        outcome = await self._call(name, arguments)
        return await self._call(name, arguments) if isinstance(outcome.error, ToolKilledError) else outcome

    async def _call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Do it on the caller's event loop, which streams to processes are bound to."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._num_processes)
        async with self._slots:
            while self._idle and not self._idle[-1].is_alive:
                self._end(self._idle.pop())
            process = self._idle.pop() if self._idle else self._begin()
            try:
                if process.streams is None and (problem := await process.load(self._functions)) is not None:
                    raise AgentError(
                        "a process cannot load the tools; they must be importable there, or be defined in the script "
                        f"or notebook itself (or set agents.tool_processes=0): {problem}"
                    )
                outcome = ToolOutcome(*await process.call(cloudpickle.dumps((name, arguments)), self._seconds))
            except TimeoutError:
                why = "its process was killed"
                return Outcome(None, CallTimeoutError(f"no answer within {self._seconds:g} s ({why})"))
            except ProcessEndedError as error:
                failed = ToolKilledError if error.is_killed else ToolFailedError
                return Outcome(None, failed(f"the process of the tool ended with {error}"))
            except BaseException:  # a cancellation too: the call may still run
                process.kill()
                raise
            finally:
                if process.is_alive:
                    self._idle.append(process)
                else:
                    self._end(process)
        if outcome.failure is not None and outcome.failure[0] == FORKED:
            forked = f"{name} forked its process, and the child came back from it too; end the child by os._exit()"
            return Outcome(None, ToolFailedError(forked))
        if outcome.failure is not None:
            kind, text = outcome.failure
            raised = ToolFailedError(text)
            raised.add_note(f"(the process of the tool raised {kind})")
            return Outcome(None, raised)
        return Outcome(outcome.content)

    def _begin(self) -> CallProcess:
        process = CallProcess(CALLING, child_environment())
        self._all.add(process)
        return process

    def _end(self, process: CallProcess) -> None:
        process.kill()
        self._all.discard(process)

    def close(self) -> None:
        """Kill and reap all processes."""
        with contextlib.suppress(TimeoutError):
            self._caller.loop.start(self._close()).result(END_SECONDS)

    async def _close(self) -> None:
        for process in list(self._all):
            self._end(process)
        self._idle.clear()


def _pickled(name: str, function: Any) -> bytes:
    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"the tool {name!r} cannot be sent to a process ({type(error).__name__}: {error}); make what it captures "
            "picklable, create it inside the function, or set agents.tool_processes=0"
        ) from error
