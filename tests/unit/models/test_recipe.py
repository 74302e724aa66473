"""Models that are described before they are loaded: sizes of a config that cannot be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hybrid_rl.errors import ModelError
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from tests.unit.models.families import BASE


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"vocab_size": 0, "pad_token_id": None},
            r"model.embed_tokens.weight an empty tensor, \(0, 32\).*vocab_size=0",
        ),
        ({"intermediate_size": 0}, r"mlp.gate_proj.weight an empty tensor, \(0, 32\)"),
        (
            {"hidden_size": 40, "num_attention_heads": 5},
            "num_attention_heads=5, which num_key_value_heads=2 does not divide",
        ),
    ],
)
def test_sizes_that_compute_nothing_are_refused(tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    transformers.LlamaConfig(**{**BASE, **sizes}, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        build_on_meta(ModelRecipe.of_folder(str(tmp_path)), torch.float32)
