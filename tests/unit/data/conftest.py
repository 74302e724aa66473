"""A character tokenizer and chat templates, so that every token id in these tests can be computed by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<eos>", "<unk>", "[", "]", "/")
CHARS = "0123456789+-= abcdefghijklmnopqrstuvwxyz"
# "[" role-initial ... "]" per message, "/" as the generation prompt.
STRING_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'][0] + m['content'] + ']' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '/' }}{% endif %}{% if think %}{{ 'think' }}{% endif %}"
)


@pytest.fixture
def ids_of() -> Callable[[str], list[int]]:
    """The independent reference: one id per character."""
    vocabulary = [*SPECIALS, *CHARS]
    return lambda text: [vocabulary.index(char) for char in text]


@pytest.fixture
def tokenizer() -> Any:
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    tokenizer.chat_template = STRING_TEMPLATE
    return tokenizer
