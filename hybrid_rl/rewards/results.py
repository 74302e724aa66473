"""Rewards of finished samples, and the report of failures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rl.errors import RewardError, counted
from hybrid_rl.rewards.calling import CallOutcome
from hybrid_rl.rewards.functions import RewardInput

if TYPE_CHECKING:
    from hybrid_rl.batch import SampleKey

Part = tuple[Sequence[RewardInput], CallOutcome]
"""Some samples, and the outcome of one call over them."""

ALL_FUNCTIONS = "all functions"
THE_AGENT = "the agent"  # in the place of a function, if it failed before there was anything to score
MEANINGS: dict[str, str] = {
    "raised": "raised an exception",
    "interrupt": "raised KeyboardInterrupt",
    "ended": "asked the program to end",
    "count": "returned a wrong number of values",
    "nan": "returned NaN or infinity",
    "type": "returned something that is not a number",
    "timeout": "ran past reward_timeout_seconds",
    "died": "ended their reward process",
    "long": "did not fit into the judge or reward model",
    "large": "got a reward that is too large",
    "none": "got no reward",
    "agent": "ended with an exception",
}
# Sums over a batch of rewards of this size are finite.
LARGEST_REWARD = 1e302
MAX_KEYS_SHOWN = 8


@dataclass(frozen=True)
class RewardFailure:
    """A failure of one function on one sample."""

    function: str
    """Name of the function; ALL_FUNCTIONS for the reason "none", THE_AGENT if there are no functions."""
    key: SampleKey
    reason: str
    """A key of MEANINGS."""
    detail: str
    """The user's traceback, or the value in question."""


@dataclass(frozen=True)
class RewardResult:
    """Rewards of N samples from F functions, in the order in which they were submitted.

    A trajectory has one reward, the sum over its turns, and so has each function: all its samples hold the same."""

    keys: list[SampleKey]
    values: NDArray[np.float64]
    """[N, F]; nan if a function returned None for all turns of the trajectory, or failed on all."""
    rewards: NDArray[np.float64]
    """[N] weighted sums; nan = masked: left out of baseline and loss."""
    failures: list[RewardFailure]
    extras: dict[str, dict[SampleKey, Any]]
    """Columns given to `log_extra`: column -> key -> value."""
    metrics: dict[str, list[tuple[float, int]]]
    """Numbers given to `log_metric`, each with the number of samples of its call, by which their mean is weighted."""
    token_rewards: list[NDArray[np.float64]]
    """For each sample [number of its tokens] the weighted rewards of single tokens; 0 for a sample without a reward."""
    retried: dict[str, tuple[int, str]]
    """Function -> the number of samples for which it was called again one by one, and why the first call over several
    failed."""


def assemble(
    names: Sequence[str],
    weights: Sequence[float],
    inputs: Sequence[RewardInput],
    parts: Iterable[tuple[int, Part]],
    failed: Sequence[RewardFailure] = (),
    *,
    dense: Collection[int] = (),
    late: Collection[int] = (),
    unrewarded: Mapping[int, tuple[str, str]] | None = None,
) -> RewardResult:
    """Join the calls' outcomes (function index, part) into one result; every sample once per function.

    failed: what went wrong before the calls. dense: functions that may give a number per token. late: columns that
    `merge_late` fills; until then they and all rewards are nan, as another function may still apply to a sample or
    fail on it. unrewarded: as `total_rewards` takes it.

    The turns of a trajectory are submitted together. Its reward is the sum of what its turns got, so that a function
    may reward every turn or give None for all but the last; Tinker's recipes add up the rewards of a trajectory's steps
    and its end in the same way (tinker-cookbook, `rl/types.py`, TrajectoryGroup.get_total_rewards).

    A trajectory on a sample of which any function failed is masked: a sum over the others would be a wrong reward. One
    to which no function applies (None from all) has no reward either, and counts as failed.
    """
    keys = [sample.key for sample in inputs]
    row_of = {key: row for row, key in enumerate(keys)}
    last: dict[int, SampleKey] = {}  # trajectory -> its last turn, in order of first appearance
    for key in keys:
        last[key.trajectory] = max(key, last.get(key.trajectory, key))
    place_of = {trajectory: place for place, trajectory in enumerate(last)}
    totals = np.full((len(last), len(names)), np.nan)
    failures: list[RewardFailure] = list(failed)
    extras: dict[str, dict[SampleKey, Any]] = {}
    metrics: dict[str, list[tuple[float, int]]] = {}
    token_rewards = [np.zeros(len(sample.completion_ids)) for sample in inputs]
    retried: dict[str, tuple[int, str]] = {}
    for index, (samples, outcome) in parts:
        if outcome.repeats is not None:
            before, detail = retried.get(names[index], (0, outcome.repeats[1]))
            retried[names[index]] = (before + len(samples), detail)
        for position, sample in enumerate(samples):
            tokens = outcome.tokens.get(position)
            error = outcome.failure or outcome.errors.get(position)
            if error is None and tokens is not None:
                error = _token_error(tokens, sample, is_dense=index in dense)
            if error is not None:
                failures.append(RewardFailure(names[index], sample.key, *error))
            elif (value := outcome.values[position]) is not None:
                place = place_of[sample.key.trajectory], index
                totals[place] = value if np.isnan(totals[place]) else totals[place] + value
                if tokens is not None:
                    token_rewards[row_of[sample.key]] += weights[index] * np.asarray(tokens)
        for column, column_values in outcome.extras.items():
            by_key = extras.setdefault(column, {})
            by_key.update(zip((sample.key for sample in samples), column_values, strict=True))
        for name, number in outcome.metrics:
            metrics.setdefault(name, []).append((number, len(samples)))

    rewards = np.full(len(last), np.nan)
    if not late:
        rewards, missing = total_rewards(names, weights, list(last.values()), totals, failures, unrewarded)
        failures += missing
        for row, key in enumerate(keys):
            if np.isnan(rewards[place_of[key.trajectory]]):
                token_rewards[row][:] = 0.0
    places = np.array([place_of[key.trajectory] for key in keys], dtype=np.int64)
    return RewardResult(keys, totals[places], rewards[places], failures, extras, metrics, token_rewards, retried)


def total_rewards(
    names: Sequence[str],
    weights: Sequence[float],
    keys: Sequence[SampleKey],
    values: NDArray[np.float64],
    failures: Iterable[RewardFailure],
    unrewarded: Mapping[int, tuple[str, str]] | None = None,
) -> tuple[NDArray[np.float64], list[RewardFailure]]:
    """Sum values [M, F] to weighted rewards of trajectories [M], and list the failures that this adds.

    keys: of the last turn of each, under which failures are listed. unrewarded: by trajectory, what its failure says
    if nothing gives it a reward, function and detail; None = all functions returned None.

    A reward is nan if a turn of the trajectory has a failure, if no function applies to it, or if its sum is too large;
    the last two are the added failures.
    """
    applies = ~np.isnan(values)
    with np.errstate(over="ignore", invalid="ignore"):
        rewards = np.where(applies, values, 0.0) @ np.asarray(weights, dtype=np.float64)
    failed = {failure.key.trajectory for failure in failures}
    missing = []
    for row, key in enumerate(keys):
        if key.trajectory in failed:
            rewards[row] = np.nan
        elif not applies[row].any():
            rewards[row] = np.nan
            every = ALL_FUNCTIONS, f"{', '.join(names)} returned None for this sample"
            function, detail = (unrewarded or {}).get(key.trajectory, every)
            missing.append(RewardFailure(function, key, "none", detail))
        elif not abs(rewards[row]) <= LARGEST_REWARD:
            rewards[row] = np.nan
            parts = ", ".join(f"{name}={value:g}" for name, value in zip(names, values[row], strict=True))
            detail = (
                f"the weighted sum of {parts} is beyond {LARGEST_REWARD:g}, so sums over a batch would be infinite; "
                "divide by a constant in the function, or lower reward_weights"
            )
            missing.append(RewardFailure(ALL_FUNCTIONS, key, "large", detail))
    return rewards, missing


def _token_error(tokens: Sequence[float], sample: RewardInput, *, is_dense: bool) -> tuple[str, str] | None:
    if not is_dense:
        detail = (
            f"returned a list of {counted(len(tokens), 'number')} for one sample; a function that rewards single "
            f"tokens must be marked with the decorator hybrid_rl.rewards.dense_reward"
        )
        return "type", detail
    if len(tokens) != len(sample.completion_ids):
        detail = (
            f"returned {len(tokens)} token rewards for a completion of {len(sample.completion_ids)} tokens; give one "
            f"for each of its completion_ids"
        )
        return "count", detail
    return None


def format_failures(failures: Sequence[RewardFailure]) -> str:
    """Write a readable report: one paragraph per function and reason, each with its first detail in full."""
    groups: dict[tuple[str, str], list[RewardFailure]] = {}
    for failure in failures:
        groups.setdefault((failure.function, failure.reason), []).append(failure)
    lines: list[str] = []
    for (function, reason), members in groups.items():
        shown = ", ".join(str(key) for key in sorted(member.key for member in members)[:MAX_KEYS_SHOWN])
        more = ", ..." if len(members) > MAX_KEYS_SHOWN else ""
        which = "trajectory" if len(members) == 1 else "trajectories"
        detail = members[0].detail
        cause = f" {cause_of(detail)}" if "Traceback" in detail else ""  # the last line of a traceback
        summary = f"{counted(len(members), 'sample')} {MEANINGS[reason]}"
        who = function if function == THE_AGENT else f"reward {function}"
        lines.append(f"{who}: {summary} ({which} {shown}{more}); first:{cause}")
        lines.extend(f"  {line}" for line in detail.splitlines())
    return "\n".join(lines)


def cause_of(detail: str) -> str:
    """Find the line of a failure's detail that says what is wrong: in a traceback the exception, at its end."""
    lines = detail.splitlines() or [""]
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return lines[-1 if "Traceback" in lines[0] else 0].strip()
    return next((line for line in lines[frames[-1] :] if not line.startswith("  ")), lines[-1].strip())


def check_not_ended(failures: Iterable[RewardFailure], step: int) -> None:
    """End the run if a reward function asked for it, which is not a failure of a sample. Raises KeyboardInterrupt if
    the function did, as after a Ctrl-C, and RewardError for SystemExit and any other BaseException."""
    for failure in failures:
        detail = "\n".join(f"  {line}" for line in failure.detail.splitlines())
        cause = cause_of(failure.detail)
        who = THE_AGENT if failure.function == THE_AGENT else f"reward function {failure.function!r}"
        if failure.reason == "interrupt":
            raise KeyboardInterrupt(f"step {step}: {who} raised {cause}\n{detail}")
        if failure.reason == "ended":
            raise RewardError(
                f"step {step}: {who} raised {cause}, which asks the program to end and "
                f"is not a failure of a sample; raise an Exception for a sample that cannot be scored, or return None\n"
                f"{detail}"
            )


def check_failure_share(
    num_failed: int, num_samples: int, failures: Sequence[RewardFailure], max_share: float, step: int
) -> None:
    """Stop the run if too many samples of one training step have no reward.

    num_failed of num_samples have none; a share equal to `max_share` passes. Raises RewardError with each function's
    count, the share, and the first traceback.
    """
    if num_samples == 0 or num_failed / num_samples <= max_share:
        return
    cause = f" ({failures[0].function}: {cause_of(failures[0].detail)})" if failures else ""
    is_agent = bool(failures) and failures[0].function == THE_AGENT
    culprit = "the agent, its environment or its tools" if is_agent else "the reward function"
    if failures and failures[0].function == ALL_FUNCTIONS and failures[0].reason == "none":
        culprit = "one of them"
    raise RewardError(
        f"step {step}: {num_failed} of {num_samples} samples ({num_failed / num_samples:.1%}) have no reward{cause}, "
        f"more than max_reward_failure_share={max_share}; correct {culprit}, or raise "
        f"max_reward_failure_share if such failures are expected\n{format_failures(failures)}"
    )
