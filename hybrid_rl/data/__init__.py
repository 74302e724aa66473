"""Prompts: their sources, their encoding as tokens, the order of their use; and splitting samples by length or cost."""

from __future__ import annotations

from hybrid_rl.data.packing import balance, pack_by_tokens
from hybrid_rl.data.prompts import PromptEncoder, PromptRoom, PromptRow
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.data.source import SizedSource, StreamSource, load_source

__all__ = [
    "PromptEncoder",
    "PromptRoom",
    "PromptRow",
    "PromptSampler",
    "SizedSource",
    "StreamSource",
    "balance",
    "load_source",
    "pack_by_tokens",
]
