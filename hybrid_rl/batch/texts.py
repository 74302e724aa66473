"""Texts of single tokens, and what makes a batch readable for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

# Tokens before one whose text depends on them: enough for a character of four bytes, and for the space of a word.
CONTEXT = 6
UNFINISHED = "\ufffd"  # what bytes that are no whole character decode to


@dataclass(frozen=True)
class Reader:
    """What a batch needs to be read by people, beyond its columns. tokenizer: of the policy. reward_names: of the
    reward functions, in the order of the column function_rewards."""

    tokenizer: Any
    reward_names: tuple[str, ...] = ()


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special tokens included; joined, they are the text of all of them.

    A character that takes several tokens is the text of its last one; the texts of the others are empty. Nothing is
    tokenised.
    """
    ids = [int(token) for token in token_ids]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    texts = list(_by_stream(backend, ids)) if backend is not None else list(_by_windows(tokenizer, ids))
    pending = next((place for place in range(len(ids), 0, -1) if texts[place - 1]), 0)
    if pending < len(ids):  # the completion ends within a character
        texts[-1] = str(tokenizer.decode(ids[pending:], skip_special_tokens=False))
    return texts


def _by_stream(backend: Any, ids: Sequence[int]) -> Iterator[str]:
    stream = DecodeStream(skip_special_tokens=False)
    for token in ids:
        yield stream.step(backend, token) or ""


def _by_windows(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """Decode each token with those before it, for tokenizers that are not of the library `tokenizers`."""
    first = 0  # of the tokens whose character is not finished
    for end in range(1, len(ids) + 1):
        start = max(0, first - CONTEXT)
        before = str(tokenizer.decode(ids[start:first], skip_special_tokens=False)) if first > start else ""
        text = str(tokenizer.decode(ids[start:end], skip_special_tokens=False))
        if text.endswith(UNFINISHED) or len(text) <= len(before):
            yield ""
        else:
            yield text[len(before) :]
            first = end
