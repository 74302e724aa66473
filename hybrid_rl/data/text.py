"""Texts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_rl.errors import ModelError

# Other outputs of a tokenizer are not used, and take longer to make than the ids.
IDS_ONLY = {"return_attention_mask": False, "return_token_type_ids": False}


def text_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts, with the special tokens that the tokenizer puts before each.

    A text that a chat template has rendered begins with its BOS token already, and gets no second one. An EOS token
    that the tokenizer puts after each is left out: what comes next belongs to the text.

    Raises ModelError for a tokenizer that puts any other token after a text.
    """
    # One of the texts itself: a small vocabulary may not know any other.
    probe = next(filter(None, texts), tokenizer.eos_token or "")
    whole, bare = (
        list(tokenizer(probe, add_special_tokens=special, **IDS_ONLY)["input_ids"]) for special in (True, False)
    )
    starts = (start for start in range(len(whole)) if bare and whole[start : start + len(bare)] == bare)
    added = whole[next(starts, len(whole)) + len(bare) :]
    if added and added != [tokenizer.eos_token_id]:
        raise ModelError(
            f"the tokenizer puts {tokenizer.convert_ids_to_tokens(added[-1])!r} after every text, so it would come "
            "between a prompt and its completion; use a tokenizer that adds no token there, or give messages"
        )
    bos, bos_id = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    ids = [list(one[: len(one) - len(added)]) for one in tokenizer(list(texts), **IDS_ONLY)["input_ids"]]
    if not bos:
        return ids
    return [
        one[1:] if text.startswith(bos) and one[:2] == [bos_id] * 2 else one
        for text, one in zip(texts, ids, strict=True)
    ]
