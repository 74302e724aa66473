"""A task for the reward lanes, and how a failed call is narrowed down to the samples that caused it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.rewards.calling import CallOutcome, failed_call
from hybrid_rl.rewards.functions import RewardFunction, RewardInput
from hybrid_rl.rewards.results import Part

HUNG = frozenset({"timeout", "died"})
MAX_HUNG_SAMPLES = 8
"""So many samples of one call may run into the limit, or kill their process, before the rest is given up."""


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

    Thus only the offending samples fail. Samples that hang cost the whole time limit each, so after
    MAX_HUNG_SAMPLES of them the remaining ones fail without another call: a step stays bounded.
    """
    inputs = task.inputs
    outcome = call(inputs)
    if not is_cut(task, outcome, retried):
        return [(inputs, outcome)]
    parts: list[Part] = []
    num_hung = 0
    for position, sample in enumerate(inputs):
        single = call([sample])
        parts.append(([sample], single))
        num_hung += single.failure is not None and single.failure[0] in HUNG
        rest = inputs[position + 1 :]
        if num_hung == MAX_HUNG_SAMPLES and rest and single.failure is not None:
            reason, detail = single.failure
            given_up = f"not called again: {num_hung} samples of the same call failed like this one:\n{detail}"
            return [*parts, (rest, failed_call(reason, given_up))]
    return parts


def is_cut(task: Task, outcome: CallOutcome, retried: Collection[str]) -> bool:
    """Whether a call over a task's samples is to be repeated one sample at a time."""
    if outcome.failure is None or task.is_whole or len(task.inputs) == 1:
        return False
    return outcome.failure[0] in retried
