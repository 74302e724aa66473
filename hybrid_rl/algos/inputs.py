"""What advantage estimators and policy losses are given, and what they give back: tensors, named once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_ascending, check_columns, check_rewards, masked_log_ratio


def alone(value: Any) -> list[Any]:
    """`gather` of one rank."""
    return [value]


_PER_SAMPLE = ("rewards", "baseline_rewards")
_PER_TOKEN = (
    *("rows", "mask", "token_rewards", "rollout_logprobs", "logprobs"),
    *("ref_logprobs", "teacher_logprobs", "values", "sum_pi_squared"),
)


@dataclass(frozen=True)
class AdvantageInputs:
    """The samples of one rank, whole groups, N samples with T completion tokens, sample after sample.

    rewards: float64 [N], the total of a sample, NaN where it could not be scored. token_rewards: float64 [T], the part
    of it that belongs to single tokens (dense rewards, KL penalties), 0 elsewhere: what is left of `rewards` belongs to
    the whole completion. groups: int64 [N]. rows: int64 [T], ascending, the sample of each token. mask: bool [T], True
    where the policy made the token. The other columns are there where an estimator's `needs` asks for them:
    logprobs (of the learner, at the start of the training step), rollout_logprobs, ref_logprobs, teacher_logprobs,
    values, sum_pi_squared (sum over the vocabulary of p^2): float64 [T]; baseline_rewards: float64 [N], NaN where it
    could not be scored; function_rewards: float64 [N, K], of each of K reward functions before they are weighed, NaN
    where one says nothing, and reward_weights: float64 [K]. gather: the same call on every rank gives the values of all
    ranks, in order; rank: this one's place there.

    Raises ValueError for columns of other shapes, a mask that is not bool, rows that do not ascend within 0..N-1, and
    infinite rewards.
    """

    rewards: Tensor
    groups: Tensor
    rows: Tensor
    mask: Tensor
    token_rewards: Tensor
    rollout_logprobs: Tensor | None = None
    logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    baseline_rewards: Tensor | None = None
    function_rewards: Tensor | None = None
    reward_weights: Tensor | None = None
    gather: Callable[[Any], list[Any]] = alone
    rank: int = 0

    def __post_init__(self) -> None:
        check_rewards(**{name: column for name in _PER_SAMPLE if (column := getattr(self, name)) is not None})
        if self.groups.shape != self.rewards.shape:
            raise ValueError(f"groups must be [{len(self.rewards)}] as rewards, not {tuple(self.groups.shape)}")
        check_columns(**{name: column for name in _PER_TOKEN if (column := getattr(self, name)) is not None})
        check_ascending(self.rows, len(self.rewards))

    def needed(self, name: str) -> Tensor:
        """A column that is not always there. Raises ValueError where it is missing."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ValueError(
                f"the column {name} is None, but this estimator cannot do without it; give AdvantageInputs(..., "
                f"{name}=...), or name it in the estimator's `needs`, which brings it in a run"
            )
        return column

    @property
    def scored(self) -> Tensor:
        """bool [N]: samples that have a reward."""
        return ~self.rewards.isnan()

    def per_token(self, per_sample: Tensor) -> Tensor:
        """A number of each sample, [N], at each of its tokens that the policy made, 0 elsewhere: float64 [T]."""
        spread = per_sample.double()[self.rows]
        return torch.where(self.mask, spread, torch.zeros_like(spread))


@dataclass(frozen=True)
class Advantages:
    """advantages: float64 [T], 0 where masked or not scored. returns: float64 [T], targets of the critic, where the
    estimator makes them; None elsewhere."""

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch of whole samples: T completion tokens of `num_rows` samples.

    logprobs: float [T], with gradient. old_logprobs: float [T], of the policy that ratios compare with; without one of
    its own the detached logprobs themselves. rollout_logprobs: float [T], of the engine that sampled. advantages: float
    [T]. mask: bool [T], tokens in the loss. rows: int64 [T], the sample of each token, in 0..num_rows-1. entropy: float
    [T], with gradient. token_versions: int64 [T], policy version behind each token, -1 where unknown; version: of the
    learner at the start of the training step; newest_version: the largest of token_versions, None if it is not known
    (looking it up would wait for the device). prepared: [T, ...], what `PolicyObjective.prepare` gave for these tokens.
    Where `needs` asks for them: log_probs, float [T, V] with gradient, of the whole vocabulary; old_top_ids int64 and
    old_top_logprobs float [T, K], the K best tokens of the old policy; router_logprobs and old_router_logprobs, float
    [T, L, K], detached, of the K experts that the old policy's router chose in each of L layers; parameters: float64
    [P], learned beside the model, with gradient. All lie on one device.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    rows: Tensor
    num_rows: int
    entropy: Tensor
    rollout_logprobs: Tensor
    token_versions: Tensor | None = None
    version: int = 0
    newest_version: int | None = None
    prepared: Tensor | None = None
    log_probs: Tensor | None = None
    token_ids: Tensor | None = None
    old_top_ids: Tensor | None = None
    old_top_logprobs: Tensor | None = None
    router_logprobs: Tensor | None = None
    old_router_logprobs: Tensor | None = None
    parameters: Tensor | None = None

    def __post_init__(self) -> None:
        names = ("logprobs", "old_logprobs", "advantages", "mask", "rows", "entropy", "rollout_logprobs")
        check_columns(**{name: getattr(self, name) for name in names})

    @property
    def log_ratio(self) -> Tensor:
        """ln of policy / old policy, [T] with gradient, 0 where masked: see `columns.masked_log_ratio`. Take
        `columns.ratio_of` of it rather than exp, which overflows."""
        return masked_log_ratio(self.logprobs, self.old_logprobs, self.mask)


@dataclass(frozen=True)
class WholeMiniBatch:
    """All samples of a mini-batch over all ranks, what `PolicyObjective.prepare` sees: detached, [T] each.

    old_logprobs, advantages: float; mask: bool; rows: int64, ascending; groups: int64 [N]; num_rows = N. seed: the same
    on all ranks, another one for every mini-batch of a run.
    """

    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    rows: Tensor
    num_rows: int
    groups: Tensor
    seed: int


@dataclass(frozen=True)
class PolicyLoss:
    """per_token: float [T], the loss before weighting. weight: float [T], policy / old at the level of the loss (token
    or sequence), with its gradient; ratio: the same, detached. clipped_low, clipped_high: bool [T], tokens whose
    gradient the objective stopped. per_sample: all tokens of a sample share one ratio, so that shares of what was
    clipped count samples. metrics: further numbers, float [T] each, whose mean over the tokens in the loss is logged.
    """

    per_token: Tensor
    weight: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    per_sample: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def unclipped(cls, per_token: Tensor, weight: Tensor, metrics: Mapping[str, Tensor] | None = None) -> PolicyLoss:
        """The loss of an objective that stops no gradient. per_token, weight: float [T]."""
        nothing = torch.zeros_like(per_token, dtype=torch.bool)
        return cls(per_token, weight, weight.detach(), nothing, nothing, metrics=dict(metrics or {}))
