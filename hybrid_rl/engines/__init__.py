"""Engines that make completions, and the contract they keep."""

from hybrid_rl.engines.base import (
    EngineState,
    EngineStats,
    FinishedSample,
    RolloutEngine,
    RolloutRequest,
    SamplingParams,
    derive_seed,
    generate,
)

__all__ = [
    "EngineState",
    "EngineStats",
    "FinishedSample",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingParams",
    "derive_seed",
    "generate",
]
