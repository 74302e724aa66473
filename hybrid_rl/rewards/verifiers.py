"""Ready-made reward functions."""

from collections.abc import Sequence
from typing import Any

from hybrid_rl.rewards.functions import Messages


def completion_text(completion: str | Messages) -> str:
    """Text of a completion as reward functions receive it: plain, or chat messages (contents joined by newlines)."""
    return completion if isinstance(completion, str) else "\n".join(str(message["content"]) for message in completion)


def exact_match(completions: Sequence[str | Messages], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1.0 where the completion equals the `answer` column, both as text without surrounding white space, else 0.0.

    A sample whose answer is None gets None: the function does not apply to it.
    """
    return [
        None if expected is None else float(completion_text(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]
