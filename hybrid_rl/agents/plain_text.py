"""Text and token ids of a tokenizer without a chat template, for agents that put their prompts together themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from hybrid_rl.agents.trajectory import Conversation
from hybrid_rl.data.text import text_ids
from hybrid_rl.errors import DataError


class PlainText:
    """A ChatFormat that knows no messages: an answer is the text of its tokens. tokenizer: of transformers."""

    error_role: Literal["tool", "user"] = "user"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        known: Sequence[Conversation],
        most_tokens: int | None = None,
    ) -> NoReturn:
        """Raise DataError: without a chat template, messages are no tokens."""
        raise DataError(
            "the policy was asked with chat messages, but its tokenizer has no chat template; ask with token ids, or "
            "set data.chat_template_path"
        )

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return an answer as a message."""
        return {"role": "assistant", "content": self.decode(token_ids)}

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Return the tokens of a text. goes_on: without those that the tokenizer puts before a text."""
        if goes_on:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return text_ids(self._tokenizer, [text])[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
