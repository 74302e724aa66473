"""Engines by name, each imported when one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hybrid_rl.config.schema import RolloutConfig
from hybrid_rl.engines.detached_import import import_apart
from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.errors import ConfigError
from hybrid_rl.models import CausalLM

# The module of each rollout.engine; its function `make_engine` takes an EngineSetup. What the rest of the library must
# know of an engine before one is made is said by its configuration class (RolloutConfig).
MODULES: dict[str, str] = {
    "inplace": "hybrid_rl.engines.inplace.engine",
    "hf": "hybrid_rl.engines.hf.hf_engine",
    "vllm": "hybrid_rl.vllm.library",
}


@dataclass(frozen=True)
class EngineSetup:
    """All that an engine may need to be made.

    model: what an embedded engine decodes from; of a colocated one, the trainer's model: its class, its config and the
    names of its weights. config: the section `rollout`. max_length: longest prompt and completion together. device: of
    this rank. decode: token ids to text, special tokens kept. memory_share: of the free memory that is this engine's
    to use; others in other processes have the rest. seed: equal on the ranks that share an engine. adapter_ranks: of
    the adapter of each tensor that the engine adds itself, by the tensor's name. records_experts: whether samples
    say which experts their tokens went to (`FinishedSample.routed_experts`).
    """

    model: CausalLM
    config: RolloutConfig
    max_length: int
    device: torch.device
    decode: Callable[[Sequence[int]], str] | None = None
    memory_share: float = 1.0
    seed: int = 0
    trust_remote_code: bool = False
    adapter_ranks: Mapping[str, int] = field(default_factory=dict)
    records_experts: bool = False


def make_engine(setup: EngineSetup) -> RolloutEngine:
    """Make the engine that the configuration names. Raises ConfigError or ModelError if it cannot run here."""
    name = setup.config.engine
    if name not in MODULES:
        raise ConfigError(f"rollout.engine={name} is not in engines/registry.py; use {', '.join(MODULES)}, or add it")
    engine: RolloutEngine = import_apart(MODULES[name]).make_engine(setup)
    return engine
