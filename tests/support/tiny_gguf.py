"""Tiny models as GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

WORDS = [*"0123456789+= ", "10", "<unk>", "<s>", "</s>"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_llama(
    path: Path, kind: str = "Q8_0", leaves_out: str = "", architecture: str = "llama", template: str | None = None
) -> dict[str, torch.Tensor]:
    """Write a llama as llama.cpp would, its matrices quantised; returns the weights that the file holds, by the names
    of transformers. Skips the test without the package gguf."""
    gguf = pytest.importorskip("gguf")
    config = LlamaConfig(vocab_size=len(WORDS), num_hidden_layers=2, max_position_embeddings=64, **SIZES)
    torch.manual_seed(0)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    writer, held = gguf.GGUFWriter(path, architecture), {}
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(WORDS))
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([word.replace(" ", "\u0120") for word in WORDS])
    writer.add_token_types([1] * (len(WORDS) - 3) + [3, 3, 3])
    writer.add_token_merges(["1 0"])
    writer.add_unk_token_id(len(WORDS) - 3)
    writer.add_bos_token_id(len(WORDS) - 2)
    writer.add_eos_token_id(len(WORDS) - 1)
    if template is not None:
        writer.add_chat_template(template)
    for name, tensor in state.items():
        if leaves_out and leaves_out in name:
            continue
        theirs = name
        for ours, other in NAMES.items():
            theirs = theirs.replace(ours, other)
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp turns pairs of dims that are halves in transformers
            heads = 2 if "q_proj" in name else 1
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        quantization = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        packed = gguf.quants.quantize(values, quantization)
        back = torch.from_numpy(gguf.quants.dequantize(packed, quantization).reshape(values.shape).copy())
        if "q_proj" in name or "k_proj" in name:
            back = back.reshape(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        held[name] = back
        writer.add_tensor(theirs, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
