"""The dealing of prompts to ranks: by the tokens that are expected of them, the longest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy

from hybrid_rl.controller.exchange import DealtList
from hybrid_rl.rollout.call import RolloutCall, RolloutTask


class TaskList(DealtList[RolloutTask]):
    """The prompts of a rollout, those with the longest expected completions first: a rank starts its prompts in this
    order, so that what takes longest does not start last.

    loads: tokens that ranks have to generate besides, by their number among the parts of a call.
    """

    def __init__(self, tasks: Iterable[RolloutTask], call: RolloutCall, loads: Mapping[int, int]) -> None:
        limit = call.params.max_tokens
        self._costs = {task.place: call.num_generations * (task.expected or limit) for task in tasks}
        super().__init__(sorted(tasks, key=lambda task: (-self._costs[task.place], task.place)))
        self._loads = loads

    def dealt(self, num_parts: int) -> list[list[RolloutTask]]:
        """Give each prompt, in order, to the rank that has the fewest tokens to generate so far; of several to the
        first. If no lengths are known and nothing is held, that is one prompt after the other to each rank in turn.

        Graham (1969) proves for this rule that the fullest rank has at most 4/3 of what the best dealing would give it,
        if nothing is held.
        """
        loads = [self._loads.get(part, 0) for part in range(num_parts)]
        parts: list[list[RolloutTask]] = [[] for _ in loads]
        for task in self:
            part = min(range(num_parts), key=lambda part: loads[part])
            parts[part].append(task)
            loads[part] += self._costs[task.place]
        return parts


def split_off(tasks: TaskList, number: int) -> tuple[TaskList, TaskList]:
    """Return the prompts but the last, and the last ones, so many; each are dealt to ranks as all would be."""
    first, last = copy(tasks), copy(tasks)
    first[:] = [task for task in tasks if task.place < len(tasks) - number]
    last[:] = [task for task in tasks if task.place >= len(tasks) - number]
    return first, last
