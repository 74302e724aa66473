"""Stop strings: which token completes one.

Tokens do not end where strings do: a stop string may begin and end inside of tokens, a character may be spread over
several of them, and special tokens add no text. What counts is the decoded text of the whole completion; decoding it
after every token would cost more than a small model, so two cheap tests come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are not, or not yet, a character
# Decoders treat the start of a text specially (they strip a leading space or a word-piece mark): the window begins this
# many tokens before the earliest one that a stop string can reach.
_MARGIN = 2


class StopStrings:
    """Tells after every token whether the completion's text now contains one of these strings.

    Assumes that a token adds the same text wherever it is, except at the start of a text and if it holds a part
    of a character only; this holds for byte-level, sentencepiece, word-piece and word-level tokenizers. What was learnt
    about each token id is kept, so one object should serve all requests with the same strings.
    """

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        """decode: token ids to text, as rewards see it. strings: at least one, none of them empty."""
        self._decode = decode
        self._strings = tuple(strings)
        # A text-adding token holds one byte at least, so this many reach over any of the strings.
        self._reach = max(len(string.encode()) for string in strings) + _MARGIN
        self._may_complete: dict[int, bool] = {}
        self._adds_text: dict[int, bool] = {}

    def is_completed(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last of a completion's token ids completes a stop string; to be asked after every
        token."""
        last = token_ids[-1]
        if last not in self._may_complete:
            self._learn(last)
        if not self._may_complete[last]:
            return False
        text = self._decode(self._window(token_ids))
        # A window may begin inside a character, and some decoders give up on all bytes around it.
        return (_BROKEN in text or self._is_in(text)) and self._is_in(self._decode(token_ids))

    def _is_in(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _window(self, token_ids: Sequence[int]) -> Sequence[int]:
        start, missing = len(token_ids), self._reach
        while start > 0 and missing > 0:
            start -= 1
            if token_ids[start] not in self._adds_text:
                self._learn(token_ids[start])
            missing -= self._adds_text[token_ids[start]]
        return token_ids[start:]

    def _learn(self, token_id: int) -> None:
        """Find out what a token adds to a text: from its own text, and from a second copy of it after the first."""
        once, twice = self._decode([token_id]), self._decode([token_id, token_id])
        added = twice[len(once) :]
        self._adds_text[token_id] = bool(once) and bool(added)
        self._may_complete[token_id] = (
            _BROKEN in twice or not twice.startswith(once) or self._may_end_in(once) or self._may_end_in(added)
        )

    def _may_end_in(self, piece: str) -> bool:
        """Return whether one of the strings ends inside of `piece`, if the right text is before it."""
        return any(
            string in piece or any(piece.startswith(string[start:]) for start in range(1, len(string)))
            for string in self._strings
        )
