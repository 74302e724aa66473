"""All output of a run: folder, trackers and console, written through one object."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hybrid_rl.batch import AnyBatch
from hybrid_rl.batch.rollout_files import set_rollouts_aside
from hybrid_rl.checkpoint.finding import resumed_folder, set_later_aside
from hybrid_rl.checkpoint.owners import FolderLock
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.config import TrainerConfig, to_dict, to_yaml
from hybrid_rl.config.changes import changed_keys, changes
from hybrid_rl.config.load import as_mapping
from hybrid_rl.errors import ConfigError, StorageError, counted
from hybrid_rl.logging.progress_display import ProgressDisplay
from hybrid_rl.logging.provenance import environment
from hybrid_rl.logging.run_folder import RunFolder
from hybrid_rl.metrics.metric_sums import Timings
from hybrid_rl.process.files import set_aside
from hybrid_rl.process.hooks import extra

logger = logging.getLogger("hybrid_rl")

ENVIRONMENT = "environment.json"


class RunLog:
    """The log of training steps.

    checkpoint: the one that the run resumes from, None for a new run.
    lock: of the resumed run's folder; None if a new folder is made, or locked here.
    about: what environment.json says of the run, besides the machine.
    display: the console.

    Existing files stay unchanged until `take_up`, before the first write: a run that cannot start leaves no trace.
    Raises ConfigError if another run has the folder.
    """

    def __init__(
        self,
        config: TrainerConfig,
        max_steps: int,
        checkpoint: Checkpoint | None,
        lock: FolderLock | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._yaml = to_yaml(config)
        self._run = _open_folder(config)
        self._lock = lock or FolderLock(self._run.path)
        self._device = self._run.path.parent.stat().st_dev
        self._trackers: Any = None
        self.display = ProgressDisplay(max_steps, config.log_level)
        self._shown: list[dict[str, Any]] = []
        self._has_warned = self._has_environment = False
        self._about = dict(about or {})
        self._is_taken_up = not self._run.is_continued
        if not self._run.is_continued:
            self._write_config()
        if self._run.taken is not None:
            self.display.message(f"the run folder is {self.path}, because {self._run.taken} exists")

    def announce_resume(self, checkpoint: Checkpoint) -> None:
        """Log where the run resumes, and which keys have changed."""
        place = f" in {self.path}" if checkpoint.folder.parent.resolve() != self.path.resolve() else ""
        self.display.message(f"resuming {checkpoint} (step {checkpoint.step}){place}")
        configs = checkpoint.state.get("config", {}), to_dict(self._config)
        if changed := changes(*configs):
            self.display.message(f"changed: {changed}")
        if checkpoint.held and "rollout.max_completion_length" in changed_keys(*configs):
            number = counted(len(checkpoint.held), "held group")
            self.display.message(f"{number} will finish under the old max_completion_length")

    @property
    def is_taken_up(self) -> bool:
        """Whether something was written to the folder by this run."""
        return self._is_taken_up

    def resume(self, checkpoint: Checkpoint | None) -> None:
        """Go back to one of the folder's checkpoints; None for the beginning. `begin` comes again. What is
        later in the folder is set aside, at once if this run has written to it.

        Raises StorageError, and whatever else `take_up` raises; the same call again completes it.
        """
        if self._trackers is not None:
            self._trackers.close()
        self._checkpoint, self._run.is_continued = checkpoint, True
        if self._is_taken_up:
            self._set_later_aside()

    def begin(self, step: int) -> bool:
        """Note that training starts after this step. Returns whether the record from before the first step is kept."""
        config = self._config
        self._trackers = extra("trackers")(config.report_to, self._run.path, to_dict(config), step)
        if not self._run.is_continued:
            self._write_config()
            return False
        self._warn_of_config()
        return self._checkpoint is not None and 0 in self._run.steps()

    def take_up(self) -> None:
        """Take a resumed folder into use before anything is written to it: checkpoints, records and rollouts of later
        steps (of all steps, if there is no checkpoint) are set aside, because they will be made again. Nothing is
        deleted, and the next call completes an interrupted one.

        Raises HybridRLError if the folder was taken over or cannot be written.
        """
        if not self._is_taken_up:
            self._set_later_aside()
            self._is_taken_up = True

    def _set_later_aside(self) -> None:
        self.check()
        kept = self._checkpoint.step if self._checkpoint is not None else -1
        # Checkpoints first: if the run is killed now, no checkpoint of another branch may be left without its records.
        moved = set_later_aside(self.path, self._checkpoint)
        dropped = self._run.keep_until(kept)
        set_rollouts_aside(self.path / "rollouts", kept)
        if self._config_problem():
            with contextlib.suppress(FileNotFoundError):
                set_aside(self.path / "config.yaml", "dropped")
        self._write_config()
        after = f"training continues from step {kept}" if kept >= 0 else "training begins without a checkpoint"
        if moved:
            logger.warning(
                "%s: %s, so checkpoints of another branch are set aside: %s. resume=auto ignores them; "
                "resume= with the path of one of them starts a separate run folder",
                *(self.path, after, ", ".join(path.name for path in moved)),
            )
        if dropped.num_steps:
            logger.warning(
                "%s: %s, so the existing records of %s are moved to metrics.jsonl.dropped, and their samples likewise",
                *(self.path, after, counted(dropped.num_steps, "later step" if kept >= 0 else "step")),
            )
        for name, number in dropped.unreadable.items():
            logger.warning(
                "%s: %s of %s %s removed, and kept in %s.dropped",
                *(self.path, counted(number, "unreadable line"), name, "was" if number == 1 else "were", name),
            )

    def _config_problem(self) -> str:
        """Return what is wrong with the existing config.yaml; "" if nothing is."""
        path = self.path / "config.yaml"
        if not path.exists():
            return "the file is missing"
        try:
            is_config = as_mapping(path).keys() & to_dict(self._config).keys()
            return "" if is_config else "the file has no configuration key"
        except ConfigError as error:
            return str(error)

    def _warn_of_config(self) -> None:
        """Warn of a missing or unreadable config.yaml, if the folder is that of an earlier run."""
        problem = self._config_problem()
        if problem and (self._checkpoint is not None or self._run.steps()):
            logger.warning("%s: %s; the first step writes the current one", self.path / "config.yaml", problem)

    def check(self) -> None:
        """Raise HybridRLError if another run has taken the folder. A deleted folder is made again, with what a later
        `resume` needs; if the disk prevents that, it is a warning, not an error."""
        problem: Exception | str | None = self.missing_disk() or None
        try:
            if problem is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock.check()
        except OSError as error:  # StorageError too: a lock file that cannot be made again
            problem = error
        if problem is None and not (self.path / "config.yaml").exists():
            try:
                self._write_config()
            except StorageError as error:
                problem = error
        if problem is not None and not self._has_warned:
            logger.warning(
                "%s, or a file in it, is gone and cannot be written again: %s. Training goes on; what cannot be "
                "written waits in memory",
                *(self.path, problem),
            )
        self._has_warned = problem is not None

    def missing_disk(self) -> str:
        """Say that the disk of the run folder is not mounted, if so; "" otherwise. What is written to the empty folder
        in its place would be out of sight once it is back."""
        try:
            if self.path.is_dir():
                return ""
            nearest = next(path for path in self.path.parents if path.is_dir())
            is_other = nearest.stat().st_dev != self._device
        except OSError:  # a network that is down: whoever writes is told
            return ""
        return f"the disk of {self.path.parent} is not mounted" if is_other else ""

    def change(self, config: TrainerConfig, notes: Sequence[str]) -> None:
        """Record another configuration, with a comment for each change that led to it."""
        self._config = config
        self._yaml = "".join(f"# {note}\n" for note in notes) + to_yaml(config)
        if not self._is_taken_up:
            return
        try:
            self._write_config()
        except OSError as error:
            logger.warning("config.yaml keeps the old settings: %s", error)

    def _write_config(self) -> None:
        versions = (
            f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
        )
        self._run.write_text("config.yaml", f"# {versions}\n{self._yaml}")

    def _write_environment(self) -> None:
        """Write what is run, and where. A folder is complete without that, so that a failure is a warning."""
        try:
            self._run.write_text(ENVIRONMENT, json.dumps(self._about | environment(), indent=2) + "\n")
        except StorageError as error:
            logger.warning("%s", error)
        self._has_environment = True

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._run.path

    @property
    def samples_folder(self) -> Path | None:
        """Where samples of an evaluation are kept; None in a resumed folder before its first step, which stays as it
        is as long as nothing is trained."""
        return self.path if self._is_taken_up else None

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, or (step 0) of the evaluation before the first."""
        assert self._trackers is not None
        self.take_up()
        self.check()
        if not self._has_environment:
            self._write_environment()
        self._run.log_metrics(step, metrics)
        self._trackers.table(step, self._shown)
        self._trackers.log(step)
        self.display.step(step, metrics)
        self.display.completions(step, self._shown)
        self._shown = []

    def samples(self, samples: Iterable[dict[str, Any]]) -> None:
        """Show these samples after the line of the step that is recorded next. samples: records as in samples.jsonl."""
        self._shown = list(samples)

    def flush(self, lost: Iterable[Path] = ()) -> None:
        """Write records that wait for the disk. lost: sample files that ranks cannot write."""
        if paths := self._run.flush(lost):
            logger.warning(
                "%s: the records of some steps still cannot be written, and wait in memory; free space and save again",
                ", ".join(map(str, paths)),
            )

    def stop(self, lost: Iterable[Path] = ()) -> None:
        """Stop showing progress, write pending records and draw the curves. lost: sample files that ranks cannot
        write."""
        self.display.stop()
        if self._is_taken_up:
            self._run.finish(lost)
            self.display.summary(self.path)

    def close(self) -> None:
        """Close the trackers; idempotent. The folder of a run that never began is removed if nothing else is in it."""
        self._lock.release()
        if self._trackers is not None:
            self._trackers.close()
        self.display.close()
        if self._trackers is not None:
            return
        with contextlib.suppress(OSError):
            if not self._run.is_continued:
                (self._run.path / "config.yaml").unlink(missing_ok=True)
            self._run.path.rmdir()  # fails unless it is empty


def cost_metrics(
    batch: AnyBatch, timings: Timings, seconds: float, forward_flops: float, update_passes: float
) -> dict[str, float]:
    """Return the seconds of a training step by part, and the throughput that they achieved.

    forward_flops: of the policy for the batch, once. update_passes: forward passes that an update is worth.
    """
    made_tokens = int(batch["policy_length" if "policy_length" in batch else "completion_length"].sum())
    all_tokens = int(batch["completion_length"].sum()) + int(batch["prompt_length"].sum())
    return {
        **timings.result("timing"),
        "timing/step": seconds,
        "step_time": seconds,
        "perf/rollout_tokens_per_second": made_tokens / max(timings.seconds["rollout"], 1e-9),
        "perf/tokens_per_second": all_tokens / max(seconds, 1e-9),
        "perf/samples_per_second": batch.num_samples / max(seconds, 1e-9),
        **{
            f"perf/{part}_gflops": passes * forward_flops / timings.seconds[part] / 1e9
            for part, passes in (("rollout", 1), ("update", update_passes))
            if timings.seconds.get(part)
        },
    }


def with_logged(metrics: dict[str, float], logged: Mapping[str, float]) -> dict[str, float]:
    """Add the values that reward functions logged to metrics; a name that is taken gets the prefix `log_metric/`."""
    taken = {name for name in logged if name in metrics or name.startswith("eval/")}
    return metrics | {f"log_metric/{name}" if name in taken else name: value for name, value in logged.items()}


def _open_folder(config: TrainerConfig) -> RunFolder:
    """Return the folder of the resumed run (`resumed_folder`), or a new one. resume=auto also takes an existing folder
    without a checkpoint: a job that died before its first one finds its later ones under the same name."""
    folder = resumed_folder(config.resume, config.output_dir, config.run_name)
    if folder is not None:
        return RunFolder(str(folder.parent), folder.name, "", keep=True)
    return RunFolder(config.output_dir, config.run_name, config.algorithm.name)
