"""Prompts: where they come from, how they become tokens, in which order they are used, how samples are packed."""

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
