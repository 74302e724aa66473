"""User hooks into a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.batch import Batch


class Callback:
    """Base class of callbacks: override the hooks you need. They run on the driver, in order; an error ends the run."""

    def on_fit_start(self, trainer: Any) -> None:
        """Called before the first training step of a `fit()`."""

    def on_step_end(self, trainer: Any, step: int, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Called after every training step, once its weights are published."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after every evaluation."""

    def on_save(self, trainer: Any, step: int, folder: Path) -> None:
        """Called when a checkpoint is there. step: whose it is. One that is written in the background is noticed
        between later steps."""

    def on_fit_end(self, trainer: Any) -> None:
        """Called at the end of `fit()`, also after an error."""
