"""GMPO: the geometric mean of clipped token ratios, and RSPO, which trusts them less if the router has moved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, Needs, PolicyLoss, own, register
from hybrid_rl.algos.masked import row_mean, take
from hybrid_rl.algos.options import key
from hybrid_rl.algos.policy_losses.clip import ClipRange

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GeometricMean(ClipRange):
    """Base of the losses of a completion's geometric mean, with GMPO's bounds."""

    epsilon: float = key(0.4, "clip of the log ratio below 0", above=0)
    epsilon_high: float | None = key(None, "clip of the log ratio above 0; None = epsilon", above=0)
    is_per_completion = True

    def geometric_mean(self, inputs: LossInputs, log_ratio: Tensor) -> PolicyLoss:
        """Compute GMPO's loss with this log ratio, float [T], 0 where masked. `weight` is the mean of the unclipped
        ratios."""
        advantages = inputs.kept(inputs.advantages.detach())
        low, high = -self.epsilon, self.high
        clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
        mean, weight = (
            ratio_of(take(row_mean(values, inputs.mask, inputs.rows, inputs.num_rows), inputs.rows))
            for values in (clipped, log_ratio)
        )
        detached = log_ratio.detach()
        return PolicyLoss(
            per_token=-advantages * mean,
            weight=weight,
            ratio=weight.detach(),
            clipped_low=(detached < low) & (advantages < 0),
            clipped_high=(detached > high) & (advantages > 0),
        )


@register
@dataclass(frozen=True)
class GMPO(GeometricMean):
    """Geometric-mean policy optimisation: `-A exp(mean over the completion's tokens of the clipped log ratio)`.

    arXiv:2507.20673, with the paper's bounds (e^-0.4, e^0.4): tokens are clipped one by one and on one side, min(ln w,
    epsilon_high) if A > 0 and max(ln w, -epsilon) otherwise. Every token has the value of its completion, so that the
    token mean of a completion (`loss_type=grpo`) is the paper's. If advantages differ between the tokens of a
    completion, which the paper does not have, each token is clipped by its own sign and has its own A in the value; in
    the gradient each gets the mean of all of them.
    """

    objective: Literal["gmpo"] = key("gmpo", "the policy loss")
    follows_advantages = True

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the geometric mean of the ratios to the old policy."""
        return self.geometric_mean(inputs, inputs.log_ratio)


@register
@dataclass(frozen=True)
class RSPO(GeometricMean):
    """Router-shift policy optimisation: GMPO with `w max(floor, exp(-mean over layers and experts of abs(ln r - ln
    r_old)))` in the place of w, r the router's scores.

    arXiv:2510.23027 v2, with GMPO's bounds. A floor of 0.8 is that of a public implementation which follows the paper's
    equations (5) to (11). Accounts of v1 multiply after the clip, which enlarges the loss of completions with a
    negative advantage; v2 multiplies before it, as done here. Scores are those of the trainer's model, not of the
    engine's, at the start of the training step and now, for the experts that it chose then; their shift is 1 in the
    first update of a step.
    """

    objective: Literal["rspo"] = key("rspo", "the policy loss")
    follows_advantages = True
    router_shift_floor: float = own(
        0.8, "least factor of the ratio if the routers of a token have moved (gamma_min)", above=0, maximum=1
    )
    needs = frozenset({Needs.ROUTER_SCORES})

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute GMPO's loss with shifted ratios."""
        now, then = inputs.needed("router_logprobs"), inputs.needed("old_router_logprobs")
        shift = router_shift_ratio(now, then, floor=self.router_shift_floor).to(inputs.logprobs.dtype)
        loss = self.geometric_mean(inputs, inputs.log_ratio + inputs.kept(shift.log()))
        return dataclasses.replace(loss, metrics={"router_shift/mean": shift})


def router_shift_ratio(router_logprobs: Tensor, old_router_logprobs: Tensor, *, floor: float) -> Tensor:
    """Compute max(floor, exp(-mean over layers and experts of |ln r - ln r_old|)): how far a token's routing moved,
    detached.

    arXiv:2510.23027. router_logprobs, old_router_logprobs: float [T, L, K], ln of the router's scores in each of L
    layers for the K experts that the old policy activated. Result [T], in [floor, 1]; 1 = as it was. floor: in (0, 1].
    """
    shape = tuple(router_logprobs.shape)
    if len(shape) != 3 or shape != tuple(old_router_logprobs.shape):
        raise ValueError(
            f"router_logprobs and old_router_logprobs must both be [T, L, K], tokens by layers by experts, not {shape} "
            f"and {tuple(old_router_logprobs.shape)}"
        )
    if not 0 < floor <= 1:
        raise ValueError(f"floor={floor} must be above 0 and at most 1: it bounds a ratio whose logarithm is taken")
    moved = (router_logprobs.detach() - old_router_logprobs.detach()).abs()
    return (-moved.mean((1, 2))).exp().clamp(min=floor)
