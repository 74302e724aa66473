"""The text of each token of a sample, as people read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no whole character
MAX_JOINED = 6  # tokens: a character has at most four bytes, a joined emoji is decoded piece by piece


def token_texts(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return one text per token; joined, they are the text of the completion. Where several tokens make one character,
    the last of them has it, and the others are empty.

    decode: token ids to text, special tokens included.
    """
    texts: list[str] = []
    waiting: list[int] = []
    for token_id in token_ids:
        waiting.append(int(token_id))
        text = decode(waiting)
        if UNFINISHED in text and len(waiting) < MAX_JOINED:
            texts.append("")
            continue
        texts.append(text)
        waiting.clear()
    if waiting:
        texts[-1] = decode(waiting)
    return texts
