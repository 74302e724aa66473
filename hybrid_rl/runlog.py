"""Everything a run tells: its folder, its trackers and its console, fed from one place."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import transformers

from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.batch.files import drop_rollouts
from hybrid_rl.config import TrainerConfig, to_dict, to_yaml
from hybrid_rl.metrics import Timings
from hybrid_rl.progress import ProgressDisplay
from hybrid_rl.report import RunFolder, Trackers

logger = logging.getLogger("hybrid_rl")


class RunLog:
    """Logs training steps. checkpoint: where the run continues from, None for a new one.

    Before `begin` nothing that was there is changed: a run that cannot start leaves no trace.
    """

    def __init__(self, config: TrainerConfig, max_steps: int, checkpoint: Path | None) -> None:
        self._config = config
        self._run = _open_folder(config, checkpoint)
        self._trackers: Trackers | None = None
        self._display = ProgressDisplay(max_steps)
        if not self._run.is_continued:
            self._write_config()

    def begin(self, step: int) -> None:
        """Take the folder into use, from after this step on: a resumed run makes the records of later ones again."""
        if self._run.is_continued:
            dropped = self._run.keep_until(step)
            if dropped:
                logger.warning("%s: the records of %d steps after step %d are dropped", self.path, dropped, step)
            drop_rollouts(self.path / "rollouts", step)
        self._write_config()
        self._trackers = Trackers(self._config.report_to, self._run.path, to_dict(self._config))

    def _write_config(self) -> None:
        versions = (
            f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
        )
        self._run.write_text("config.yaml", f"# {versions}\n{to_yaml(self._config)}")

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._run.path

    def start(self, step: int) -> None:
        """Show progress from here on."""
        self._display.start(step)

    def message(self, text: str) -> None:
        """A line for the person who watches."""
        self._display.message(text)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, or (step 0) of the time before the first."""
        assert self._trackers is not None
        self._run.log_metrics(step, metrics)
        self._trackers.log(step, metrics)
        if step:
            self._display.step(step, metrics)

    def completions(self, step: int, texts: Iterable[tuple[int, str, str, float]]) -> None:
        """Show samples in the console. texts: trajectory, prompt, completion and reward (NaN = none) of each."""
        shown = [(prompt, text, None if math.isnan(reward) else reward) for _, prompt, text, reward in texts]
        self._display.completions(step, shown)

    def stop(self, lost: Iterable[Path] = ()) -> None:
        """Stop showing progress; write what is pending and draw the curves. lost: sample files that ranks cannot
        write."""
        self._display.stop()
        self._run.finish(lost)

    def close(self) -> None:
        """End the trackers; idempotent. The folder of a run that never began goes, unless something else lies in it."""
        if self._trackers is not None:
            self._trackers.close()
            return
        with contextlib.suppress(OSError):
            if not self._run.is_continued:
                (self._run.path / "config.yaml").unlink(missing_ok=True)
            self._run.path.rmdir()  # an empty folder, or none


def cost_metrics(batch: Batch | BatchRef, timings: Timings, seconds: float) -> dict[str, float]:
    """What a training step of so many seconds cost, by part, and what it achieved with them."""
    completion_tokens = int(batch["completion_length"].sum())
    all_tokens = completion_tokens + int(batch["prompt_length"].sum())
    return {
        **timings.result("timing"),
        "timing/step": seconds,
        "step_time": seconds,
        "perf/rollout_tokens_per_second": completion_tokens / max(timings.seconds["rollout"], 1e-9),
        "perf/tokens_per_second": all_tokens / max(seconds, 1e-9),
        "perf/samples_per_second": batch.num_samples / max(seconds, 1e-9),
    }


def _open_folder(config: TrainerConfig, checkpoint: Path | None) -> RunFolder:
    """A checkpoint inside a run folder continues that run, unless another run_name is given; so does resume=auto where
    it found none, from the beginning: a job that died before its first checkpoint finds the later ones under the same
    name. Anything else begins a new run."""
    folder = None if checkpoint is None else checkpoint.resolve().parent
    if folder and (folder / "config.yaml").is_file() and config.run_name in (None, folder.name):
        return RunFolder(str(folder.parent), folder.name, "", keep=True)
    if config.resume == "auto" and checkpoint is None:
        return RunFolder(config.output_dir, config.run_name, "", keep=True)
    return RunFolder(config.output_dir, config.run_name, config.algorithm.name)
