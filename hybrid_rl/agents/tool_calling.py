"""One call of one tool: what it returned, as the content of a message, or why it has failed.

Processes load this file by its path (`process/call_main.py`), so it imports nothing of this package.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

NO_IMAGES = "images, audio and video cannot be used yet; return text"


class ToolOutcome(NamedTuple):
    """content: of the message. failure: (kind, text) instead, both "" if there is none: the kind is that of the
    exception, the text is for the policy."""

    content: Any
    failure: tuple[str, str] | None = None


def content_of(result: Any) -> str | list[dict[str, Any]]:
    """Return what a tool returned as the content of its message: its text, or a list of text blocks as it is. Raises
    TypeError for blocks of another kind, and for what is still to be awaited."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("the tool returned a coroutine instead of a value: it must be written with `async def`")
    is_blocks = isinstance(result, list) and result and all(isinstance(b, dict) and "type" in b for b in result)
    if not is_blocks:
        return str(result)
    for block in result:
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            raise TypeError(f"the tool returned a content block of type {block['type']!r}: {NO_IMAGES}")
    return [{"type": "text", "text": block["text"]} for block in result]


def failed_call(reason: str, detail: str) -> ToolOutcome:
    """Make the outcome of a call that gave nothing."""
    return ToolOutcome("", (reason, detail))


def user_traceback(error: BaseException) -> str:
    """Format an error for a message."""
    return "".join(traceback.format_exception_only(error)).strip()


def message_of(error: BaseException) -> str:
    """Return what an exception says, its type if that is nothing or raises."""
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def call_sync(function: Callable[..., Any], arguments: dict[str, Any]) -> ToolOutcome:
    """Call a plain tool. Whatever it raises becomes an outcome."""
    try:
        return ToolOutcome(content_of(function(**arguments)))
    except BaseException as error:  # sys.exit() too
        return failed_call(type(error).__name__, message_of(error))


async def call_async(function: Callable[..., Any], arguments: dict[str, Any]) -> ToolOutcome:
    """Await an async tool. Whatever it raises becomes an outcome, except a cancellation from outside."""
    try:
        return ToolOutcome(content_of(await function(**arguments)))
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return failed_call(type(error).__name__, message_of(error))
