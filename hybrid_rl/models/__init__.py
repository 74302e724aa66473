"""Hugging Face models, loaded and run packed."""

from hybrid_rl.models.attention.attention_function import AttentionContext, AttentionOptions
from hybrid_rl.models.attention.padded import PaddedAttention, masked_attention
from hybrid_rl.models.model_loading import load_model
from hybrid_rl.models.packed.causal_lm import CausalLM
from hybrid_rl.models.row import Layout, PackedRow, prompt_groups
from hybrid_rl.models.tokenizer import check_tokenizer, load_tokenizer, stop_token_ids

__all__ = [
    "AttentionContext",
    "AttentionOptions",
    "CausalLM",
    "Layout",
    "PackedRow",
    "PaddedAttention",
    "check_tokenizer",
    "load_model",
    "load_tokenizer",
    "masked_attention",
    "prompt_groups",
    "stop_token_ids",
]
