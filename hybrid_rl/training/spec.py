"""The terms of a policy loss as values, and numbers of the mini-batch that a micro-batch belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_rl.algos import Correction, KLInLoss, KLTerm, Needs, PolicyObjective
from hybrid_rl.algos.kl import NoKL
from hybrid_rl.batch import TRUNCATIONS, Batch, Trajectories
from hybrid_rl.config import AlgorithmConfig, TrainerConfig
from hybrid_rl.config.algorithm_keys import AdaptiveEntropyConfig
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.load_balance import ExpertLoad, LoadBalance
from hybrid_rl.models.packed.router import Routers
from hybrid_rl.training.token_record import TokenRecord


def loss_mask(batch: Batch, *, mask_truncated_completions: bool) -> Tensor:
    """Find the completion tokens that take part in the loss, bool [M]: made by the policy, of a trajectory that was
    scored and, on request, that no limit cut off."""
    mask, rows = batch["completion_mask"].values, batch["completion_ids"].row_index()
    keep = ~batch["rewards"].isnan()
    if mask_truncated_completions:
        keep &= torch.tensor([reason not in TRUNCATIONS for reason in batch["finish_reason"]], dtype=torch.bool)
    return mask & keep[rows]


@dataclass(frozen=True)
class LossSpec:
    """The terms of a policy loss. Nothing in it changes during a run; what does is in `MiniBatch`.

    policy_loss, kl, correction: records of algos. algorithm: the other keys of the loss, among them loss_type, how
    tokens are weighted (`algos.masked.token_weights`); max_completion_length: the fixed length that "dr_grpo" divides
    by. adapts_entropy: whether entropy_coef follows a target. The temperature is not here: samples carry theirs.
    """

    policy_loss: PolicyObjective
    kl: KLTerm
    correction: Correction
    algorithm: AlgorithmConfig
    max_completion_length: int
    adapts_entropy: bool

    @classmethod
    def of(cls, config: TrainerConfig) -> LossSpec:
        """Take the values from a resolved configuration."""
        adapts_entropy = isinstance(config.entropy, AdaptiveEntropyConfig)
        limit = config.rollout.max_completion_length
        return cls(config.policy_loss, config.kl, config.correction, config.algorithm, limit, adapts_entropy)

    @property
    def follows_advantages(self) -> bool:
        """Whether the loss leaves a sample alone whose advantages are all 0. The balance of experts, which a model may
        bring along, is not looked at."""
        others = (
            self.algorithm.entropy_coef,
            self.algorithm.positive_nll_coef,
            self.adapts_entropy,
            self.has_entropy_threshold,
        )
        return self.policy_loss.follows_advantages and isinstance(self.kl, NoKL) and not any(others)

    @property
    def beta(self) -> float:
        """The weight of the KL penalty in the loss at the start of a run, 0 without one."""
        return self.kl.beta if isinstance(self.kl, KLInLoss) else 0.0

    @property
    def is_exact_kl(self) -> bool:
        """Whether the KL in the loss is that of whole distributions."""
        return isinstance(self.kl, KLInLoss) and self.kl.kl_estimator == "exact"

    @property
    def reads_vocabulary(self) -> bool:
        """Whether ln p of the whole vocabulary is needed at every token."""
        return self.is_exact_kl or Needs.LOG_PROBS in self.policy_loss.needs

    @property
    def reads_routers(self) -> bool:
        """Whether the scores of the policy's routers are needed, before the update and in it."""
        return Needs.ROUTER_SCORES in self.policy_loss.needs

    @property
    def num_top(self) -> int:
        """How many of the old policy's best tokens are needed, 0 for none."""
        return int(self.policy_loss.num_top) if Needs.OLD_TOP in self.policy_loss.needs else 0  # type: ignore[attr-defined]

    @property
    def has_entropy_threshold(self) -> bool:
        """Whether only the tokens of the highest entropy are in the policy loss."""
        return self.algorithm.top_entropy_quantile < 1

    def mask(self, batch: Batch) -> Tensor:
        """Find the completion tokens in the loss, bool [M]."""
        return loss_mask(batch, mask_truncated_completions=self.algorithm.mask_truncated_completions)


class Counts(NamedTuple):
    """Denominators of a mini-batch over all ranks: tokens in the loss, trajectories that were scored, and tokens in the
    loss of those with a positive reward."""

    num_tokens: int = 0
    num_trajectories: int = 0
    num_positive_tokens: int = 0

    @classmethod
    def of(cls, batch: Batch, spec: LossSpec) -> Counts:
        """Count a rank's share of a mini-batch."""
        mask = spec.mask(batch)
        positive = mask & (batch["rewards"] > 0)[batch["completion_ids"].row_index()]
        scored = ~batch["rewards"][Trajectories.of(batch).first].isnan()
        return cls(int(mask.sum()), int(scored.sum()), int(positive.sum()))


@dataclass(frozen=True)
class MiniBatch:
    """Numbers of a mini-batch over all ranks that the losses of its micro-batches need.

    version: of the policy at the start of the training step. beta, entropy_coef: present weights of the KL penalty in
    the loss and of the entropy bonus. parameters: numbers learned besides the model, float64 [P]. least_entropy:
    float64 [], of a token in the policy loss, and expert_load: how often each expert is chosen; None if the micro-batch
    is the whole mini-batch.
    """

    counts: Counts
    version: int = 0
    beta: float = 0.0
    entropy_coef: float = 0.0
    parameters: Tensor | None = None
    least_entropy: Tensor | None = None
    expert_load: ExpertLoad | None = None

    @classmethod
    def of(cls, batch: Batch, spec: LossSpec, version: int = 0) -> MiniBatch:
        """Describe a mini-batch that is on this rank alone, with the weights that a run begins with."""
        return cls(Counts.of(batch, spec), version, spec.beta, spec.algorithm.entropy_coef)


@dataclass(frozen=True)
class SideModels:
    """What some losses read in addition to the policy: the reference, for a KL over the whole vocabulary; the policy's
    routers, for a loss of their scores; the balance of its experts, if that is part of the loss. record: of what the
    loss does with each token, if that is kept."""

    reference: CausalLM | None = None
    routers: Routers | None = None
    balance: LoadBalance | None = None
    record: TokenRecord | None = None
