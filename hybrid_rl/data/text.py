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
    # Asked at every call, because settings of a tokenizer change, and of the shortest text, because that costs least. A
    # text that is here: a small vocabulary may not know any other.
    asked = list(texts) if any(texts) else [*texts, tokenizer.eos_token or ""]
    encoded: list[list[int]] = tokenizer(asked, **IDS_ONLY)["input_ids"]
    added: list[int] = []
    # A fast tokenizer says whether it adds any; code in Python may do so and not say it.
    if not getattr(tokenizer, "is_fast", False) or tokenizer.num_special_tokens_to_add():
        probe, whole = min(zip(asked, encoded, strict=True), key=lambda pair: (not pair[0], len(pair[0])))
        bare = list(tokenizer(probe, add_special_tokens=False, **IDS_ONLY)["input_ids"])
        starts = (start for start in range(len(whole)) if bare and whole[start : start + len(bare)] == bare)
        added = whole[next(starts, len(whole)) + len(bare) :]
    if added and added != [tokenizer.eos_token_id]:
        raise ModelError(
            f"the tokenizer puts {tokenizer.convert_ids_to_tokens(added[-1])!r} after every text, so it would come "
            "between a prompt and its completion; use a tokenizer that adds no token there, or give messages"
        )
    bos, bos_id = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    ids = [list(token_ids[: len(token_ids) - len(added)]) for token_ids in encoded[: len(texts)]]
    if not bos:
        return ids
    return [
        token_ids[1:] if text.startswith(bos) and token_ids[:2] == [bos_id] * 2 else token_ids
        for text, token_ids in zip(texts, ids, strict=True)
    ]
