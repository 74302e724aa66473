"""Tiny random models of the architectures that the library promises to run, built from their config classes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97
EOS = 1
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": EOS,
}
WINDOW = {"sliding_window": 3}
MIXED_WINDOW = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": EOS}

# name: (config class, model class, its own settings). Windows are shorter than the sequences of the tests.
SUPPORTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", WINDOW),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **MIXED_WINDOW,
            "head_dim": 8,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**MIXED_WINDOW, "head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "bos_token_id": None, "pad_token_id": 0}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 4.0, "attention_multiplier": 0.2}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.25}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {}),
    # Their layers hand nothing on that they do not know.
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {"hidden_act": "relu2"}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 16, "patch_size": 4}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
QWEN_TOWER |= {"out_hidden_size": 32}
QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
IMAGE = {"image_token_index": 90}
# Vision-language models, trained on text. name: (config class, settings of the text model, of the tower, of both).
VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-vl": ("Qwen2_5_VLConfig", SECTIONS, {**QWEN_TOWER, "fullatt_block_indexes": [0]}, QWEN_TOKENS),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {**SECTIONS, "head_dim": 8},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        QWEN_TOKENS,
    ),
    "mistral3": ("Mistral3Config", {"model_type": "mistral"}, {**TOWER, "model_type": "pixtral"}, IMAGE),
    "internvl": (
        "InternVLConfig",
        {"model_type": "qwen2"},
        {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_token_id": 90},
    ),
    "llava": ("LlavaConfig", {"model_type": "llama"}, {**TOWER, "model_type": "clip_vision_model"}, IMAGE),
}
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "attention sinks": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 8}),
    "an encoder": ("BertConfig", "BertForMaskedLM", {}),
    "a state space": ("MambaConfig", "MambaForCausalLM", {"state_size": 4}),
    "position in the mask": ("BloomConfig", "BloomForCausalLM", {"n_head": 4}),
    "convolutions": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "a mask of its own": ("DogeConfig", "DogeForCausalLM", {}),
    "its own attention code": ("FalconConfig", "FalconForCausalLM", {"alibi": False}),
    "encoder and decoder": ("T5Config", "T5ForConditionalGeneration", {}),
}


def build(
    name: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A model with weights large enough that every part of it shows in the logits. The same weights per name."""
    config_class, model_class, own = {**SUPPORTED, **REFUSED}[name]
    settings = {**(own if "n_embd" in own else {**BASE, **own}), **changes}
    config = getattr(transformers, config_class)(**settings)
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model.to(dtype).eval()


def build_vision(name: str) -> PreTrainedModel:
    """A vision-language model. The same weights per name."""
    config_class, text, tower, further = VISION[name]
    config = getattr(transformers, config_class)(text_config=BASE | text, vision_config=tower, **further)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForImageTextToText.from_config(config).eval()
