"""What scripts written for TRL and transformers call after `train()`, so that nothing trained is lost because of a
name."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from hybrid_rl.checkpoint.reading import STATE_FILE
from hybrid_rl.errors import ConfigError
from hybrid_rl.files import write_text
from hybrid_rl.logging.report import read_jsonl
from hybrid_rl.run.lasting import Lasting
from hybrid_rl.run.others import open_here

logger = logging.getLogger("hybrid_rl")


@dataclass(frozen=True)
class State:
    """Where a run is, in the terms of transformers' TrainerState. log_history: the records of metrics.jsonl."""

    global_step: int
    max_steps: int
    epoch: float
    best_metric: float | None
    best_model_checkpoint: str | None
    log_history: list[dict[str, Any]] = field(repr=False)
    is_world_process_zero: bool = True


class Driver:
    """What scripts ask of accelerate between `train()` and `save_model()`, answered by the one driver of a run."""

    is_main_process = is_local_main_process = True
    process_index = local_process_index = 0
    num_processes = 1
    print = staticmethod(print)

    def wait_for_everyone(self) -> None:
        """Return at once: a call of the driver ends when all ranks are done."""

    def unwrap_model(self, model: Any) -> Any:
        """Return the module itself: nothing is wrapped around it."""
        return model


class Familiar(Lasting):
    """The base of Trainer with names of TRL and transformers, and the care for what was trained and not saved."""

    accelerator = Driver()
    is_fsdp_enabled = is_deepspeed_enabled = False  # of accelerate's plugins, for which scripts ask
    _fitted_step = 0  # the last one of a `fit()` that came to its end

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> Path:
        """Save as `save(output_dir)` does, whoever calls it. Of a folder that has other files, as the run's own
        output_dir has, it makes the checkpoint a folder inside, `checkpoint-<step>`."""
        target = None if output_dir is None else Path(output_dir)
        if target is not None and target.is_dir() and any(target.iterdir()) and not (target / STATE_FILE).exists():
            target = target / f"checkpoint-{self.global_step}"
        return self.save(target)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigError with the command that uploads the model, which is saved first if it is not yet."""
        folder = self._saved_folder or self.save()
        raise ConfigError(
            f"nothing is uploaded from here, but the model is saved: `hf upload USER/NAME {folder} . "
            '--exclude "optimizer/*"` uploads it without the state of its optimizer'
        )

    @property
    def state(self) -> State:
        """Where the run is: steps, epoch, the best step, and log_history."""
        best = self._best
        checkpoint = str(self.run_folder / f"checkpoint-{best.step}") if best.step is not None else None
        epoch, records = float(self._sampler.epoch), read_jsonl(self.run_folder / "metrics.jsonl")
        return State(self.global_step, self.max_steps, epoch, best.value, checkpoint, records)

    def is_world_process_zero(self) -> bool:
        """Return True: a script is one process, the driver."""
        return True

    is_local_process_zero = is_world_process_zero

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print metrics, one to a line."""
        lines = "\n".join(f"  {name} = {value}" for name, value in sorted(metrics.items()))
        self._log.display.message(f"{split} metrics\n{lines}")

    def save_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Write metrics into `<split>_results.json` in the run folder."""
        write_text(self.run_folder / f"{split}_results.json", json.dumps(dict(metrics), indent=2) + "\n")

    def save_state(self) -> None:
        """Write `state` into trainer_state.json in the run folder. A run resumes from checkpoints, which have their
        own."""
        write_text(self.run_folder / "trainer_state.json", json.dumps(asdict(self.state), indent=2) + "\n")

    def end(self) -> None:
        """Close the Trainer."""
        self.close()

    # ------------------------------------------------------------------------------------------ trained, and not saved

    def __exit__(self, *raised: object) -> None:
        try:
            if any(isinstance(error, Exception) for error in raised):
                self._keep_unsaved()
        finally:
            super().__exit__(*raised)

    def _note_fitted(self) -> None:
        """Note that a `fit()` came to its end: a script that fails from now on, by a misspelled name for example, does
        not cost what was trained."""
        self._fitted_step = self.global_step
        _watch_script()

    @property
    def _saved_folder(self) -> Path | None:
        """The folder that has the present step; None if there is none."""
        own = self.run_folder / f"checkpoint-{self.global_step}"
        places = [own, *([self._saved_to] if self._saved_to is not None else [])]
        return next((place for place in places if (place / STATE_FILE).is_file()), None)

    def _keep_unsaved(self) -> None:
        """Save what a complete `fit()` has trained and nobody has saved."""
        is_due = self._fitted_step and self._fitted_step == self.global_step and not (self._closed or self._work)
        if not is_due or self.policy.has_ended or self._saved_folder is not None:
            return
        try:
            self._log.display.message(f"the script ends with an error, and step {self.global_step} was not saved yet:")
            self.save()
        except Exception as error:
            logger.warning("step %d could not be saved: %s", self.global_step, error)


@functools.cache
def _watch_script() -> None:
    """Save what was trained, once, when an error ends the program and its traceback was shown."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if isinstance(error, Exception):
            for trainer in open_here():
                if isinstance(trainer, Familiar):
                    trainer._keep_unsaved()

    sys.excepthook = hook
