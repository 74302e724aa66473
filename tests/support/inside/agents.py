"""What agents, environments and tools are made of: tests break it, or look at what it holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


def environments_of(agent: Any) -> Any:
    """The pool of environments of a tool agent."""
    return agent._pool


def on_thread_of(environment: Any, function: Callable[[], Any]) -> Awaitable[Any]:
    """Call a function on the thread of an environment."""
    outcome: Awaitable[Any] = environment._caller.call(function, environment._thread)
    return outcome


def replace_agent(endpoint: Any, function: Callable[..., Any]) -> None:
    """Have an endpoint run another agent."""
    endpoint._function = function


def forget_loop(caller: Any) -> Any:
    """Return the loop of a caller, which has none from now on."""
    loop, caller._loop = caller.loop, None
    return loop


def limit_tool(functions: Any, name: str, seconds: float) -> None:
    """Give the calls of a tool in a process so long."""
    functions._processes[name]._seconds = seconds
