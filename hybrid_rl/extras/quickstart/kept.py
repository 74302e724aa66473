"""The warm start of a run, kept in its folder: a resumed run begins with it instead of repeating it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybrid_rl.config import TrainerConfig
from hybrid_rl.run.callbacks import Callback

FILE = "warm_start.pt"


class KeepStart(Callback):
    """Writes a warm-started model, as it is now, to the run folder when training begins.

    A checkpoint does not hold it, but what is made of it is needed again: the reference model, a teacher, and the
    starts of a comparison. facts: numbers about it.
    """

    def __init__(self, model: nn.Module, seed: int, facts: Mapping[str, float] | None = None) -> None:
        self._kept = {"seed": seed, "facts": dict(facts or {}), "weights": copy.deepcopy(model.state_dict())}

    def on_fit_start(self, trainer: Any) -> None:
        """Write it, completely or not at all."""
        target = trainer.run_folder / FILE
        half = target.with_name(f".{FILE}.tmp")
        torch.save(self._kept, half)
        half.replace(target)


def take_up(model: nn.Module, config: TrainerConfig) -> dict[str, float] | None:
    """Load the warm start of the run that `resume` means into a model of the same shape, and return its facts.

    Returns None if the model must be warm-started: for a new run, and for one that has kept none with this seed.
    """
    if config.resume is None:
        return None
    is_named = config.resume == "auto"
    run = Path(config.output_dir) / str(config.run_name) if is_named else Path(config.resume).resolve().parent
    if not (run / FILE).is_file():
        return None
    kept = torch.load(run / FILE, map_location="cpu", weights_only=True)
    if kept["seed"] != config.seed:
        return None
    model.load_state_dict(kept["weights"])
    facts: dict[str, float] = kept["facts"]
    return facts
