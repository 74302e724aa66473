"""The experiment trackers: what each calls a run, how its config, metrics and samples get there."""

from __future__ import annotations

import importlib
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hybrid_rl.errors import ConfigError
from hybrid_rl.logging.console_samples import ANSWERS, message_parts

PROJECT = "hybrid_rl"  # where runs go unless the user names a project
TABLE = "completions"
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
# MLflow lists its tables in a tag of 8,000 characters, which breaks if there are more: later ones are plain JSON files.
MLFLOW_TABLES = 100
MLFLOW_ARGUMENTS = ("tracking_uri", "experiment_name", "run_name", "tags")
# Limits of MLflow's log_batch: docs, "Logging in batches".
MLFLOW_METRICS, MLFLOW_PARAMS, MLFLOW_CHARACTERS = 1000, 100, 6000


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker gets it. folder: of the run; arguments: of this tracker's start; identity: by which the
    tracker knows the run already, None if it does not; first_step: steps after it are sent."""

    folder: Path
    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    identity: str | None
    first_step: int


class Measured(NamedTuple):
    """The metrics of a step. at: when they were sent first, in seconds since the epoch."""

    step: int
    metrics: Mapping[str, float]
    at: float


class Tracker(Protocol):
    """A connection to a tracker, made from a `TrackedRun`. A call may be slow or raise anything; it is then repeated.

    identity: by which a later process continues the run.
    """

    identity: str

    def log(self, steps: Sequence[Measured]) -> None:
        """Send the metrics of steps in a row."""
        ...

    def table(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send samples as a table. samples: records as in samples.jsonl."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


class TensorBoardTracker:
    """Event files in `tensorboard/` of the run folder."""

    identity = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        arguments = {"log_dir": str(run.folder / "tensorboard"), **run.arguments}
        if run.identity is not None:  # what a run that is resumed had written of later steps is hidden
            arguments.setdefault("purge_step", run.first_step + 1)
        self._writer = SummaryWriter(**arguments)
        if run.identity is None:
            rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in flat(run.config).items())
            self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}")

    def log(self, steps: Sequence[Measured]) -> None:
        for step, metrics, at in steps:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()

    def table(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = table_of(step, samples)
        head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
        lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
        self._writer.add_text(TABLE, "\n".join([head, *lines]), step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases. Its environment variables hold (WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS,
    WANDB_MODE ...)."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        arguments: dict[str, Any] = {"name": run.folder.name, "dir": str(run.folder)} | dict(run.arguments)
        if "WANDB_PROJECT" not in os.environ:
            arguments.setdefault("project", PROJECT)
        if run.identity is not None:
            arguments |= {"id": run.identity, "resume": "allow"}
        self._table = wandb.Table
        self._run = wandb.init(config=dict(run.config), reinit="create_new", **arguments)
        self.identity = str(self._run.id)
        # Its own count of steps can never go back, but a run that is resumed does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, steps: Sequence[Measured]) -> None:
        for step, metrics, _ in steps:
            self._run.log({**metrics, "step": step})

    def table(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, data = numeric_table(step, samples)
        self._run.log({TABLE: self._table(columns=columns, data=data), "step": step})

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """trackio: a database on this machine, or a Hugging Face Space (report_to.trackio.space_id)."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        arguments: dict[str, Any] = {"project": project, "name": run.folder.name, "embed": False} | dict(run.arguments)
        self._table, self.identity = trackio.Table, str(arguments["name"])
        self._run = trackio.init(config=flat(run.config), resume="allow", **arguments)

    def log(self, steps: Sequence[Measured]) -> None:
        for step, metrics, _ in steps:
            self._run.log(dict(metrics), step=step)

    def table(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, data = numeric_table(step, samples)
        self._run.log({TABLE: self._table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow. Its environment variables hold (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, credentials)."""

    def __init__(self, run: TrackedRun) -> None:
        # Whoever calls tries again; MLflow itself would for four minutes, and then not see that its server is back.
        for name, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, arguments = Metric, dict(run.arguments)
        self._num_tables = 0
        self._tries = (-1, 0)  # of the last table: its step, and how often it was sent
        self._client = MlflowClient(tracking_uri=arguments.get("tracking_uri"))
        if run.identity is not None:
            self.identity = run.identity
            self._client.update_run(self.identity, status="RUNNING")
            self._num_tables = len(self._client.list_artifacts(self.identity, TABLE))
            return
        name = arguments.get("experiment_name") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_name = arguments.get("run_name") or run.folder.name
        made = self._client.create_run(place, run_name=run_name, tags=arguments.get("tags"))
        self.identity = made.info.run_id
        values = flat(run.config).items()
        params = [Param(name, str(value)[:MLFLOW_CHARACTERS]) for name, value in values]
        for begin in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(self.identity, params=params[begin : begin + MLFLOW_PARAMS])

    def log(self, steps: Sequence[Measured]) -> None:
        # The same time again if it is sent again: MLflow then stores it once.
        made = [
            self._metric(_mlflow_name(name), value, int(at * 1000), step)
            for step, metrics, at in steps
            for name, value in metrics.items()
        ]
        for begin in range(0, len(made), MLFLOW_METRICS):
            self._client.log_batch(self.identity, metrics=made[begin : begin + MLFLOW_METRICS])

    def table(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        # A file for each step, and each try: MLflow adds to a file that is there, which may be broken.
        self._tries = (step, self._tries[1] + 1 if self._tries[0] == step else 1)
        suffix = f"-{self._tries[1]}" if self._tries[1] > 1 else ""
        columns, data = numeric_table(step, samples)
        file = f"{TABLE}/step-{step:06d}{suffix}.json"
        if self._num_tables < MLFLOW_TABLES:
            by_column = zip(columns, map(list, zip(*data, strict=True)), strict=True)
            self._client.log_table(self.identity, dict(by_column), file)
        else:
            self._client.log_dict(self.identity, {"columns": columns, "data": data}, file)
        self._num_tables += 1

    def close(self) -> None:
        self._client.set_terminated(self.identity)


def _mlflow_name(name: str) -> str:
    """Return a metric's name with the characters that MLflow allows."""
    return "".join(char if char.isalnum() or char in "_-./: " else "_" for char in name)


KINDS: dict[str, Any] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


def check_wandb(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if wandb would ask for a login in the middle of the run."""
    wandb = imported("wandb")
    mode = arguments.get("mode") or os.environ.get("WANDB_MODE", "online")
    can_ask = "prompt" in inspect.signature(wandb.login).parameters
    if mode != "online" or not can_ask:
        return
    problem = "nobody is logged in"
    try:
        if wandb.login(prompt=False):
            return
    except Exception as error:  # of a key that it refuses, of a server that it cannot reach
        problem = f"wandb.login() fails with {told(error)}"
    raise ConfigError(
        f"report_to=wandb: {problem}; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline and run `wandb "
        "sync` later"
    )


def imported(name: str) -> Any:
    """Import a tracker's library. Raises ConfigError if its import fails, in whatever way."""
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(
            f"report_to={name}: importing it fails with {told(error)}; install it again (pip install --force-reinstall "
            f"{name}), or leave it out of report_to"
        ) from error


def told(error: BaseException) -> str:
    """Return type and first line of an error."""
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def known_arguments(name: str) -> tuple[str, ...]:
    """Return the arguments that a tracker's start takes, less those that the run gives it."""
    if name == "mlflow":
        return MLFLOW_ARGUMENTS
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        start: Any = SummaryWriter.__init__
    else:
        start = imported(name).init
    return tuple(
        n for n in inspect.signature(start).parameters if n not in ("self", "config", "resume", "id", "reinit")
    )


# -------------------------------------------------------------------------------------------------- tables


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the configuration as one level: "optimizer.learning_rate"."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return leaves


def table_of(step: int, samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of a table of samples. samples: records as in samples.jsonl."""
    names = list(dict.fromkeys(name for sample in samples for name in sample.get("rewards") or {}))
    columns = ["step", "prompt", "completion", "answer", "reward", *(f"reward {name}" for name in names)]
    columns += ["advantage", "finish_reason"]
    rows = []
    for sample in samples:
        row, by_function = sample.get("row") or {}, sample.get("rewards") or {}
        answer = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
        said = sample.get("messages") or sample.get("completion")
        rewards = [sample.get("reward"), *(by_function.get(name) for name in names)]
        end = [sample.get("advantage"), sample.get("finish_reason")]
        answer = None if answer is None else str(answer)
        rows.append([step, _said(sample.get("prompt")), _said(said), answer, *rewards, *end])
    return columns, rows


def numeric_table(step: int, samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the same for tables whose columns have a type: with NaN in the place of None."""
    columns, rows = table_of(step, samples)
    return columns, [[math.nan if value is None else value for value in row] for row in rows]


def _said(text: Any) -> str:
    if not isinstance(text, list):
        return "" if text is None else str(text)
    return "\n".join(f"{role}: {said}" for role, said in map(message_parts, text))


def _cell(value: Any) -> str:
    """Return a value as a cell of a Markdown table."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")
