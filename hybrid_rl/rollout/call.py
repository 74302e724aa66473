"""The request for a rollout, its prompts and what they have in common; and the report that comes with its samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams, SlotUse
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.rewards import RewardFailure, TrainerState
from hybrid_rl.rollout.hold_rule import HoldRule

TRAINING = "train/"  # begins the purposes of training steps


@dataclass(frozen=True)
class RolloutTask:
    """One prompt of a rollout, num_generations samples. place: of the prompt among all of the rollout, over all ranks.
    expected: tokens that each of its samples may be expected to have; None = not known."""

    place: int
    row: PromptRow
    expected: int | None = None


@dataclass(frozen=True)
class RolloutCall:
    """What all prompts of a rollout have in common.

    first_id: the first of the ids of its trajectories and groups, which no other rollout of the run uses. purpose: the
    noise of a sample depends on this, the seed and the sample's place only: the rank that makes it and the samples
    next to it do not matter. is_scored: whether rewards are computed. hold: of a partial rollout, which groups it
    delivers; None = all. is_refill: whether the step has been given groups before: it goes on with what those left.
    num_voids: how often so far the recorded turns of earlier processes became void.
    """

    num_generations: int
    params: SamplingParams
    version: int
    state: TrainerState
    purpose: str
    first_id: int
    is_scored: bool = True
    hold: HoldRule | None = None
    is_refill: bool = False
    num_voids: int = 0

    @property
    def is_training(self) -> bool:
        """Whether the samples are those of a training step."""
        return self.purpose.startswith(TRAINING)

    def group(self, task: RolloutTask) -> int:
        """Return the id of the group of a prompt."""
        return self.first_id + task.place

    def trajectory(self, task: RolloutTask, generation: int) -> int:
        """Return the id of a trajectory of a prompt. generation: its number there, from 0."""
        return self.first_id + task.place * self.num_generations + generation


@dataclass
class RolloutReport:
    """The report of a worker's share of a rollout, which comes with its batch. seconds: by part of the work. logged:
    numbers of log_metric. retried: as in `RewardResult`. metrics: of the samples themselves. use: of the engine while
    it generated them; 0 steps = not counted. num_missing: tokens that may be expected to be generated yet for what the
    worker holds. left: metrics of what it holds; in a step of several rounds those of the last round count."""

    seconds: dict[str, float]
    failures: list[RewardFailure] = field(default_factory=list)
    logged: MetricSums = field(default_factory=MetricSums)
    retried: dict[str, tuple[int, str]] = field(default_factory=dict)
    metrics: MetricSums = field(default_factory=MetricSums)
    use: SlotUse = SlotUse()
    num_missing: int = 0
    left: MetricSums = field(default_factory=MetricSums)
