"""A task for the reward lanes, and how a failed call is narrowed down to the samples that caused it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.rewards.calling import CallOutcome, failed_call
from hybrid_rl.rewards.functions import RewardFunction, RewardInput
from hybrid_rl.rewards.results import Part, cause_of

HUNG = frozenset({"timeout", "died"})
MAX_HUNG_SAMPLES = 8
"""So many samples of one call may run into the limit, or kill their process, before the rest is given up."""
MAX_ALIKE_SAMPLES = 8
"""If so many samples, the first of a call, all fail alike when called alone, the function is at fault, not they."""


@dataclass(frozen=True)
class Task:
    """One function over some samples. Exactly one of the two callbacks is called, from any thread."""

    function: RewardFunction
    index: int
    """Position of the function in the runner's list."""
    inputs: Sequence[RewardInput]
    arguments: Callable[[Sequence[RewardInput]], dict[str, Any]]
    """Keyword arguments for a call over some of the samples."""
    done: Callable[[list[Part]], None]
    fail: Callable[[BaseException], None]
    """Called with an error of the library or the setup; failures of the function go to `done`."""
    is_whole: bool = False
    """Whether the samples are a group that must stay one call: where it fails, all of them fail."""


def call_and_isolate(
    call: Callable[[Sequence[RewardInput]], CallOutcome], task: Task, retried: Collection[str]
) -> list[Part]:
    """Call over all samples of a task; if that fails for a reason in `retried`, call again for one sample at a time,
    unless the samples must stay together.

    Thus only the offending samples fail. But samples that hang cost the whole time limit each, and a function that is
    down (a judge without its server) costs a call each: after MAX_HUNG_SAMPLES that hung, or if the first
    MAX_ALIKE_SAMPLES all failed alike, the remaining ones fail without another call: a step stays bounded.
    """
    inputs = task.inputs
    outcome = call(inputs)
    if not is_cut(task, outcome, retried):
        return [(inputs, outcome)]
    parts: list[Part] = []
    num_hung = 0
    for position, sample in enumerate(inputs):
        single = call([sample])
        parts.append(repeated([sample], single, outcome))
        num_hung += single.failure is not None and single.failure[0] in HUNG
        if num_hung == MAX_HUNG_SAMPLES or (len(parts) == MAX_ALIKE_SAMPLES and are_alike(parts)):
            return [*parts, *given_up(inputs[position + 1 :], parts)]
    return parts


def repeated(inputs: Sequence[RewardInput], single: CallOutcome, outcome: CallOutcome) -> Part:
    """The part of a sample's own call, after a failed one over several."""
    return inputs, single._replace(repeats=outcome.failure)


def are_alike(parts: Sequence[Part]) -> bool:
    """Whether these calls all failed with the same type of exception at the same line."""
    kinds = {_kind(*outcome.failure) if outcome.failure else None for _, outcome in parts}
    return len(kinds) == 1 and None not in kinds


def _kind(reason: str, detail: str) -> tuple[str, ...]:
    """What texts of exceptions have in common, though they may name the sample."""
    frames = [line for line in detail.splitlines() if line.startswith('  File "')]
    return reason, *frames[-1:], cause_of(detail).partition(":")[0]


def given_up(rest: Sequence[RewardInput], parts: Sequence[Part]) -> list[Part]:
    """The samples that are not called again, if there are any: they failed as the last one did."""
    failure = parts[-1][1].failure
    if not rest or failure is None:
        return []
    number = sum(outcome.failure is not None for _, outcome in parts)
    told = f"not called again: {number} samples of the same call failed like this one:\n{failure[1]}"
    return [(rest, failed_call(failure[0], told))]


def is_cut(task: Task, outcome: CallOutcome, retried: Collection[str]) -> bool:
    """Whether a call over a task's samples is to be repeated one sample at a time."""
    if outcome.failure is None or task.is_whole or len(task.inputs) == 1:
        return False
    return outcome.failure[0] in retried
