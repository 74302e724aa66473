"""Everything a run tells: its folder, its trackers and its console, fed from one place."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.batch.files import set_rollouts_aside
from hybrid_rl.checkpoint import resumed_folder, set_later_aside
from hybrid_rl.config import TrainerConfig, to_dict, to_yaml
from hybrid_rl.config.changes import changes
from hybrid_rl.config.load import as_mapping
from hybrid_rl.errors import ConfigError, counted
from hybrid_rl.files import set_aside
from hybrid_rl.logging.progress import ProgressDisplay
from hybrid_rl.logging.report import RunFolder, Trackers
from hybrid_rl.metrics import Timings
from hybrid_rl.owners import FolderLock

logger = logging.getLogger("hybrid_rl")


class RunLog:
    """Logs training steps. checkpoint: where the run continues from, None for one from the beginning. lock: of the run
    folder that goes on, None where a new one is made, or locked here.

    Until `take_up`, the first word that it writes, nothing that was there is changed: a run that cannot start, or is
    only looked at, leaves no trace. Raises ConfigError where another run has the folder.
    """

    def __init__(
        self, config: TrainerConfig, max_steps: int, checkpoint: Path | None, lock: FolderLock | None = None
    ) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._yaml = to_yaml(config)
        self._run = _open_folder(config)
        self._lock = lock or FolderLock(self._run.path)
        self._trackers: Trackers | None = None
        self._display = ProgressDisplay(max_steps)
        self._has_warned = False
        self._first_step = 0  # that it goes on from
        self._is_taken_up = not self._run.is_continued
        if not self._run.is_continued:
            self._write_config()
        if self._run.taken is not None:
            self.message(f"the run folder is {self.path}, because {self._run.taken} exists")

    def tell_resumed(self, state: Mapping[str, Any]) -> None:
        """Say where the run goes on from, and with what other keys. state: of the checkpoint."""
        place = "" if self._checkpoint is None or _same(self._checkpoint.parent, self.path) else f" in {self.path}"
        self.message(f"resuming {self._checkpoint} (step {state['global_step']}){place}")
        if changed := changes(state.get("config", {}), to_dict(self._config)):
            self.message(f"changed: {changed}")

    def begin(self, step: int) -> bool:
        """The run can start, from after this step on. Whether there is a record of the time before the first step that
        stays."""
        self._first_step = step
        self._trackers = Trackers(self._config.report_to, self._run.path, to_dict(self._config))
        if not self._run.is_continued:
            self._write_config()
            return False
        self._tell_of_config()
        return self._checkpoint is not None and self._run.has_record(0)

    def take_up(self) -> None:
        """Take a folder that goes on into use, before anything is written there: a resumed run makes checkpoints,
        records and rollouts of later steps again, and one without a checkpoint all of them, so those that lie there
        are set aside. Nothing is deleted, and what is broken off in between is done by the next call.

        Raises HybridRLError where the folder was taken over or cannot be written.
        """
        if self._is_taken_up:
            return
        self.check()
        kept = self._first_step if self._checkpoint is not None else -1
        # Checkpoints go first: a run that is killed now must not find those of another branch without their records.
        moved = set_later_aside(self.path, max(kept, 0), self._checkpoint)
        dropped = self._run.keep_until(kept)
        set_rollouts_aside(self.path / "rollouts", kept)
        if self._config_problem():
            with contextlib.suppress(FileNotFoundError):
                set_aside(self.path / "config.yaml", "dropped")
        self._write_config()
        self._is_taken_up = True
        after = f"training goes on from step {kept}" if kept >= 0 else "training begins without a checkpoint"
        if moved:
            logger.warning(
                "%s: %s, so checkpoints of another branch are set aside: %s. resume=auto leaves them out; "
                "one of them given as resume= begins a run folder of its own",
                *(self.path, after, ", ".join(path.name for path in moved)),
            )
        if dropped.num_steps:
            logger.warning(
                "%s: %s, so the records of %s that lay there are moved to metrics.jsonl.dropped, with their samples "
                "beside it",
                *(self.path, after, counted(dropped.num_steps, "later step" if kept >= 0 else "step")),
            )
        for name, number in dropped.unreadable.items():
            logger.warning(
                "%s: %s of %s %s dropped, and kept in %s.dropped",
                *(self.path, counted(number, "unreadable line"), name, "was" if number == 1 else "were", name),
            )

    def _config_problem(self) -> str:
        """What is wrong with the config.yaml that lies there, "" for nothing."""
        path = self.path / "config.yaml"
        if not path.exists():
            return "it is missing"
        try:
            is_config = as_mapping(path).keys() & to_dict(self._config).keys()
            return "" if is_config else "it holds no key of a configuration"
        except ConfigError as error:
            return str(error)

    def _tell_of_config(self) -> None:
        """Warn of a run's config.yaml that is not there or not readable, where there was a run."""
        problem = self._config_problem()
        if problem and (self._checkpoint is not None or self._run.steps()):
            logger.warning("%s: %s; the first step writes the present one", self.path / "config.yaml", problem)

    def check(self) -> None:
        """Raise HybridRLError where another run has taken the folder. A folder that was deleted is made again, with
        what a later `resume` goes by; a disk that does not let it is told of, and is no error."""
        problem: Exception | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.check()
        except OSError as error:
            problem = error
        if problem is None and not (self.path / "config.yaml").exists():
            try:
                self._write_config()
            except ConfigError as error:
                problem = error
        if problem is not None and not self._has_warned:
            logger.warning("%s was deleted, or what lay in it, and cannot be written: %s", self.path, problem)
            self._has_warned = True

    def _write_config(self) -> None:
        versions = (
            f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
        )
        self._run.write_text("config.yaml", f"# {versions}\n{self._yaml}")

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
        self.take_up()
        self.check()
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
        if self._is_taken_up:
            self._run.finish(lost)

    def close(self) -> None:
        """End the trackers; idempotent. The folder of a run that never began goes, unless something else lies in it."""
        self._lock.release()
        if self._trackers is not None:
            self._trackers.close()
            return
        with contextlib.suppress(OSError):
            if not self._run.is_continued:
                (self._run.path / "config.yaml").unlink(missing_ok=True)
            self._run.path.rmdir()  # an empty folder, or none


def _same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()


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


def _open_folder(config: TrainerConfig) -> RunFolder:
    """The folder of the run that goes on (`resumed_folder`), or of a new one. resume=auto takes that of its name also
    where it found no checkpoint: a job that died before its first one finds the later ones under the same name."""
    folder = resumed_folder(config.resume, config.output_dir, config.run_name)
    if folder is not None:
        return RunFolder(str(folder.parent), folder.name, "", keep=True)
    return RunFolder(config.output_dir, config.run_name, config.algorithm.name)
