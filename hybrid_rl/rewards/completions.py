"""The text of a completion: what the policy said, the same whatever the template and the tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.batch.messages import content_text, message_text
from hybrid_rl.data.prompts import Messages, Prompt
from hybrid_rl.data.rendering import THOUGHTS

THINK, THINK_END = "<think>", "</think>"
CALLS = ("tool_calls", "function_call", "tool_call_error")  # of a message that asks a tool, or tried to
TOOLS = ("tool", "function", "ipython")  # roles
TAIL_TOKENS = 16  # of a prompt, more than <think> and the space after it take


def completion_text(completion: str | Messages, *, thinking: bool = True, opening: str = "") -> str:
    """Return what the policy said in a completion: the text itself, or that of the policy's last message.

    Nothing ("") was said in messages that end with a tool call or the result of one, whatever text stands beside the
    call: the answer was still to come. Messages of users after the last answer do not count.

    thinking: with it, a message's `reasoning_content` stands before its content, between <think> and </think>; without
    it the text is what follows the last </think>, and nothing if a thought that begins the text does not end. opening:
    what the prompt has opened of the answer (`completion_openings` of reward functions), which is put before it.
    """
    text = opening + (completion if isinstance(completion, str) else _last_answer(completion))
    if thinking:
        return text
    if THINK_END in text:
        return text.rpartition(THINK_END)[2]
    return "" if text.lstrip().startswith(THINK) else text


def completion_texts(
    completions: Sequence[str | Messages], openings: Sequence[str] | None = None, *, thinking: bool = True
) -> list[str]:
    """Return `completion_text` of each completion. openings: one for each; None: no prompt has opened any."""
    all_openings = openings or [""] * len(completions)
    pairs = zip(completions, all_openings, strict=True)
    return [completion_text(completion, thinking=thinking, opening=opening) for completion, opening in pairs]


def conversation_text(completion: str | Messages, opening: str = "") -> str:
    """Return a completion for a judge: all messages with their roles and calls; of a single answer only its text."""
    if isinstance(completion, str) or (len(completion) == 1 and _is_answer(completion[0])):
        return completion_text(completion, opening=opening)
    return "\n".join(message_text({**message, "content": _with_thought(message)}) for message in completion)


def response_text(completion: str | Messages) -> str:
    """Return all that followed the prompt, results of tools included, joined by newlines."""
    return completion if isinstance(completion, str) else "\n".join(map(_with_thought, completion))


def opening_of(prompt: Prompt, tail: str) -> str:
    """Return the thought that a prompt has opened and not closed, from <think> on; "" if there is none.

    prompt: as in the dataset; its last message may be an answer that the policy continues. tail: the text of the last
    tokens that the policy was shown, which the chat template wrote.
    """
    last = prompt[-1] if prompt and not isinstance(prompt, str) else {}
    begun = content_text(last.get("content")) if last.get("role") == "assistant" else ""
    _, is_open, thought = begun.rpartition(THINK)
    if is_open and THINK_END not in thought:
        return THINK + thought
    return tail[tail.rindex(THINK) :] if tail.rstrip().endswith(THINK) else ""


def _last_answer(messages: Messages) -> str:
    for message in reversed(messages):
        if message.get("role", "assistant") == "assistant":
            return _with_thought(message) if _is_answer(message) else ""
        if message["role"] in TOOLS:
            return ""
    return ""


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role", "assistant") == "assistant" and not any(message.get(key) for key in CALLS)


def _with_thought(message: Mapping[str, Any]) -> str:
    """Return a message's content after its thinking."""
    content = content_text(message.get("content"))
    thought = next((str(message[key]).strip("\n") for key in THOUGHTS if message.get(key)), "")
    if not thought.strip():
        return content
    # An answer that was cut off within its thought has no content, and did not close the thought.
    return f"{THINK}\n{thought}\n{THINK_END}\n\n{content}" if content.strip() else f"{THINK}\n{thought}"
