"""The embedded engine over a paged cache."""

from hybrid_rl.engines.inplace.engine import InPlaceEngine, make_engine

__all__ = ["InPlaceEngine", "make_engine"]
