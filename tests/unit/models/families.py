"""Tiny random models of the architectures that the library promises to run, built from their config classes, and what
it promises of each: tests are parametrised over these tables, and the lists of docs/models.md are written from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support.libraries.transformers_names import name_attention, name_experts

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
GPT2 |= {"pad_token_id": 0}
HEADS = {"head_dim": 8}
SOFT = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
# Multiples of 8 elements: in bfloat16 grouped products want 16 bytes.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4}
WIDE_EXPERTS = {name: value for name, value in EXPERTS.items() if name != "moe_intermediate_size"}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPED = {**EXPERTS, **GROUPS, "num_local_experts": 8}


@dataclass(frozen=True)
class Family:
    """What is promised of a family: it trains in place, in float32 and bfloat16, in one process and on two ranks.

    title: as docs/models.md names it; config: the config class; settings: its own, windows shorter than the sequences
    of the tests; model: the model class, None = the one that goes with the config; note: what else a user
    should know; two_ranks: False if it cannot be sharded.
    """

    title: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    note: str = ""
    two_ranks: bool = True


# Those that tests take everywhere.
SUPPORTED: dict[str, Family] = {
    "qwen2": Family("Qwen2 and 2.5", "Qwen2Config"),
    "qwen3": Family("Qwen3", "Qwen3Config", {"head_dim": 16}),
    "llama": Family("Llama 2 and 3", "LlamaConfig"),
    "mistral": Family("Mistral", "MistralConfig", WINDOW),
    "gemma2": Family(
        "Gemma 2",
        "Gemma2Config",
        {**MIXED_WINDOW, **HEADS, **SOFT, "query_pre_attn_scalar": 4},
    ),
    "gemma3": Family("Gemma 3", "Gemma3TextConfig", {**MIXED_WINDOW, **HEADS}),
    "gpt2": Family("GPT-2", "GPT2Config", {**GPT2, "bos_token_id": None, "pad_token_id": 0}, "GPT2LMHeadModel"),
    "phi": Family("Phi 1 and 2", "PhiConfig"),
    "granite": Family("Granite 3", "GraniteConfig", {"logits_scaling": 4.0, "attention_multiplier": 0.2}),
    "cohere": Family("Cohere", "CohereConfig", {"logit_scale": 0.25}),
    "olmo": Family("OLMo", "OlmoConfig"),
    # Its layers hand nothing on that they do not know.
    "nemotron": Family("Nemotron (Minitron)", "NemotronConfig", {"hidden_act": "relu2"}),
}
MORE_DENSE: dict[str, Family] = {
    "apertus": Family("Apertus", "ApertusConfig"),
    "arcee": Family("Arcee", "ArceeConfig"),
    "biogpt": Family("BioGPT", "BioGptConfig", note="one rank only", two_ranks=False),
    "bitnet": Family("BitNet", "BitNetConfig"),
    "cohere2": Family("Cohere 2", "Cohere2Config", {**MIXED_WINDOW, **HEADS, "logit_scale": 0.25}),
    "cwm": Family("CWM", "CwmConfig", {**MIXED_WINDOW, **HEADS, "bos_token_id": 2}),
    "ernie4_5": Family("ERNIE 4.5", "Ernie4_5Config", HEADS),
    "exaone4": Family("EXAONE 4", "Exaone4Config", {**MIXED_WINDOW, **HEADS}),
    "gemma": Family("Gemma", "GemmaConfig", HEADS),
    "gemma3n": Family(
        "Gemma 3n (text)",
        "Gemma3nTextConfig",
        {
            **MIXED_WINDOW,
            **HEADS,
            "intermediate_size": [48, 48],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
        },
    ),
    "gemma4": Family(
        "Gemma 4 (text)",
        "Gemma4TextConfig",
        {**MIXED_WINDOW, **HEADS, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0},
    ),
    "glm": Family("GLM", "GlmConfig", HEADS),
    "glm4": Family("GLM-4", "Glm4Config", HEADS),
    "gpt-bigcode": Family("GPT-BigCode", "GPTBigCodeConfig", GPT2),
    "gpt-neox": Family("GPT-NeoX (Pythia)", "GPTNeoXConfig"),
    "helium": Family("Helium", "HeliumConfig", HEADS),
    "hunyuan": Family("Hunyuan (dense)", "HunYuanDenseV1Config", HEADS),
    "jais2": Family("Jais 2", "Jais2Config", HEADS),
    "minicpm3": Family("MiniCPM 3", "MiniCPM3Config", LATENT),
    "ministral": Family("Ministral", "MinistralConfig", {**MIXED_WINDOW, **HEADS}),
    "ministral3": Family("Ministral 3 (text)", "Ministral3Config", HEADS),
    "nanochat": Family("nanochat", "NanoChatConfig"),
    "olmo2": Family("OLMo 2", "Olmo2Config"),
    "olmo3": Family("OLMo 3", "Olmo3Config", MIXED_WINDOW),
    "opt": Family("OPT", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "bos_token_id": 2}),
    "persimmon": Family("Persimmon", "PersimmonConfig"),
    "phi3": Family("Phi 3, 3.5 and 4", "Phi3Config", WINDOW, note="longrope: up to its original length"),
    "seed-oss": Family("Seed-OSS", "SeedOssConfig", HEADS),
    "smollm3": Family("SmolLM 3", "SmolLM3Config"),
    "stablelm": Family("StableLM", "StableLmConfig"),
    "starcoder2": Family("StarCoder 2", "Starcoder2Config", WINDOW),
    "vaultgemma": Family(
        "VaultGemma", "VaultGemmaConfig", {**MIXED_WINDOW, **HEADS, **SOFT, "query_pre_attn_scalar": 4}
    ),
    "youtu": Family("Youtu", "YoutuConfig", LATENT),
}
MIXTURES: dict[str, Family] = {
    "qwen3-moe": Family("Qwen3-MoE", "Qwen3MoeConfig", {**EXPERTS, **HEADS}),
    "mixtral": Family("Mixtral", "MixtralConfig", EXPERTS),
    "glm4-moe": Family("GLM-4.5 (MoE)", "Glm4MoeConfig", {**GROUPED, **HEADS}),
    "deepseek-v3": Family("DeepSeek-V3", "DeepseekV3Config", {**GROUPED, **LATENT}),
    "granite-moe": Family("Granite-MoE", "GraniteMoeConfig", {**EXPERTS, "logits_scaling": 4.0}),
}
MORE_MIXTURES: dict[str, Family] = {
    "afmoe": Family("AFMoE (Trinity)", "AfmoeConfig", {**MIXED_WINDOW, **EXPERTS, **HEADS, "num_dense_layers": 1}),
    "cohere2-moe": Family("Cohere 2 (MoE)", "Cohere2MoeConfig", {**MIXED_WINDOW, **EXPERTS, **HEADS}),
    "deepseek-v2": Family("DeepSeek-V2", "DeepseekV2Config", {**GROUPED, **LATENT}),
    "dots1": Family("dots.llm1", "Dots1Config", {**GROUPED, **HEADS}),
    "ernie4_5-moe": Family(
        "ERNIE 4.5 (MoE)",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, **EXPERTS},
        "Ernie4_5_MoeForCausalLM",
    ),
    "exaone-moe": Family("EXAONE (MoE)", "ExaoneMoeConfig", {**MIXED_WINDOW, **GROUPED, **HEADS}),
    "flex-olmo": Family("FlexOlmo", "FlexOlmoConfig", WIDE_EXPERTS),
    "glm4-moe-lite": Family("GLM-4.7 Flash", "Glm4MoeLiteConfig", {**GROUPED, **LATENT}),
    "granite-moe-shared": Family(
        "Granite-MoE with shared experts", "GraniteMoeSharedConfig", {**EXPERTS, "shared_intermediate_size": 16}
    ),
    "hunyuan-moe": Family("Hunyuan (MoE)", "HunYuanMoEV1Config", {**WIDE_EXPERTS, **HEADS, "moe_topk": 2}),
    "jetmoe": Family("JetMoE", "JetMoeConfig", {**EXPERTS, "kv_channels": 8, "num_key_value_heads": 2}),
    "laguna": Family("Laguna", "LagunaConfig", {**SHARED, **HEADS}),
    "llama4": Family(
        "Llama 4 (text)",
        "Llama4TextConfig",
        {**EXPERTS, **HEADS, "intermediate_size_mlp": 48, "attn_temperature_tuning": False},
        note="without attn_temperature_tuning (which released models have), up to attention_chunk_size tokens",
    ),
    "minimax-m2": Family("MiniMax-M2", "MiniMaxM2Config", {**EXPERTS, **HEADS}),
    "olmoe": Family("OLMoE", "OlmoeConfig", EXPERTS),
    "phimoe": Family("Phi-3.5-MoE", "PhimoeConfig", WIDE_EXPERTS, note="up to its sliding_window"),
    "qwen2-moe": Family("Qwen2-MoE", "Qwen2MoeConfig", SHARED, note="up to its sliding_window, if it is in use"),
    "solar-open": Family("Solar Open", "SolarOpenConfig", {**GROUPED, **HEADS}),
}

# Why they are refused over vLLM, or by it, on CPUs; the others train over it (tests/vllm/test_families.py).
REFUSED_OVER_VLLM: dict[str, str] = {
    "afmoe": "another config.json is expected",
    "cohere2": "sliding windows are one token longer there",
    "cohere2-moe": "sliding windows are one token longer there",
    "deepseek-v2": "latent attention is not computed on CPUs",
    "deepseek-v3": "latent attention is not computed on CPUs",
    "dots1": "the router's bias cannot be loaded again",
    "gemma3n": "it is computed otherwise there",
    "glm4-moe-lite": "latent attention is not computed on CPUs",
    "jetmoe": "its code there does not run",
    "laguna": "a parameter there has no weight here",
    "llama4": "experts whose input is weighted by the router",
    "minicpm3": "heads of such a size are not computed on CPUs",
    "minimax-m2": "another config.json is expected",
    "phi": "its loader sets a bias itself",
    "phimoe": "its code there does not run",
    "solar-open": "the router's bias cannot be loaded again",
    "youtu": "heads of such a size are not computed on CPUs",
}

# Whose decode passes are not captured as CUDA graphs, and the line of transformers at which the host would wait.
NOT_CAPTURED: dict[str, str] = {
    "gemma3n": "_to_copy at modeling_gemma3n.py",
    "jetmoe": "_local_scalar_dense at modeling_jetmoe.py",
    "phimoe": "_to_copy at modeling_phimoe.py",
}

# Vision-language models, which are trained on text.
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 16, "patch_size": 4}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
QWEN_TOWER |= {"out_hidden_size": 32}
QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
IMAGE = {"image_token_index": 90}


@dataclass(frozen=True)
class Vision:
    """A vision-language model: settings of its text model, of its tower, and of both."""

    title: str
    config: str
    text: dict[str, Any]
    tower: dict[str, Any]
    both: dict[str, Any]


VISION: dict[str, Vision] = {
    "qwen2.5-vl": Vision(
        "Qwen2.5-VL", "Qwen2_5_VLConfig", SECTIONS, {**QWEN_TOWER, "fullatt_block_indexes": [0]}, QWEN_TOKENS
    ),
    "qwen3-vl": Vision(
        "Qwen3-VL",
        "Qwen3VLConfig",
        {**SECTIONS, **HEADS},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        QWEN_TOKENS,
    ),
    "mistral3": Vision(
        "Mistral 3", "Mistral3Config", {"model_type": "mistral"}, {**TOWER, "model_type": "pixtral"}, IMAGE
    ),
    "internvl": Vision(
        "InternVL 3",
        "InternVLConfig",
        {"model_type": "qwen2"},
        {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_token_id": 90},
    ),
    "llava": Vision(
        "LLaVA", "LlavaConfig", {"model_type": "llama"}, {**TOWER, "model_type": "clip_vision_model"}, IMAGE
    ),
}


@dataclass(frozen=True)
class Refused:
    """A family that is refused at the start. message: pattern of what it is told; title: that of docs/models.md, "" =
    not there."""

    title: str
    config: str
    message: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: str | None = None


STATE = "carry a state from token to token"
REFUSED: dict[str, Refused] = {
    "convolutions": Refused(
        "LFM2",
        "Lfm2Config",
        rf"layers of type conv \(Lfm2ShortConv\) {STATE}.*layers 0 \(of 2\)",
        {"layer_types": ["conv", "full_attention"]},
    ),
    "linear attention": Refused(
        "Qwen3-Next", "Qwen3NextConfig", rf"linear_attention \(Qwen3NextGatedDeltaNet\) {STATE}", SHARED
    ),
    "a state space": Refused("Mamba", "MambaConfig", rf"linear_attention \(MambaMixer\) {STATE}", {"state_size": 4}),
    "a state in addition to attention": Refused(
        "Falcon-H1",
        "FalconH1Config",
        "FalconH1Mixer carries a state",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    ),
    "attention sinks": Refused("gpt-oss", "GptOssConfig", "GptOssAttention uses attention sinks", {**EXPERTS, **HEADS}),
    "its own attention code": Refused(
        "Falcon", "FalconConfig", "FalconAttention does not call attention through transformers", {"alibi": False}
    ),
    "position in the mask": Refused("BLOOM", "BloomConfig", "BloomAttention does not call", {"n_head": 4}),
    "twice in a layer": Refused("DiffLlama", "DiffLlamaConfig", "DiffLlamaAttention attends 2 times in layer 0"),
    "a mask of its own": Refused("Doge", "DogeConfig", "DogeAttention makes its own attention mask"),
    "sparse attention": Refused(
        "MiniMax-M3",
        "MiniMaxM3VLTextConfig",
        "hands 'block_indices' to its attention",
        {**EXPERTS, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    ),
    "places in the row": Refused(
        "Llama 4 as released",
        "Llama4TextConfig",
        "scales queries by their place in the row .*attn_temperature_tuning",
        {**EXPERTS, **HEADS, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
    ),
    "an encoder": Refused(
        "encoders (BERT)",
        "BertConfig",
        "BertForMaskedLM is an encoder: .*only causal language models are supported$",
        model="BertForMaskedLM",
    ),
    "encoder and decoder": Refused(
        "encoder-decoders (T5)",
        "T5Config",
        "T5ForConditionalGeneration is an encoder-decoder; only causal language",
        model="T5ForConditionalGeneration",
    ),
}
FAMILIES = {**SUPPORTED, **MORE_DENSE, **MIXTURES, **MORE_MIXTURES}


def build(
    name: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A model with weights large enough that every part of it shows in the logits. The same weights per name."""
    row = {**FAMILIES, **REFUSED}[name]
    settings = {**(row.settings if "n_embd" in row.settings else {**BASE, **row.settings}), **changes}
    return made(row.config, settings, row.model, attention=attention, dtype=dtype)


def made(
    config_class: str,
    settings: dict[str, Any],
    model_class: str | None = None,
    *,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PreTrainedModel:
    """What `build` gives, of any config class of transformers; model_class: None = the one that goes with it."""
    config = getattr(transformers, config_class)(**settings)
    if attention is not None:
        name_attention(config, attention)
    if dtype == torch.float64:  # which the grouped products of experts do not know
        name_experts(config, "eager")
    model_class = model_class or config_class.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model.to(dtype).eval()


def build_vision(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A vision-language model. The same weights per name."""
    row = VISION[name]
    config = getattr(transformers, row.config)(text_config=BASE | row.text, vision_config=row.tower, **row.both)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForImageTextToText.from_config(config).to(dtype).eval()
