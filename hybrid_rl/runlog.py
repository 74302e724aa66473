"""Everything a run tells: its folder, its trackers and its console, fed from one place."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hybrid_rl.batch import Batch
from hybrid_rl.config import TrainerConfig, to_dict, to_yaml
from hybrid_rl.metrics import Timings
from hybrid_rl.progress import ProgressDisplay
from hybrid_rl.report import RunFolder, Trackers


class RunLog:
    """Logs training steps. step: steps done already (a resumed run); checkpoint: where that run continues from."""

    def __init__(self, config: TrainerConfig, max_steps: int, step: int, checkpoint: Path | None) -> None:
        self._num_shown = config.log_completions
        self._run = _open_folder(config, step, checkpoint)
        versions = (
            f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
        )
        self._run.write_text("config.yaml", f"# {versions}\n{to_yaml(config)}")
        self._trackers = Trackers(config.report_to, self._run.path, to_dict(config))
        self._display = ProgressDisplay(max_steps)

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
        self._run.log_metrics(step, metrics)
        self._trackers.log(step, metrics)
        if step:
            self._display.step(step, metrics)

    def samples(self, step: int, batch: Batch, names: Sequence[str], extras: Mapping[str, Mapping[int, Any]]) -> None:
        """Prompts, completions and rewards of a step. extras: what reward functions gave to log_extra, by column and
        sample."""
        records = [_sample_record(step, batch, index, names, extras) for index in range(batch.num_samples)]
        self._run.log_samples(records)
        if self._num_shown:
            shown = records[: self._num_shown]
            self._display.completions(step, [(str(r["prompt"]), r["completion"], r["reward"]) for r in shown])

    def stop(self) -> None:
        """Stop showing progress; write what is pending and draw the curves."""
        self._display.stop()
        self._run.finish()

    def close(self) -> None:
        """End the trackers; idempotent."""
        self._trackers.close()


def cost_metrics(batch: Batch, timings: Timings, seconds: float) -> dict[str, float]:
    """What a training step of so many seconds cost, by part, and what it achieved with them."""
    completion_tokens = batch["completion_ids"].values.numel()
    all_tokens = completion_tokens + batch["prompt_ids"].values.numel()
    return {
        **timings.result("timing"),
        "timing/step": seconds,
        "step_time": seconds,
        "perf/rollout_tokens_per_second": completion_tokens / max(timings.seconds["rollout"], 1e-9),
        "perf/tokens_per_second": all_tokens / max(seconds, 1e-9),
        "perf/samples_per_second": batch.num_samples / max(seconds, 1e-9),
    }


def _sample_record(
    step: int, batch: Batch, index: int, names: Sequence[str], extras: Mapping[str, Mapping[int, Any]]
) -> dict[str, Any]:
    values = [None if math.isnan(value) else value for value in batch["function_rewards"][index]]
    reward = float(batch["rewards"][index])
    record = {
        "step": step,
        "prompt": batch["prompt"][index],
        "completion": batch["completion"][index],
        "reward": None if math.isnan(reward) else reward,
        "rewards": dict(zip(names, values, strict=True)),
        "finish_reason": batch["finish_reason"][index],
    }
    if extras:
        record["extra"] = {column: by_key.get(index) for column, by_key in extras.items()}
    return record


def _open_folder(config: TrainerConfig, step: int, checkpoint: Path | None) -> RunFolder:
    """A checkpoint inside a run folder continues that run, as does resume=auto where it found none, from the beginning:
    a job that died before its first checkpoint finds the later ones under the same name. Anything else begins a new
    run."""
    if checkpoint is not None and (checkpoint.resolve().parent / "config.yaml").is_file():
        folder = checkpoint.resolve().parent
        run = RunFolder(str(folder.parent), folder.name, "", keep=True)
        run.keep_until(step)
        return run
    if config.resume == "auto" and checkpoint is None:
        run = RunFolder(config.output_dir, config.run_name, "", keep=True)
        run.keep_until(-1)
        return run
    return RunFolder(config.output_dir, config.run_name, config.algorithm.name)
