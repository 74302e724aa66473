"""The keys of rollout.engine=hf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hybrid_rl.config.packing import ENGINES
from hybrid_rl.config.schema import EngineConfig, RolloutConfig
from hybrid_rl.options import key


@dataclass(frozen=True)
class HFConfig(EngineConfig):
    """The engine that decodes through the model's own forward, with the caches of transformers. A running sequence
    counts at its full length in the cache."""

    max_num_batched_tokens: int = key(
        8192, "prompt tokens computed together; a longer prompt is computed by itself", minimum=1
    )


@dataclass(frozen=True)
class HFRolloutConfig(RolloutConfig):
    """rollout.engine=hf."""

    is_packed: ClassVar[bool] = False

    engine: Literal["hf"] = key("hf", ENGINES)
    hf: HFConfig = field(default_factory=HFConfig)
