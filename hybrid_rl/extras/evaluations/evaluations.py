"""An evaluation as a whole: its sets, its settings and its metrics, kept in a file and compared with another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid_rl.errors import DataError
from hybrid_rl.metrics.eval_samples import EvalSamples
from hybrid_rl.metrics.intervals import Estimate
from hybrid_rl.metrics.paired import PairedTest

EVAL_FILE = "eval.json"
FORMAT = 1


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a model.

    model: its name or folder. sets: samples by the name of the set, "" for a single one. settings: what the samples
    depend on besides model and prompts. metrics: by name, as in a run. step: training steps of a checkpoint, None for
    other models. folder: where it is kept.
    """

    model: str
    sets: Mapping[str, EvalSamples]
    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    folder: Path | None = None

    def estimates(self) -> dict[str, dict[str, Estimate]]:
        """Return accuracy, pass@k and maj@k of each set, with intervals."""
        return {name: samples.estimates() for name, samples in self.sets.items()}

    def against(self, baseline: Evaluation) -> dict[str, PairedTest]:
        """Compare with an earlier evaluation of the same prompts, set by set. Raises DataError if the sets or their
        prompts differ, or if it is not known what is right."""
        if self.sets.keys() != baseline.sets.keys():
            names = (
                ", ".join(name or "one without a name" for name in evaluation.sets) for evaluation in (self, baseline)
            )
            raise DataError("the two evaluations have different sets: {} and {}".format(*names))
        return {name: samples.against(baseline.sets[name]) for name, samples in self.sets.items()}

    def differences(self, baseline: Evaluation) -> list[str]:
        """Say which settings differ, so that a difference may come from them and not from the model."""
        keys = dict.fromkeys([*self.settings, *baseline.settings])
        pairs = [(key, baseline.settings.get(key), self.settings.get(key)) for key in keys]
        return [f"{key} was {theirs!r} and is {mine!r}" for key, theirs, mine in pairs if mine != theirs]

    def to_json(self) -> dict[str, Any]:
        """Return what a file keeps of it: numbers for people first, then all samples."""
        return {
            "format": FORMAT,
            "model": self.model,
            "step": self.step,
            "settings": dict(self.settings),
            "estimates": {
                name: {metric: asdict(estimate) for metric, estimate in estimates.items()}
                for name, estimates in self.estimates().items()
            },
            "by_budget": {
                name: {str(budget): asdict(estimate) for budget, estimate in samples.within().items()}
                for name, samples in self.sets.items()
                if samples.right
            },
            "metrics": dict(self.metrics),
            "samples": {name: samples.to_json() for name, samples in self.sets.items()},
        }

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """Read eval.json, or the folder that has it. Raises DataError if it is not one."""
        file = path / EVAL_FILE if path.is_dir() else path
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            sets = {str(name): EvalSamples.of_json(samples) for name, samples in kept["samples"].items()}
            return cls(kept["model"], sets, kept["settings"], kept["metrics"], kept["step"], file.parent)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{file} is not an evaluation: {type(error).__name__}: {error}") from error

    @staticmethod
    def is_kept(path: Path) -> bool:
        """Whether a path is an evaluation that was written: a JSON file, or a folder with eval.json."""
        return (path.is_file() and path.suffix == ".json") or (path / EVAL_FILE).is_file()
