"""Hooks into a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.batch import Batch


class Callback:
    """Override what you need. Hooks run on the driver, in the order of the callbacks; an exception ends the run."""

    def on_fit_start(self, trainer: Any) -> None:
        """Before the first training step of a `fit()`."""

    def on_step_end(self, trainer: Any, step: int, batch: Batch, metrics: Mapping[str, float]) -> None:
        """After every training step, its weights published."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """After every evaluation."""

    def on_save(self, trainer: Any, step: int, folder: Path) -> None:
        """After a checkpoint was written."""

    def on_fit_end(self, trainer: Any) -> None:
        """When `fit()` ends, however it ends."""
