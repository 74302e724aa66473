"""Where a run is: what its parts count on together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Position:
    """How far a run is, and what its last step has left to do.

    max_steps: the length of the run. step: training steps completed. num_tokens: of all samples so far, prompts
    included. policy_version: of the weights that the engine generates with. metrics: of the last step of this process;
    empty before it. has_begun: whether the record from before the first step is written. owed: metrics of the last
    step, if its evaluation was broken off by Ctrl-C. is_unevaluated: the engine was lost in the evaluation of the last
    step, so that step is to be made again. save_due: a checkpoint is to be written after this step.
    """

    max_steps: int
    step: int = 0
    num_tokens: int = 0
    policy_version: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    has_begun: bool = False
    owed: Mapping[str, float] | None = None
    is_unevaluated: bool = False
    save_due: bool = False

    @property
    def nothing_to_do(self) -> str:
        """What to say of a call for a step at the end of the run."""
        done = f"nothing to do: step {self.step}, max_steps={self.max_steps}"
        return f"{done}; trainer.fit(steps=20) trains 20 more, and trainer.max_steps += 1 allows another trainer.step()"
