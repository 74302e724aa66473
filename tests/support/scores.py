"""Rewards of the tiny model, without torch: a process that is to call one imports this file and no more."""

from collections.abc import Sequence
from typing import Any


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A different reward for nearly every completion: every group has a signal."""
    return [sum((3 * position + 1) * token for position, token in enumerate(ids)) % 17 / 17 for ids in completion_ids]


def exact(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
