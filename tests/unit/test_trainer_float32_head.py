"""cast_lm_head_to_fp32 in a whole Trainer: engine, reference and trainer have the same head, not rounded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.tiny import build_model


def peaked(seed: int = 1) -> Any:
    """A model in bfloat16 whose logits are large enough for their rounding to show."""
    module = build_model(hidden_size=64, seed=seed, tie_word_embeddings=False)
    with torch.no_grad():
        module.lm_head.weight.mul_(32)
    return module.bfloat16()


KEYS: dict[str, Any] = {"dtype": "bfloat16", "prompts_per_step": 8, "num_generations": 8, "max_completion_length": 16}


@pytest.mark.parametrize("engine", ["inplace", "hf"])
def test_engine_and_trainer_lie_closer_than_with_a_rounded_head(engine: str, make_trainer) -> None:
    """What is left is the rounding in the body, which packs tokens otherwise than it decodes them."""
    divergence, entropy = {}, {}
    for is_cast in (False, True):
        trainer = make_trainer(peaked(), engine=engine, cast_lm_head_to_fp32=is_cast, **KEYS)
        metrics = trainer.step().metrics
        divergence[is_cast], entropy[is_cast] = metrics["mismatch/kl_k3"], metrics["entropy"]
        trainer.close()
    assert 0 < divergence[True] < divergence[False] / 1.5, divergence
    assert entropy[True] == pytest.approx(entropy[False], rel=0.1) and entropy[True] != entropy[False]


def test_a_run_with_a_reference_and_tied_embeddings(make_trainer) -> None:
    """The first KL is 0: policy and reference have the same head. Then weights move."""
    module = build_model(hidden_size=32, dtype=torch.bfloat16)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    before = module.lm_head.weight.detach().clone()
    trainer = make_trainer(module, beta=0.1, cast_lm_head_to_fp32=True, **KEYS)
    first, second = trainer.step().metrics, trainer.step().metrics
    assert first["kl"] == 0 and math.isfinite(first["grad_norm"]) and first["grad_norm"] > 0
    assert second["kl"] > 0 and second["skipped_updates"] == 0
    assert module.lm_head.weight.dtype == torch.bfloat16 and not torch.equal(module.lm_head.weight, before)
