"""Lambda-GRPO: a learned preference for long or short completions of a group."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.advantages.group_rewards import Groups
from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, WholeMiniBatch, own, register
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.options import key
from hybrid_rl.algos.policy_losses.clip import ClipRange

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class LambdaGRPO(ClipRange):
    """Lambda-GRPO: f times the clipped surrogate, `f = n exp(h^lambda) / sum over the group of exp(h^lambda)`, h = 1 +
    scale * z(length), with one learned exponent lambda.

    arXiv:2510.06870. Lambda begins at 0, where all weights are 1 (DAPO with `loss_type=dapo`, as in the paper), and is
    learned by Adam. z is standardised with the standard deviation of the population, within groups of at least 2.
    """

    objective: Literal["lambda_grpo"] = key("lambda_grpo", "the policy loss")
    lambda_length_scale: float = own(1 / 9, "what one standard deviation of length adds to the base, 1", above=0)
    lambda_learning_rate: float = own(
        1e-3, "learning rate of the exponent, which Adam learns in addition to the model", minimum=0
    )
    initial_parameters = (0.0,)
    min_generations = 2

    @property
    def parameter_learning_rate(self) -> float:
        """The learning rate of lambda."""
        return self.lambda_learning_rate

    def prepare(self, whole: WholeMiniBatch) -> Tensor:
        """Compute the bases of each token's group, as `length_bases` has them."""
        return length_bases(whole.mask, whole.rows, whole.num_rows, whole.groups, length_scale=self.lambda_length_scale)

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the clipped surrogate times the weight of the token's completion."""
        advantages, ratio = inputs.kept(inputs.advantages.detach()), ratio_of(inputs.log_ratio)
        per_token = -torch.minimum(ratio * advantages, ratio.clamp(*self.bounds) * advantages)
        parameters = inputs.needed("parameters")
        weights = length_weights(inputs.needed("prepared"), parameters).to(per_token.dtype)
        exponent = parameters.detach().to(weights.dtype).expand_as(weights)
        metrics = {"lambda_grpo/length_weight": weights.detach(), "lambda_grpo/lambda": exponent}
        return dataclasses.replace(self.noted(weights * per_token, ratio, advantages), metrics=metrics)


def length_bases(mask: Tensor, rows: Tensor, num_rows: int, groups: Tensor, *, length_scale: float) -> Tensor:
    """Compute h = 1 + length_scale * z of each token's completion, and of all completions of its group.

    arXiv:2510.06870: z is the completion's number of tokens in the loss, standardised within its group. The standard
    deviation is that of the population; z is 0 if all lengths of a group are equal and in a group of one.
    Completions without a token in the loss do not count in their group. The exponent of an optimizer step is known only
    when the loss is computed, hence the whole group at every token.

    mask: bool [T]; rows: int64 [T], in 0..num_rows-1; groups: int64 [num_rows]. Result: float64 [T, 1 + G], the token's
    own h, then the ascending h of its group, NaN after the last; G is the size of the largest group, its completions
    without a token counted too: the mini-batches of a step share one column. Raises ValueError if some h is not
    above 0, as a power of it needs; in groups of at most 1 / length_scale^2 that cannot be.
    """
    if mask.dim() != 1 or mask.shape != rows.shape or groups.shape != (num_rows,):
        raise ValueError(
            f"mask and rows must be [T] and groups [num_rows={num_rows}], not {tuple(mask.shape)}, {tuple(rows.shape)} "
            f"and {tuple(groups.shape)}"
        )
    lengths = row_sum(mask.double(), rows, num_rows)
    grouping = Groups.of(torch.where(lengths > 0, lengths, torch.nan), groups)
    std = grouping.mean(grouping.centred**2).sqrt()[grouping.index]
    bases = 1 + length_scale * torch.where(grouping.compared, grouping.centred / std, 0.0)
    if bool((bases <= 0).any()):
        raise ValueError(
            f"lambda_length_scale={length_scale:.4g} is too large: a completion is "
            f"{float((1 - bases.min()) / length_scale):.4g} standard deviations shorter than its group, so that "
            "its base is 0 or less; use a smaller one"
        )
    width = int(torch.bincount(grouping.index).max()) if num_rows else 1
    table = lengths.new_full((len(grouping.counts), width), torch.nan)
    table[grouping.counts == 0, 0] = 1.0  # for groups without tokens; finite, so that its gradient is 0 and not NaN
    order, starts = grouping.ranking(bases)
    group = grouping.index[order]
    table[group, torch.arange(len(order), device=mask.device) - starts[group]] = bases[order]
    return torch.cat([bases[:, None], table[grouping.index]], 1)[rows]


def length_weights(bases: Tensor, exponent: Tensor) -> Tensor:
    """Compute f = G * exp(h^lambda) / (sum over the group of exp(h^lambda)), the weight of each token's completion.

    arXiv:2510.06870. The mean of f over the completions of a group is 1. bases: float64 [T, 1 + G], from
    `length_bases`; exponent: float64 [1], lambda, with gradient. Result float64 [T].
    """
    if bases.dim() != 2 or exponent.shape != (1,):
        raise ValueError(
            f"bases must be [T, 1 + G] and exponent [1], not {tuple(bases.shape)} and {tuple(exponent.shape)}"
        )
    group = bases[:, 1:]
    present = ~group.isnan()
    powers = torch.where(present, torch.where(present, group, 1.0) ** exponent, -torch.inf)
    return (bases[:, 0] ** exponent + present.sum(1).double().log() - powers.logsumexp(1)).exp()
