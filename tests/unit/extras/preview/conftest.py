"""The tokenizers of the tests of data."""

from tests.unit.data.conftest import chat_tokenizer as chat_tokenizer
from tests.unit.data.conftest import tokenizer as tokenizer
