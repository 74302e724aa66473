"""The embedded engine."""

from hybrid_rl.engines.inplace.engine import InPlaceEngine

__all__ = ["InPlaceEngine"]
