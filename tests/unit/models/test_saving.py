"""Whatever can be loaded can be saved, and what could not be saved is refused before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizer

from hybrid_rl.errors import ModelError
from hybrid_rl.models.saving import check_saved, save_weights, stored_config
from hybrid_rl.models.tokenizer import load_tokenizer, save_tokenizer
from tests.support.tiny import build_model, build_tokenizer, ids_of

# What published generation_config.json hold that transformers loads with a warning, and refuses to write.
LOADED = {
    "sampling without do_sample": {"temperature": 0.9, "top_p": 0.6},
    "top_k alone": {"top_k": 20},
    "a beam's penalty without beams": {"length_penalty": 0.9, "early_stopping": True},
    "a negative pad token": {"pad_token_id": -1},
    "a cache that is not used": {"use_cache": False, "cache_implementation": "static"},
    "scores without a dict": {"output_scores": True, "return_dict_in_generate": False},
}


@pytest.mark.parametrize("values", LOADED.values(), ids=LOADED)
def test_a_generation_config_is_written_as_it_was_loaded(values: dict[str, Any], tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError):  # or this test is about nothing
        module.save_pretrained(tmp_path / "theirs")
    check_saved(module, build_tokenizer(), torch.float32)
    save_weights(module, tmp_path / "saved", torch.float32)
    found = GenerationConfig.from_pretrained(tmp_path / "saved").to_dict()
    assert {name: found[name] for name in values} == values
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config.to_dict() == found


def unwritable() -> dict[str, tuple[Any, Any, str]]:
    config, sampling, tokenizer = build_model(), build_model(), build_tokenizer()
    config.config.labels = {"a", "b"}
    sampling.generation_config.num_return_sequences = 3
    tokenizer.init_kwargs["made_by"] = object()
    return {
        "a set": (config, build_tokenizer(), "the config of this model.*set is not JSON.*correct module.config"),
        "several greedy answers": (sampling, build_tokenizer(), "the generation config.*num_return_sequences"),
        "an object": (build_model(), tokenizer, "the tokenizer of this model cannot be written"),
    }


@pytest.mark.parametrize("name", ["a set", "several greedy answers", "an object"])
def test_what_could_not_be_saved_is_refused(name: str) -> None:
    module, tokenizer, message = unwritable()[name]
    with pytest.raises(ModelError, match=message):
        check_saved(module, tokenizer, torch.float32)


OWN_CODE = """
from transformers import PreTrainedTokenizer

class CLASS(PreTrainedTokenizer):
    vocab_files_names = {}
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
    @property
    def vocab_size(self):
        return 256
    def get_vocab(self):
        return {f"<{byte}>": byte for byte in range(256)} | self.added_tokens_encoder
    def _tokenize(self, text, **kwargs):
        return [f"<{byte}>" for byte in text.encode()]
    def _convert_token_to_id(self, token):
        return int(token[1:-1])
    def _convert_id_to_token(self, index):
        return f"<{index}>"
    def convert_tokens_to_string(self, tokens):
        return bytes(int(token[1:-1]) for token in tokens).decode()
    def save_vocabulary(self, folder, filename_prefix=None):
        return ()
"""


@pytest.mark.parametrize("name", ["OwnBytes", "OwnTokenizer", "OwnTokenizerFast"])
def test_a_tokenizer_with_code_of_its_own_is_loaded_from_where_it_was_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice over: transformers writes the name of the class in a form that depends on the name."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "published"
    build_model().save_pretrained(folder)
    (folder / "own_code.py").write_text(OWN_CODE.replace("CLASS", name))
    settings = {"tokenizer_class": name, "auto_map": {"AutoTokenizer": [f"own_code.{name}", None]}, "eos_token": "<1>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for place in ("first", "second"):
        tokenizer = load_tokenizer(str(folder), trust_remote_code=True)
        assert type(tokenizer).__name__ == name and tokenizer("hi 2")["input_ids"] == [104, 105, 32, 50]
        check_saved(build_model(), tokenizer, torch.float32)
        build_model().save_pretrained(tmp_path / place)
        save_tokenizer(tokenizer, tmp_path / place)
        folder = tmp_path / place
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert type(theirs).__name__ == name and theirs("hi 2")["input_ids"] == [104, 105, 32, 50]


def test_code_that_was_not_run_is_not_named(tmp_path: Path) -> None:
    """A tokenizer.json is read without the code beside it, which is then not saved with it."""
    tokenizer = build_tokenizer()
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["own_code.OwnBytes", None]}
    save_tokenizer(tokenizer, tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert load_tokenizer(str(tmp_path), trust_remote_code=True)("1+2")["input_ids"] == ids_of("1+2")


class Forgetful(PreTrainedTokenizer):
    """Letters by their order from `first` on, which it does not note among what it was made with."""

    vocab_files_names: Any = {}

    def __init__(self, first: int = 0, **kwargs: Any) -> None:
        self.first = first
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return 1000

    def get_vocab(self) -> dict[str, int]:
        return {chr(self.first + place): place for place in range(1000)}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return (ord(token) - self.first) % 1000

    def _convert_id_to_token(self, index: int) -> str:
        return chr(self.first + index)

    def save_vocabulary(self, folder: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()


def test_a_tokenizer_that_is_another_when_read_again_is_refused() -> None:
    check_saved(build_model(), Forgetful(0), torch.float32)
    with pytest.raises(ModelError, match=r"the tokenizer of this model .* other tokens of 'What is 2 plus 3\?'"):
        check_saved(build_model(), Forgetful(10), torch.float32)


def test_a_tie_that_the_weights_break_is_not_written_into_the_config(tmp_path: Path) -> None:
    """Readers that believe the config, vLLM among them, would read another model than the one that was trained."""
    build_model().save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    head = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert module.config.tie_word_embeddings and torch.equal(module.lm_head.weight, head)  # an untied module
    save_weights(module, tmp_path / "saved", torch.float32)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")["lm_head.weight"], head)
    assert module.config.tie_word_embeddings  # the user's own is left as it was
    assert stored_config(build_model()).tie_word_embeddings and not stored_config(module).tie_word_embeddings
