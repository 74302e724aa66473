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
    return f"{message.get('role', 'assistant')}: {message_content(message)}"


def message_content(message: Mapping[str, Any]) -> str:
    """Write down what a message says: its text, and each tool call as a call of a function."""
    called = [*(message.get("tool_calls") or ()), message.get("function_call")]
    calls = [call.get("function", call) for call in called if call]
    made = [f"{call.get('name')}({_arguments_text(call.get('arguments'))})" for call in calls]
    return " -> ".join(part for part in (content_text(message.get("content")).strip(), *made) if part)


def content_text(content: Any) -> str:
    """Return the content of a message as text: of blocks, in a list or alone, their texts; of None ""."""
    blocks = content if isinstance(content, Sequence) and not isinstance(content, str) else [content or ""]
    return "".join(str(block.get("text") or "") if isinstance(block, Mapping) else str(block) for block in blocks)


def _arguments_text(arguments: Any) -> str:
    if not isinstance(arguments, Mapping):
        return str(arguments or "")
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value
