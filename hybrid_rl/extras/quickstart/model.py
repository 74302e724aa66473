"""Tokenizer and model of the quickstart: bare characters, and a Qwen2 of 0.45 million parameters."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-="


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character of `CHARACTERS`, `<pad>` (id 0) and `<eos>` (id 1), left-padding.

    It adds no special token by itself and decodes without inserting spaces. A character outside the vocabulary
    raises in `encode`: the vocabulary has no unknown token that would hide it.
    """
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    # WordLevel without an unknown token refuses foreign characters; BPE without merges would drop them silently.
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=64,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Build a random fp32 Qwen2 (3 layers, hidden 128, two query heads per key head), the same for a seed.

    It takes sequences as long as its tokenizer's. The caller's random state does not change.
    """
    hidden = 128
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,
        # The usual 0.02 suits wide layers; at this width the model learns too slowly with it.
        initializer_range=hidden**-0.5,
        attention_dropout=0.0,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float()
