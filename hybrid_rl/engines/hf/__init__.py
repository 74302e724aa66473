"""The engine over a model's own forward and the caches of transformers."""

from hybrid_rl.engines.hf.engine import HFEngine, make_engine

__all__ = ["HFEngine", "make_engine"]
