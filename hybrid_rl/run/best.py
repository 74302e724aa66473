"""The best step of a run by a metric of its evaluations, and the decision to stop early."""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.config import EvalConfig
from hybrid_rl.errors import CheckpointError, ConfigError, counted
from hybrid_rl.metrics.solved_shares import sizes
from hybrid_rl.process.files import write_text

logger = logging.getLogger("hybrid_rl")

BEST_FILE = "best.json"
SMALLER_IS_BETTER = ("loss", "length", "clipped_ratio", "num_failed")  # ends of names
LENGTHS = tuple(f"{kind}_{length}" for length in ("length", "terminated_length") for kind in ("mean", "min", "max"))
FAMILIES = ("agents/", "agent/", "tools/", "judge/")  # their names are known once trajectories were made
NUM_SHOWN = 5  # names in an error


def metric_name(config: EvalConfig) -> str | None:
    """Return metric_for_best_model as records have it: `accuracy` and `eval_accuracy` mean `eval/accuracy`."""
    name = config.metric_for_best_model
    return None if name is None else "eval/" + name.removeprefix("eval/").removeprefix("eval_")


def check_metric(config: EvalConfig, sets: Collection[str], reward_names: Sequence[str]) -> None:
    """Raise ConfigError for a metric_for_best_model that no evaluation of these sets ("" = the single one) can have."""
    name = metric_name(config)
    if name is None:
        return
    own = ["accuracy", "accuracy_low", "accuracy_high", "reward", "rewards/num_failed"]
    own += ["completions/clipped_ratio", *(f"rewards/{function}/mean" for function in reward_names)]
    own += [f"completions/{length}" for length in LENGTHS]
    counts = sizes(config.num_generations_eval)
    own += [f"pass@{k}" for k in counts[1:]] + [f"maj@{k}" for k in counts if k > 2]
    prefixes = [f"{set_name}/" if set_name else "" for set_name in sets]
    rest = name.removeprefix("eval/")
    if any(rest.startswith(prefix + family) for prefix in prefixes for family in FAMILIES):
        return
    _refuse_unknown(name, [f"eval/{prefix}{metric}" for prefix in prefixes for metric in own])


def _refuse_unknown(name: str, known: Collection[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, sorted(known), n=NUM_SHOWN, cutoff=0.5) or sorted(known)[:NUM_SHOWN]
    hint = ""
    if name.endswith("accuracy") or "@" in name:
        hint = (
            "; there is an accuracy only if the first reward function gives 0 and 1 (or success_reward is set), pass@k "
            "and maj@k only up to num_generations_eval"
        )
    raise ConfigError(
        f"metric_for_best_model={name!r} is no metric of the evaluations, which have {', '.join(near)}{hint}"
    )


class BestStep:
    """The best step by metric_for_best_model so far. Without that key it does nothing.

    step: None as long as nothing was evaluated after a step. value: of the metric then. num_worse: evaluations in a row
    that were not better by early_stopping.threshold. before: the metric before the first step. evaluated_step: of the
    last evaluation that counted, 0 before it.
    """

    def __init__(self, config: EvalConfig, run_folder: Path) -> None:
        self.name = metric_name(config)
        self._config, self._folder = config, run_folder
        larger = config.greater_is_better
        self._sign = 1 if (not (self.name or "").endswith(SMALLER_IS_BETTER) if larger is None else larger) else -1
        self.step: int | None = None
        self.value: float | None = None
        self.before: float | None = None
        self.num_worse = self.evaluated_step = 0
        self._num_unknown = 0  # evaluations whose metric was not a number
        self._loaded: int | None = None
        self._kept: Path | None = None
        self._earlier: Path | None = None  # the folder of the run that this one was resumed from

    def look(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take in an evaluation; step 0 is that before training, which only tells of the metric. Returns whether this
        step is the best so far. Raises ConfigError if the evaluation has no such metric."""
        if self.name is None or not any(name.startswith("eval/") for name in metrics):
            return False
        if self.name not in metrics and (self.value is not None or self.before is not None):
            logger.warning(
                "the evaluation after step %d has no %s, so it does not count for the best step; an accuracy needs "
                "rewards of 0 and 1, or success_reward",
                *(step, self.name),
            )
            return False
        if self.name not in metrics:
            _refuse_unknown(self.name, [name for name in metrics if name.startswith("eval/")])
        value = float(metrics[self.name])
        if not math.isfinite(value):
            if step:
                self._num_unknown += 1
            logger.warning(
                "%s is %s after step %d, so that does not count for the best step, nor for early_stopping.patience",
                *(self.name, value, step),
            )
            return False
        if step == 0:
            self.before = value
            return False
        self.evaluated_step = step
        gain = math.inf if self.value is None else self._sign * (value - self.value)
        self.num_worse = 0 if gain > self._config.early_stopping.threshold else self.num_worse + 1
        if gain <= 0:
            return False
        self.step, self.value = step, value
        return True

    @property
    def is_over(self) -> bool:
        """Whether training is to stop, as early_stopping.patience says."""
        patience = self._config.early_stopping.patience
        return patience is not None and self.num_worse >= patience

    def reason(self) -> str:
        """Say why training stops early."""
        return (
            f"stopped early: {self.name} was not better in the last {self.num_worse} evaluations than {self.value:g}, "
            f"at step {self.step}; trainer.fit(steps=20) goes on all the same, as does a resumed run with more patience"
        )

    def write(self) -> None:
        """Write best.json: metric, value, step, its checkpoint if there is one. A full disk is a warning."""
        if self.step is None:
            return
        checkpoint = self.checkpoint
        record = {
            "metric": self.name,
            "value": self.value,
            "step": self.step,
            "checkpoint": None if checkpoint is None else os.path.relpath(checkpoint, self._folder),
            "before_training": self.before,
            "evaluations_since_better": self.num_worse,
        }
        try:
            write_text(self._folder / BEST_FILE, json.dumps(record, indent=2) + "\n")
        except OSError as error:
            logger.warning("cannot write %s: %s", self._folder / BEST_FILE, error)

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint of the best step; None if there is none (yet)."""
        folders = [folder for folder in (self._folder, self._earlier) if folder is not None and self.step is not None]
        checkpoints = (folder / f"checkpoint-{self.step}" for folder in folders)
        return next((checkpoint for checkpoint in checkpoints if checkpoint.is_dir()), None)

    @property
    def kept(self) -> Path | None:
        """What must not be deleted: the checkpoint of the best step, and as long as there is none, because it is being
        written or could not be, that of the one before."""
        self._kept = self.checkpoint or self._kept
        return self._kept

    def load(self, step: int, load: Callable[[Path], None]) -> str | None:
        """At the end of training after `step`, load the best checkpoint if load_best_model_at_end says so. Returns what
        to tell the user."""
        if not self._config.load_best_model_at_end or (self.step is not None and self._loaded == self.step):
            return None
        if self.step is None:
            tried = counted(self._num_unknown, "evaluation")
            message = (
                f"there is no best step: {self.name} was not a number in any of {tried}, so the weights of the last "
            )
            return message + "step stay; see eval/rewards/num_failed" if self._num_unknown else None
        message = f"the best step by {self.name} is {self.step} ({self.value:g})"
        if self.before is not None and self.value is not None and self._sign * (self.value - self.before) <= 0:
            message += f", which is not better than before training ({self.before:g})"
        if self.step == step:
            return f"{message}, the last one"
        checkpoint = self.checkpoint
        if checkpoint is None:
            raise CheckpointError(
                f"{message}, but {self._folder / f'checkpoint-{self.step}'} is missing, so its weights cannot be "
                "loaded; those of the last step stay"
            )
        load(checkpoint)
        self._loaded = self.step
        return f"{message}: its weights are loaded from {checkpoint}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        values: dict[str, Any] = {
            "step": self.step,
            "value": self.value,
            "before": self.before,
            "num_worse": self.num_worse,
            "evaluated_step": self.evaluated_step,
        }
        values["folder"] = str(self.checkpoint.parent if self.checkpoint else self._folder)
        return {} if self.name is None else {"metric": self.name, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; by another metric than its own, begin again."""
        if self.name is None or not state:
            return
        if state["metric"] != self.name:
            logger.warning(
                "metric_for_best_model is %s now, and was %s: the best step so far is forgotten",
                self.name,
                state["metric"],
            )
            return
        self.step, self.value, self.before = state["step"], state["value"], state["before"]
        self.num_worse, self._earlier = state["num_worse"], Path(state["folder"])
        self.evaluated_step = state.get("evaluated_step", 0)
