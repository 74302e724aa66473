"""Narrowing of a failed call to the samples that caused it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from hybrid_rl.rewards.calling import CallOutcome, failed_call
from hybrid_rl.rewards.functions import RewardInput
from hybrid_rl.rewards.results import Part, cause_of

DIED = "died"
HUNG = frozenset({"timeout", DIED})
REPEATED = HUNG | {"raised"}
MAX_HUNG_SAMPLES = 8
"""The rest of a call is given up after so many of its samples ran into the limit or killed their process."""
MAX_ALIKE_SAMPLES = 8
"""If the first so many samples of a call, called one by one, all fail alike, the function is at fault."""


async def call_narrowed(
    call: Callable[[Sequence[RewardInput]], Awaitable[CallOutcome]],
    inputs: Sequence[RewardInput],
    slot: AbstractAsyncContextManager[Any],
    *,
    is_whole: bool,
) -> list[Part]:
    """Call over all samples; if that fails, and a single sample may be the reason, call again for each sample alone.

    Thus only the offending samples fail. A process may also have been killed from outside: a call that cannot be
    narrowed is made once more if it ended with its process. But samples that hang cost the whole time limit each, and a
    function that is down (a judge without its server) costs a call each: after MAX_HUNG_SAMPLES that hung, or if the
    first MAX_ALIKE_SAMPLES all failed alike, the remaining ones fail without another call, which bounds the time of a
    step.

    slot: held during each call; it limits how many run at a time. is_whole: the samples must stay one call, so all of
    them fail with it.
    """
    is_one = is_whole or len(inputs) == 1
    async with slot:
        outcome = await call(inputs)
        failure = outcome.failure
        if is_one and has_died(outcome):
            outcome = (await call(inputs))._replace(repeats=failure)
    if failure is None or failure[0] not in REPEATED or outcome.is_left_behind or is_one:
        return [(inputs, outcome)]
    parts: list[Part] = []
    num_hung = 0

    async def alone(sample: RewardInput) -> Part:
        nonlocal num_hung
        async with slot:
            if num_hung >= MAX_HUNG_SAMPLES:
                return given_up(sample)
            single = await call([sample])
            if failure[0] != DIED and has_died(single):
                single = await call([sample])
            num_hung += single.failure is not None and single.failure[0] in HUNG
        parts.append(([sample], single))
        return [sample], single._replace(repeats=failure)

    def given_up(sample: RewardInput) -> Part:
        failed = [part.failure for _, part in parts if part.failure]
        detail = f"not called again: {len(failed)} samples of the same call failed like this one:\n{failed[-1][1]}"
        return [sample], failed_call(failed[-1][0], detail)

    first, rest = inputs[:MAX_ALIKE_SAMPLES], inputs[MAX_ALIKE_SAMPLES:]
    first_parts = await asyncio.gather(*map(alone, first))
    if are_alike(first_parts):
        return [*first_parts, *map(given_up, rest)]
    return [*first_parts, *await asyncio.gather(*map(alone, rest))]


def has_died(outcome: CallOutcome) -> bool:
    """Whether the process of a call ended during it."""
    return outcome.failure is not None and outcome.failure[0] == DIED


def are_alike(parts: Sequence[Part]) -> bool:
    """Whether these calls all failed with the same type of exception at the same line."""
    kinds = {_kind(*outcome.failure) if outcome.failure else None for _, outcome in parts}
    return len(kinds) == 1 and None not in kinds


def _kind(reason: str, detail: str) -> tuple[str, ...]:
    """Return the part of an exception's text that does not name the sample."""
    frames = [line for line in detail.splitlines() if line.startswith('  File "')]
    return reason, *frames[-1:], cause_of(detail).partition(":")[0]
