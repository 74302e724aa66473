"""Keys of what a run shows and reports: console and trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybrid_rl.algos.options import key


@dataclass(frozen=True, repr=False)
class LoggingKeys:
    """Keys at the top of the configuration that say what the console shows, and what is sent to trackers."""

    log_level: Literal["quiet", "normal", "debug", "json"] = key(
        "normal",
        "what the console shows: quiet = warnings only, debug = also what steps spent, json = a JSON object per line",
    )
    log_completions: int = key(
        0, "completions shown in the console, and sent to trackers, after every training step", minimum=0
    )
    report_to: list[Literal["none", "tensorboard", "wandb", "trackio", "mlflow"]] | dict[str, Any] = key(
        [],
        "trackers in addition to metrics.jsonl; or each with arguments of its start: {wandb: {project: P, group: G, "
        "tags: [T]}, mlflow: {tracking_uri: URI, experiment_name: E}, trackio: {project: P, space_id: S}}",
    )
