"""Chat messages as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def is_chat(value: Any) -> bool:
    """Whether a prompt or completion is a list of chat messages."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(_is_message(message) for message in value)


def prompt_text(prompt: Any) -> str:
    """Return a prompt as in the dataset, text or chat messages, as text: a line for each message."""
    return "\n".join(message_text(message) for message in prompt) if is_chat(prompt) else str(prompt)


def message_text(message: Mapping[str, Any]) -> str:
    """Write down a message: its role, its text, and each tool call as a call of a function."""
    return f"{message.get('role', 'assistant')}: {message_content(message)}"


def message_content(message: Mapping[str, Any]) -> str:
    """Write down what a message says: its text, and each tool call as a call of a function."""
    called = [*(message.get("tool_calls") or ()), message.get("function_call")]
    made = [call_text(call) for call in called if call]
    return " -> ".join(part for part in (content_text(message.get("content")).strip(), *made) if part)


def content_text(content: Any) -> str:
    """Return the content of a message as text: of blocks, in a list or alone, their texts; of None ""."""
    blocks = content if isinstance(content, Sequence) and not isinstance(content, str) else [content or ""]
    return "".join(str(block.get("text") or "") if isinstance(block, Mapping) else str(block) for block in blocks)


def call_text(call: Mapping[str, Any]) -> str:
    """Write down a tool call as a call of a function."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        pairs = (f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in arguments.items())
        return f"{function.get('name')}({', '.join(pairs)})"
    return f"{function.get('name')}({arguments or ''})"


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value
