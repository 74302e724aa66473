"""What workers are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.algos import ALGORITHMS
from hybrid_rl.config import TrainerConfig
from hybrid_rl.models.weights.recipe import ModelRecipe
from hybrid_rl.rewards import RewardRunner


@dataclass(frozen=True)
class RewardSetup:
    """The user's reward functions, and how they are called. available_columns: of the dataset, None = not known."""

    functions: Any
    available_columns: tuple[str, ...] | None

    def runner(self, config: TrainerConfig) -> RewardRunner:
        """Their runner. Raises ConfigError for functions that cannot be used."""
        return RewardRunner(
            self.functions,
            weights=config.rewards.reward_weights,
            available_columns=self.available_columns,
            num_processes=config.rewards.reward_processes,
            timeout_seconds=config.rewards.reward_timeout_seconds,
        )


@dataclass(frozen=True)
class WorkerSetup:
    """What a rank needs to build itself. model: a module of this process, or how to build it in any. probe_ids: the
    prompt on which engine and trainer are compared. fingerprint: what the live module gave that the recipe copies."""

    model: PreTrainedModel | ModelRecipe
    tokenizer: PreTrainedTokenizerBase
    rewards: RewardSetup
    config: TrainerConfig
    num_optimizer_steps: int
    max_length: int
    probe_ids: tuple[int, ...]
    fingerprint: list[float] | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether somebody must compute the reference's logprobs."""
        algorithm = self.config.algorithm
        return algorithm.beta > 0 or "ref_logprobs" in ALGORITHMS[algorithm.name].needs

    @property
    def has_own_reference(self) -> bool:
        """Whether that is the policy's own ranks."""
        return self.needs_reference and not getattr(self.config.controller, "reference_ranks", 0)

    @property
    def has_scores(self) -> bool:
        """Whether the policy's own ranks compute logprobs before the update."""
        return self.has_own_reference or self.config.algorithm.old_logprobs != "detach"

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
