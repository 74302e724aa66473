"""The pictures of memory in the run folder: asked for rarely, drawn by the driver, and never a reason to fail."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.pictures import memory_picture
from hybrid_rl.extras.pictures.curves import can_draw
from hybrid_rl.memory.cycle import RESIDENTS
from hybrid_rl.memory.history import StepMemory
from hybrid_rl.planning.ledger import MemoryPlan
from hybrid_rl.workers.groups import PolicyGroup

logger = logging.getLogger("hybrid_rl")

FIRST_STEP = 2  # of a run: the first step also has the start, and makes what later ones only use


class MemoryPictures:
    """Draws memory.png of a run, with its numbers in memory.json: after its second step, the first time that
    other residents are awake between two steps than ever before, and at the end.

    folder: of the run. plan: of its memory, None if there is none. timed: encloses what it draws by name.
    """

    def __init__(
        self,
        policy: PolicyGroup,
        folder: Path,
        plan: MemoryPlan | None = None,
        timed: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._policy, self._folder, self._timed = policy, folder, timed
        self._expected = None if plan is None else plan.expected()
        self._num_steps = 0
        self._shown: set[frozenset[str]] = set()  # what was awake between two steps when a picture was drawn
        self._drawn = -1  # the step in the picture

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Draw if it is due after this step, whose metrics tell what is in memory now."""
        self._num_steps += 1
        awake = frozenset(tag for tag in RESIDENTS if metrics.get(f"memory/{tag}_bytes", 0.0) > 0)
        if self._num_steps >= FIRST_STEP and awake not in self._shown:
            self._shown.add(awake)
            with self._timed("pictures"):
                self.draw(step)

    def draw(self, step: int) -> None:
        """Draw the last step, unless that is in the picture already; what prevents it is a warning."""
        if not self._num_steps or self._drawn == step or self._policy.has_ended:
            return
        path = self._folder / "memory.png"
        try:
            steps = self._policy.memory_history()[0]
            if steps:
                title = f"residents in memory of rank 0 (its process takes more), training step {step}"
                if can_draw():
                    memory_picture.draw_memory(steps[-1], path, title=title, expected=self._expected)
                record = {"step": step} | memory_picture.memory_record(steps[-1], self._expected)
                path.with_suffix(".json").write_text(json.dumps(record))
            self._drawn = step
        except Exception as error:
            logger.warning("cannot draw %s: %s: %s", path, type(error).__name__, error)


def save_trace(ranks: list[list[StepMemory]], path: str | Path) -> Path:
    """Write the last steps of all ranks as a trace. Raises ConfigError if there is none yet, or if the file cannot be
    written."""
    if not any(ranks):
        raise ConfigError("there is no training step yet whose memory could be shown; call it after a step")
    target = Path(path)
    try:
        target.write_text(json.dumps(memory_picture.chrome_trace(ranks)))
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error}") from error
    return target
