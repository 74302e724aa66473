"""What scripts written for TRL and transformers call after `train()`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hybrid_rl.checkpoint.reading import STATE_FILE
from hybrid_rl.errors import ConfigError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.models.lora.inject import show
from hybrid_rl.process.files import write_text
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.saver import Saver


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


class Familiar:
    """Names of TRL and transformers that do or show something of a run."""

    def __init__(self, crew: Crew, saver: Saver) -> None:
        self._crew, self._position, self._log, self._saver = crew, crew.position, crew.log, saver

    @property
    def module(self) -> Any:
        """The module that is trained. With adapters, a script saves it by its own method."""
        module = self._crew.run.module
        if module is None:
            raise AttributeError("model")
        show(module)
        return module

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> Path:
        """Save as `save(output_dir)` does, whoever calls it. Of a folder that has other files, as the run's own
        output_dir has, it makes the checkpoint a folder inside, `checkpoint-<step>`."""
        target = None if output_dir is None else Path(os.path.expanduser(output_dir))
        if target is not None and target.is_dir() and any(target.iterdir()) and not (target / STATE_FILE).exists():
            target = target / f"checkpoint-{self._position.step}"
        return self._saver.save(target)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigError with the command that uploads the model, which is saved first if it is not yet."""
        folder = self._saver.saved_folder or self._saver.save()
        raise ConfigError(
            f"nothing is uploaded from here, but the model is saved: `hf upload USER/NAME {folder} . "
            '--exclude "optimizer/*"` uploads it without the state of its optimizer'
        )

    @property
    def state(self) -> State:
        """Where the run is: steps, epoch, the best step, and log_history."""
        best, folder = self._crew.best, self._crew.folder
        checkpoint = str(folder / f"checkpoint-{best.step}") if best.step is not None else None
        epoch, records = float(self._crew.sampler.epoch), read_jsonl(folder / "metrics.jsonl")
        return State(self._position.step, self._position.max_steps, epoch, best.value, checkpoint, records)

    def is_world_process_zero(self) -> bool:
        """Return True: a script is one process, the driver."""
        return True

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print metrics, one to a line."""
        lines = "\n".join(f"  {name} = {value}" for name, value in sorted(metrics.items()))
        self._log.display.message(f"{split} metrics\n{lines}")

    def save_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Write metrics into `<split>_results.json` in the run folder."""
        write_text(self._crew.folder / f"{split}_results.json", json.dumps(dict(metrics), indent=2) + "\n")

    def save_state(self) -> None:
        """Write `state` into trainer_state.json in the run folder. A run resumes from checkpoints, which have their
        own."""
        write_text(self._crew.folder / "trainer_state.json", json.dumps(asdict(self.state), indent=2) + "\n")
