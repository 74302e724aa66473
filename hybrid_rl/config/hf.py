"""The keys of rollout.engine=hf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hybrid_rl.algos.options import key
from hybrid_rl.config.packed_engines import ENGINES
from hybrid_rl.config.schema import RolloutConfig


@dataclass(frozen=True)
class HFRolloutConfig(RolloutConfig):
    """rollout.engine=hf, which decodes through the model's own forward, with the caches of transformers. A running
    sequence counts at its full length in the cache."""

    is_packed: ClassVar[bool] = False

    engine: Literal["hf"] = key("hf", ENGINES)
