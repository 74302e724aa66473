"""What a rollout is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.rewards import TrainerState


@dataclass(frozen=True)
class RolloutTask:
    """One prompt of a rollout, num_generations samples. place: of the prompt among all of the rollout, over all
    ranks."""

    place: int
    row: PromptRow


@dataclass(frozen=True)
class RolloutCall:
    """What all prompts of a rollout have in common.

    first_id: of the samples' ids, which no other rollout of the run uses. purpose: with the seed, a sample's place and
    nothing else it decides the sample's noise: where it is made, and beside which others, does not matter. is_scored:
    whether rewards are wanted.
    """

    num_generations: int
    params: SamplingParams
    version: int
    state: TrainerState
    purpose: str
    first_id: int
    is_scored: bool = True
