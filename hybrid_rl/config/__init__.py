"""Configuration: the schema, its loading, and the checks before any work starts."""

from hybrid_rl.config.agent_keys import AgentConfig
from hybrid_rl.config.algorithm_keys import AlgorithmConfig
from hybrid_rl.config.eval_keys import EvalConfig
from hybrid_rl.config.load import Leaf, load_config, to_dict, to_yaml, visible_leaves
from hybrid_rl.config.rank_keys import FSDPConfig, RayControllerConfig
from hybrid_rl.config.schema import (
    CriticConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainerConfig,
    ValueHeadConfig,
)
from hybrid_rl.config.validate import num_training_steps, optimizer_steps_per_training_step, resolve

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "CriticConfig",
    "EvalConfig",
    "FSDPConfig",
    "Leaf",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RayControllerConfig",
    "RolloutConfig",
    "TrainerConfig",
    "ValueHeadConfig",
    "load_config",
    "num_training_steps",
    "optimizer_steps_per_training_step",
    "resolve",
    "to_dict",
    "to_yaml",
    "visible_leaves",
]
