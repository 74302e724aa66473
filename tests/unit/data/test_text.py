"""Texts as ids, with the tokens that the tokenizer puts around them, each once."""

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hybrid_rl.agents.plain_text import PlainText
from hybrid_rl.data.prompts import PromptEncoder, PromptRow
from hybrid_rl.data.text import text_ids
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import ModelError
from hybrid_rl.rollout.demonstrations import DemonstrationEncoder

BOS, EOS = 3, 1  # "[" begins texts


@pytest.fixture
def begins(tokenizer: Any) -> Any:
    """A tokenizer that puts its BOS token before each text, as those of Llama 3, Gemma and Mistral do."""
    tokenizer.bos_token = "["
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[ $A", special_tokens=[("[", BOS)])
    return tokenizer


def test_a_text_that_was_rendered_gets_no_second_bos(begins: Any) -> None:
    """Plain, rendered, and one that begins with two of its own."""
    assert text_ids(begins, ["12", "[12", "[[12", "1[2"]) == [
        [BOS, 7, 8],
        [BOS, 7, 8],
        [BOS, BOS, 7, 8],
        [BOS, 7, BOS, 8],
    ]
    begins.bos_token = None
    assert text_ids(begins, ["[12"]) == [[BOS, BOS, 7, 8]]  # nothing says that it is one


def test_prompts_demonstrations_and_agents_agree(begins: Any) -> None:
    encoder = PromptEncoder(begins, max_prompt_length=None)
    assert encoder.encode(["[12", "12"]) == [[BOS, 7, 8], [BOS, 7, 8]]
    row = PromptRow(0, "[12", (BOS, 7, 8), {"completion": "34"})
    assert DemonstrationEncoder(begins).encode([row], SamplingParams(1, stop_token_ids=(EOS,))) == [[9, 10, EOS]]
    agent = PlainText(begins)
    assert agent.encode("[12") == agent.encode("12") == [BOS, 7, 8]
    assert agent.encode("[12", goes_on=True) == [BOS, 7, 8] and agent.encode("12", goes_on=True) == [7, 8]


@pytest.fixture
def surrounds(tokenizer: Any) -> Any:
    """A tokenizer that also ends each text, as that of Llama 2 does with add_eos_token."""
    tokenizer.bos_token = "["
    around = TemplateProcessing(single="[ $A <eos>", special_tokens=[("[", BOS), ("<eos>", EOS)])
    tokenizer.backend_tokenizer.post_processor = around
    return tokenizer


def test_a_text_that_goes_on_is_not_ended(surrounds: Any) -> None:
    """Only what the text itself ends with stays, once."""
    assert text_ids(surrounds, ["12", "[12", "12<eos>"]) == [[BOS, 7, 8], [BOS, 7, 8], [BOS, 7, 8, EOS]]
    assert text_ids(surrounds, [""]) == [[BOS]] and PlainText(surrounds).encode("12") == [BOS, 7, 8]
    row = PromptRow(
        0, "12", tuple(PromptEncoder(surrounds, max_prompt_length=None).encode(["12"])[0]), {"completion": "34"}
    )
    assert row.prompt_ids == (BOS, 7, 8)
    assert DemonstrationEncoder(surrounds).encode([row], SamplingParams(1, stop_token_ids=(EOS,))) == [[9, 10, EOS]]


def test_another_token_after_every_text_is_refused(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A ]", special_tokens=[("]", 4)])
    with pytest.raises(ModelError, match=r"puts '\]' after every text, so it would come between"):
        PromptEncoder(tokenizer, max_prompt_length=None).encode(["12"])
    with pytest.raises(ModelError, match=r"puts '\]' after every text, so it would come between"):
        row = PromptRow(0, "12", (7, 8), {"completion": "34"})
        DemonstrationEncoder(tokenizer).encode([row], SamplingParams(1, stop_token_ids=(EOS,)))


def test_a_vocabulary_that_knows_no_letters_is_asked_for_none() -> None:
    """Of the quickstart's kind: digits and signs, and no token for what is unknown."""
    backend = Tokenizer(WordLevel({"<eos>": 0, "1": 1, "2": 2, "+": 3}))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert text_ids(plain, ["1+2", "2"]) == [[1, 3, 2], [2]]
    assert text_ids(plain, [""]) == [[]]


def test_what_stands_behind_a_text_costs_no_more_than_the_shortest(surrounds: Any, monkeypatch: Any) -> None:
    """And nothing where no tokens are added; what is set on the tokenizer between two calls counts at once."""
    kind, seen = type(surrounds), []
    own = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, text, **keys: seen.append(text) or own(self, text, **keys))
    assert text_ids(surrounds, ["12" * 9, "12"])[1] == [BOS, 7, 8]
    assert seen == [["12" * 9, "12"], "12"]
    surrounds.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    seen.clear()
    assert text_ids(surrounds, ["12"]) == [[7, 8]] and seen == [["12"]]
