"""Runs of the tiny model, planned without any weights."""

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.config.hardware import Hardware
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.planning.models import RunModels
from hybrid_rl.planning.passes import RunShape
from hybrid_rl.weights.sources import StateSource

# 5472 parameters: 45 x 16 of the embedding, tied to the head; 2368 of each layer; 16 of the last norm. 26 tensors.
TINY = {
    "vocab_size": 45,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def settings(**overrides: Any) -> TrainerConfig:
    """Return a resolved configuration. Short samples, few sequences; on the CPU unless another device is given."""
    given = {"device": "cpu", "max_completion_length": 24, "prompts_per_step": 4, "num_generations": 4}
    if "max_num_seqs" not in overrides:
        given |= {"max_num_seqs": 8}
    loaded, names = load_config(None, given | overrides)
    return resolve(loaded, names, has_eval=False, hardware=Hardware(64, "a GPU"))


def recipe(**changes: Any) -> ModelRecipe:
    return ModelRecipe(StateSource({}), model_class=Qwen2ForCausalLM, config=Qwen2Config(**(TINY | changes)))


def meta_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return build_on_meta(recipe(**changes), dtype)


def shape_of(config: TrainerConfig, *, max_length: int = 32, rewards: tuple[Any, ...] = (), **changes: Any) -> RunShape:
    teacher = meta_model(DTYPES[config.model.dtype]) if config.advantage.needs & {"teacher_logprobs"} else None
    return RunShape(RunModels.of(recipe(**changes), config, teacher=teacher, rewards=rewards), max_length, max_length)
