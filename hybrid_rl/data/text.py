"""Texts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Other outputs of a tokenizer are not used, and take longer to make than the ids.
IDS_ONLY = {"return_attention_mask": False, "return_token_type_ids": False}


def text_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts, with the special tokens that the tokenizer puts around each.

    A text that a chat template has rendered begins with its BOS token already, and gets no second one.
    """
    ids = tokenizer(list(texts), **IDS_ONLY)["input_ids"]
    bos, bos_id = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    if not bos:
        return [list(one) for one in ids]
    return [
        list(one[1:] if text.startswith(bos) and list(one[:2]) == [bos_id] * 2 else one)
        for text, one in zip(texts, ids, strict=True)
    ]
