"""Whatever can be loaded can be saved, and what could not be saved is refused before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from hybrid_rl.errors import ModelError
from hybrid_rl.models.saving import check_saved, save_weights, stored_config
from tests.tiny import build_model, build_tokenizer

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
