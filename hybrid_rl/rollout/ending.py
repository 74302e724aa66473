"""When the ranks of a rollout end what they generate, all together: with enough whole groups, or broken off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hybrid_rl.process.interrupts import interrupt_requested
from hybrid_rl.rollout.held import Group, HoldRule, Standing


@dataclass(frozen=True)
class Ending:
    """When a generation with held groups ends.

    rule: which groups are enough. learner: the version of the weights that will train on them. is_outdated: whether
    newer weights than those that generate wait for this rank; None if none can come, and a step waits for its batch.
    """

    rule: HoldRule
    learner: int
    is_outdated: Callable[[], bool] | None = None

    def standing(self, groups: Iterable[Group]) -> Standing:
        """Return how far this rank is."""
        is_outdated = self.is_outdated is not None and self.is_outdated()
        return self.rule.standing(groups, self.learner, is_interrupted=interrupt_requested(), is_outdated=is_outdated)

    def is_reached(self, everywhere: Sequence[Standing]) -> bool:
        """Whether the ranks end here: enough is whole, newer weights wait for all, or one was interrupted.

        Raises KeyboardInterrupt for that if a step waits for its batch; on all ranks at once, since those of one engine
        step together.
        """
        if self.rule.is_over(everywhere, self.learner):
            return True
        is_interrupted = any(of_rank.is_interrupted for of_rank in everywhere)
        if is_interrupted and self.is_outdated is None:
            raise KeyboardInterrupt
        return is_interrupted or all(of_rank.is_outdated for of_rank in everywhere)

    def goes_on(self, everywhere: Sequence[Standing]) -> bool:
        """Whether a generation that has ended so goes on with the newer weights that wait."""
        is_interrupted = any(of_rank.is_interrupted for of_rank in everywhere)
        return not self.rule.is_over(everywhere, self.learner) and not is_interrupted
