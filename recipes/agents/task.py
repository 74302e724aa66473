"""What a recipe of agents learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from recipes.agents.chat import Message, build_tokenizer, render

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class AgentTask:
    """What a policy learns, and from what it starts.

    train, heldout: rows of the dataset. conversations: to imitate before; tools: JSON schemas that they are shown with.
    arguments: of the Trainer, which say how trajectories are made and scored. warm_start_steps: of supervised learning.
    max_length: tokens of a conversation.
    """

    train: Rows
    heldout: Rows
    conversations: Sequence[Sequence[Message]]
    tools: Sequence[Message]
    arguments: Mapping[str, Any]
    warm_start_steps: int
    max_length: int

    @property
    def given(self) -> dict[str, Any]:
        """All that the Trainer gets of the task: its rows and arguments."""
        return {"train_dataset": self.train, "eval_dataset": self.heldout, **self.arguments}

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Build a tokenizer with the words of the first conversations."""
        bare = build_tokenizer([], self.max_length)
        texts = [render(bare, said, self.tools) for said in self.conversations[:100]]
        return build_tokenizer(texts, self.max_length)
