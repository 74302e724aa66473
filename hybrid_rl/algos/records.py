"""What an algorithm is made of: records. A frozen dataclass whose fields are its options (they become configuration
keys), whose class attributes say what it needs, and whose method calls pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hybrid_rl.algos.inputs import AdvantageInputs, Advantages, LossInputs, PolicyLoss, WholeMiniBatch


@dataclass(frozen=True)
class AdvantageEstimator:
    """From rewards to advantages. Subclasses begin with a field `estimator`, their name.

    needs: "values", "logprobs", "ref_logprobs", "teacher_logprobs", "rollout_logprobs", "sum_pi_squared",
    "baseline_rewards": columns of AdvantageInputs that it cannot do without; "demonstrations": samples are the
    dataset's own completions. min_generations: smallest group that it can compare. needs_rewards: False where it learns
    without any. takes_kl_rewards: False where a KL penalty at every token would spoil its rewards (thresholds, steps).
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    min_generations: ClassVar[int] = 1
    needs_rewards: ClassVar[bool] = True
    takes_kl_rewards: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Advantages of all tokens, the same however samples lie on ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class PolicyObjective:
    """From advantages to a loss per token. Subclasses begin with a field `objective`, their name.

    needs: "old_logprobs" (of the learner at the start of the training step, also where one update uses the batch),
    "log_probs" (the whole vocabulary), "old_top" (the best tokens of the old policy; `num_top` of them),
    "router_scores" (of a mixture of experts, then and now).
    initial_parameters: numbers that are learned beside the model, by Adam at parameter_learning_rate.
    corrects_rollout: True where the loss itself weighs what the engine sampled, so that no correction may be added.
    uses_old_logprobs: False where it compares with the engine's policy alone. uses_proximal: True where it compares
    engine, start of the step and policy.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    initial_parameters: ClassVar[tuple[float, ...]] = ()
    corrects_rollout: ClassVar[bool] = False
    uses_old_logprobs: ClassVar[bool] = True
    uses_proximal: ClassVar[bool] = False

    @property
    def parameter_learning_rate(self) -> float:
        """Learning rate of the numbers that are learned beside the model."""
        raise NotImplementedError

    def prepare(self, whole: WholeMiniBatch) -> Tensor | None:
        """What must be known of the whole mini-batch before it is cut, [T, ...] for its tokens, or None. Every rank
        computes the same from the same."""
        return None

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """The loss of each token; how tokens are weighted is not its business (masked.py)."""
        raise NotImplementedError
