"""The seconds that holding has won: what a synchronous rollout of the delivered samples would have taken, less what the
rollout took that delivered them."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from hybrid_rl.batch import AnyBatch
from hybrid_rl.engines.base import SlotUse
from hybrid_rl.engines.step_cost import StepCost


class SecondsWon:
    """Estimates them from all engine steps of the run so far; without those of the first rollout of the process as
    soon as there are others, because engines compile in it.

    Seconds are those of engine steps, and of waiting for other ranks between them. Whatever else a rollout does (it
    decodes texts, and submits rewards) counts for neither side.
    """

    def __init__(self) -> None:
        self._known, self._num_rollouts = StepCost(), 0

    def of(self, uses: Sequence[SlotUse], batch: AnyBatch) -> float | None:
        """Return the seconds won by a rollout. uses: of the engine of each rank; batch: what was delivered. None if the
        steps were not counted, or cannot tell yet what others take."""
        costs = [use.cost for use in uses if use.cost is not None]
        if not costs or len(costs) < len(uses):
            return None
        if self._num_rollouts == 1:
            self._known = StepCost(most_sequences=self._known.most_sequences)
        self._num_rollouts += 1
        for cost in costs:
            self._known.merge(cost)
        rates = self._known.rates()
        if rates is None:
            return None
        num_engines = max(1, len(costs) // self._known.num_ranks)
        lengths = lengths_by_engine(batch["group"].tolist(), batch["completion_length"].tolist(), num_engines)
        slots = self._known.most_sequences
        decoding = max(
            rates.of_step * num_steps(engine_lengths, slots) + rates.of_sequence * sum(engine_lengths)
            for engine_lengths in lengths
        )
        # Prompts of the samples that this rollout began: on average as many as of those that it delivered.
        prompt_tokens = sum(cost.prompt_tokens for cost in costs) / len(costs)
        prompt_tokens -= sum(cost.tokens_again for cost in costs) / num_engines
        took = max(cost.seconds + cost.waited_seconds for cost in costs)
        return decoding + rates.of_prompt_token * max(0.0, prompt_tokens) - took


def lengths_by_engine(groups: Sequence[int], lengths: Sequence[int], num_engines: int) -> list[list[int]]:
    """Deal the lengths of completions to engines: one group after the other to each in turn."""
    engine_of = {group: number % num_engines for number, group in enumerate(dict.fromkeys(groups))}
    dealt_lengths: list[list[int]] = [[] for _ in range(num_engines)]
    for group, length in zip(groups, lengths, strict=True):
        dealt_lengths[engine_of[group]].append(length)
    return dealt_lengths


def num_steps(lengths: Sequence[int], slots: int) -> int:
    """Return how many engine steps completions of these lengths take, if so many run at a time and the next one starts
    when one ends."""
    ends = list(lengths[:slots])
    heapify(ends)
    for length in lengths[slots:]:
        heapreplace(ends, ends[0] + length)
    return max(ends, default=0)
