"""The engine over a model's own forward and the caches of transformers."""

from hybrid_rl.engines.hf.engine import HFEngine

__all__ = ["HFEngine"]
