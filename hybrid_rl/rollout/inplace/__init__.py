"""The embedded engine."""

from hybrid_rl.rollout.inplace.engine import InPlaceEngine

__all__ = ["InPlaceEngine"]
