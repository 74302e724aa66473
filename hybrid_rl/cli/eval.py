"""`hybrid-rl eval`: a checkpoint or a model evaluated, or two of them compared."""

from __future__ import annotations

from hybrid_rl.cli.settings import Settings
from hybrid_rl.errors import NotYetSupportedError


def evaluate(settings: Settings = None) -> None:
    """Evaluate a checkpoint."""
    raise NotYetSupportedError("hybrid-rl eval is not there yet; call Trainer(model, ..., eval_dataset=...).evaluate()")
