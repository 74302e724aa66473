"""Chat messages as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def is_chat(value: Any) -> bool:
    """Whether a prompt or completion is a list of chat messages."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(_is_message(one) for one in value)


def prompt_text(prompt: Any) -> str:
    """Return a prompt as in the dataset, text or chat messages, as text: a line for each message."""
    return "\n".join(message_text(message) for message in prompt) if is_chat(prompt) else str(prompt)


def message_text(message: Mapping[str, Any]) -> str:
    """Write down a message: its role, its text, and each tool call as a call of a function."""
    return f"{message['role']}: {message_content(message)}"


def message_content(message: Mapping[str, Any]) -> str:
    """Write down what a message says: its text, and each tool call as a call of a function."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(block.get("text", "")) for block in content)
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    made = [f"{call.get('name')}({_arguments_text(call.get('arguments'))})" for call in calls]
    return " -> ".join(part for part in (content.strip(), *made) if part)


def _arguments_text(arguments: Any) -> str:
    if not isinstance(arguments, Mapping):
        return str(arguments or "")
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value
