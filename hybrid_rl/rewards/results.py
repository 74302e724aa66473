"""Rewards of finished samples, what failed, and how failures are judged and reported."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hybrid_rl.errors import RewardError
from hybrid_rl.rewards.calling import CallOutcome
from hybrid_rl.rewards.functions import RewardInput

Reason = Literal["raised", "count", "nan", "type", "timeout", "died", "none"]
Part = tuple[Sequence[RewardInput], CallOutcome]
"""Some samples, and the outcome of one call over them."""

ALL_FUNCTIONS = "all functions"
MEANINGS: dict[str, str] = {
    "raised": "raised an exception",
    "count": "returned a wrong number of values",
    "nan": "returned NaN or infinity",
    "type": "returned something that is not a number",
    "timeout": "ran past reward_timeout_seconds",
    "died": "ended their reward process",
    "none": "returned None",
}
MAX_KEYS_SHOWN = 8


@dataclass(frozen=True)
class RewardFailure:
    """One function failed on one sample."""

    function: str
    """Name of the function; "all functions" for the reason "none"."""
    key: int
    reason: Reason
    detail: str
    """The user's traceback, or the value in question."""


@dataclass(frozen=True)
class RewardResult:
    """Rewards of N samples from F functions, in the order in which they were submitted."""

    keys: list[int]
    values: NDArray[np.float64]
    """[N, F]; nan where a function returned None or failed."""
    rewards: NDArray[np.float64]
    """[N] weighted sums; nan = masked: to be left out of baseline and loss."""
    failures: list[RewardFailure]
    extras: dict[str, dict[int, Any]]
    """Columns given to `log_extra`: column -> key -> value."""
    metrics: dict[str, list[tuple[float, int]]]
    """Numbers given to `log_metric`, each with the samples of its call: their mean weighs every sample alike."""


def assemble(
    names: Sequence[str],
    weights: Sequence[float],
    inputs: Sequence[RewardInput],
    parts: Iterable[tuple[int, Part]],
) -> RewardResult:
    """Join the calls' outcomes (function index, part) into one result; every sample once per function.

    A sample on which any function failed is masked: a sum over the others would be a wrong reward. One to which
    no function applies (None from all) has no reward either, and counts as failed.
    """
    row_of = {sample.key: row for row, sample in enumerate(inputs)}
    values = np.full((len(inputs), len(names)), np.nan)
    failures: list[RewardFailure] = []
    extras: dict[str, dict[int, Any]] = {}
    metrics: dict[str, list[tuple[float, int]]] = {}
    for index, (samples, outcome) in parts:
        for position, sample in enumerate(samples):
            if error := outcome.failure or outcome.errors.get(position):
                failures.append(RewardFailure(names[index], sample.key, *error))  # type: ignore[arg-type]
            elif (value := outcome.values[position]) is not None:
                values[row_of[sample.key], index] = value
        for column, column_values in outcome.extras.items():
            by_key = extras.setdefault(column, {})
            by_key.update(zip((sample.key for sample in samples), column_values, strict=True))
        for name, number in outcome.metrics:
            metrics.setdefault(name, []).append((number, len(samples)))

    applies = ~np.isnan(values)
    rewards = np.where(applies, values, 0.0) @ np.asarray(weights, dtype=np.float64)
    for key in {failure.key for failure in failures}:
        rewards[row_of[key]] = np.nan
    for row in np.flatnonzero(~applies.any(axis=1) & ~np.isnan(rewards)).tolist():
        rewards[row] = np.nan
        failures.append(
            RewardFailure(ALL_FUNCTIONS, inputs[row].key, "none", f"{', '.join(names)} returned None for this sample")
        )
    return RewardResult([sample.key for sample in inputs], values, rewards, failures, extras, metrics)


def format_failures(failures: Sequence[RewardFailure]) -> str:
    """A readable report: one paragraph per function and reason, each with its first traceback or value whole."""
    groups: dict[tuple[str, str], list[RewardFailure]] = {}
    for failure in failures:
        groups.setdefault((failure.function, failure.reason), []).append(failure)
    lines: list[str] = []
    for (function, reason), members in groups.items():
        shown = ", ".join(str(member.key) for member in members[:MAX_KEYS_SHOWN])
        more = ", ..." if len(members) > MAX_KEYS_SHOWN else ""
        lines.append(f"reward {function}: {len(members)} samples {MEANINGS[reason]} (samples {shown}{more}); first:")
        lines.extend(f"  {line}" for line in members[0].detail.splitlines())
    return "\n".join(lines)


def check_failure_share(
    num_failed: int, num_samples: int, failures: Sequence[RewardFailure], max_share: float, step: int
) -> None:
    """Stop the run when too many samples of one training step have no reward.

    num_failed of num_samples have none; a share equal to `max_share` passes. Raises RewardError with each function's
    count, the share, and the first traceback.
    """
    if num_samples == 0 or num_failed / num_samples <= max_share:
        return
    raise RewardError(
        f"step {step}: {num_failed} of {num_samples} samples ({num_failed / num_samples:.1%}) have no reward, more "
        f"than max_reward_failure_share={max_share}; correct the reward function, or raise max_reward_failure_share "
        f"if such failures are expected\n{format_failures(failures)}"
    )
