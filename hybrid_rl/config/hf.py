"""The keys of rollout.engine=hf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hybrid_rl.algos import Needs
from hybrid_rl.config.schema import ENGINES, EngineConfig, RolloutConfig, TrainerConfig
from hybrid_rl.errors import ConfigError
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

    def check(self, config: TrainerConfig, num_ranks: int) -> None:
        """Raise ConfigError for what only packed rows can do."""
        if config.model.torch_compile:
            raise ConfigError(
                "model.torch_compile=true compiles packed blocks, and rollout.engine=hf runs the model's own forward; "
                "leave it out"
            )
        if Needs.ROUTER_SCORES in config.policy_loss.needs:
            raise ConfigError(
                f"policy_loss={type(config.policy_loss).__name__} reads the model's routers from packed rows, which "
                f"rollout.engine=hf does not make; choose another policy_loss (gmpo), or rollout.engine=inplace"
            )
