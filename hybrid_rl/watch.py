"""Whether a run still learns: updates that are skipped one after the other end it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_rl.errors import DivergedError

logger = logging.getLogger("hybrid_rl")

MAX_LOST_STEPS = 3
ROLES = {"policy": "", "critic": "critic/"}


class LearningWatch:
    """Counts, for policy and critic, the training steps in a row of which every update was skipped.

    updates_per_step: optimizer steps of a training step. is_broken: whether weights are not finite any more, so that a
    checkpoint of them would stand in the way of an earlier one.
    """

    def __init__(self, updates_per_step: int) -> None:
        self._updates_per_step = updates_per_step
        self._lost = dict.fromkeys(ROLES, 0)
        self._has_warned = dict.fromkeys(ROLES, False)
        self.is_broken = False

    def look(
        self, step: int, metrics: Mapping[str, float], why: Callable[[], Mapping[str, Any]]
    ) -> DivergedError | None:
        """Take the metrics of a training step. why: asked for the last skipped update of each role (`SkippedUpdate`).

        The first of a row is warned of. Returns the error that ends the run where it is time for one.
        """
        error, causes = None, None
        self.is_broken = False
        for role, prefix in ROLES.items():
            skipped = int(metrics.get(f"{prefix}skipped_updates", 0))
            if not skipped:
                if f"{prefix}skipped_updates" in metrics:  # a policy whose critic warms up is not updated
                    self._lost[role], self._has_warned[role] = 0, False
                continue
            causes = why() if causes is None else causes
            cause = causes[role]
            self.is_broken |= cause.is_weights
            self._lost[role] = self._lost[role] + 1 if skipped >= self._updates_per_step else 0
            if self._lost[role] >= MAX_LOST_STEPS:
                error = error or DivergedError(
                    f"the {role} has not changed in the last {self._lost[role]} training steps, up to step {step}: all "
                    f"of their updates ({self._lost[role] * self._updates_per_step}) were skipped, because gradients "
                    f"were no numbers. In the last one {cause}. What to do: {cause.remedy}. "
                    + ("" if cause.is_weights else "The weights are those of the last good update; ")
                    + "checkpoints that were written stay as they are"
                )
            elif not self._has_warned[role]:
                logger.warning(
                    "training step %d: %d of %d updates of the %s were skipped: %s. If it happens again: %s",
                    *(step, skipped, self._updates_per_step, role, cause, cause.remedy),
                )
                self._has_warned[role] = True
        return error
