"""Weights in and out of modules, plain or sharded, without a full model in any process."""

from hybrid_rl.models.weights.loading import load_weights
from hybrid_rl.models.weights.recipe import ModelRecipe, build_on_meta
from hybrid_rl.models.weights.saving import save_weights
from hybrid_rl.models.weights.sources import (
    BlockSource,
    FolderSource,
    StateSource,
    WeightSource,
    blocks_of,
    named_state,
)

__all__ = [
    "BlockSource",
    "FolderSource",
    "ModelRecipe",
    "StateSource",
    "WeightSource",
    "blocks_of",
    "build_on_meta",
    "load_weights",
    "named_state",
    "save_weights",
]
