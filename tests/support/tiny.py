"""The smallest things a Trainer can be made of: a character tokenizer, a Qwen2 of some thousand parameters, sums to
learn, and a reward that gives every group a signal."""

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.support.scores import exact as exact
from tests.support.scores import spread as spread

SPECIALS = ("<pad>", "<eos>", "<unk>", "[", "]", "/")
CHARS = "0123456789+= abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (*SPECIALS, *CHARS)
EOS_ID = 1
# "[" role-initial content "]" per message, then "/" as the generation prompt.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'][0] + m['content'] + ']' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '/' }}{% endif %}"
)


def ids_of(text: str) -> list[int]:
    """Token ids of a text, one per character: the independent reference for the tokenizer."""
    return [VOCABULARY.index(char) for char in text]


def build_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Qwen2ForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**(settings | changes)))
    return model.to(dtype)


def sums(count: int, *, chat: bool = False) -> list[dict[str, Any]]:
    """Prompts such as "3+4=" with the column `answer`; prompts of 4 or 5 tokens."""
    rows = [(index % 10, (3 * index) % 13) for index in range(count)]
    texts = [(f"{a}+{b}=", str(a + b)) for a, b in rows]
    return [{"prompt": [{"role": "user", "content": t}] if chat else t, "answer": answer} for t, answer in texts]
