"""RSPO: ratios of mixture-of-experts models, trusted less where the router has moved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hybrid_rl.algos.inputs import LossInputs, PolicyLoss
from hybrid_rl.algos.policy_losses.gmpo import geometric_mean_policy_loss
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.options import key


@dataclass(frozen=True)
class RSPO(PolicyObjective):
    """Router-shift policy optimisation (arXiv:2510.23027), with GMPO's bounds: its objective is GMPO's times the shift.
    A floor of 0.8 is that of a public implementation which follows the paper's equations (5) to (11).

    Scores are those of the trainer's model, at the start of the training step and now, for the experts that it chose
    then; their shift is 1 in the first update of a step.
    """

    objective: Literal["rspo"] = key("rspo", "the policy loss")
    epsilon: float = key(0.4, "clip of the log ratio below 0", above=0)
    epsilon_high: float | None = key(None, "clip of the log ratio above 0; None = epsilon", above=0)
    router_shift_floor: float = key(
        0.8, "least factor of the ratio where the routers of a token have moved (gamma_min)", above=0, maximum=1
    )
    needs = frozenset({"router_scores"})
    is_per_completion = True

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        now, then = inputs.router_logprobs, inputs.old_router_logprobs
        if now is None or then is None:
            raise ValueError("objective=rspo needs router_logprobs and old_router_logprobs; record the routers")
        shift = router_shift_ratio(now, then, floor=self.router_shift_floor).to(inputs.logprobs.dtype)
        loss = router_shift_policy_loss(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            inputs.mask,
            inputs.rows,
            inputs.num_rows,
            shift,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
        )
        return dataclasses.replace(loss, metrics={"router_shift/mean": shift})


def router_shift_ratio(router_logprobs: Tensor, old_router_logprobs: Tensor, *, floor: float) -> Tensor:
    """max(floor, exp(-mean over layers and experts of |ln r - ln r_old|)): how far a token's routing moved, detached.

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


def router_shift_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    shift: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
) -> PolicyLoss:
    """GMPO's loss with the ratio of each token times `shift`, before the clip and the mean (arXiv:2510.23027, v2).

    shift: float [T], from `router_shift_ratio`, a constant. Accounts of the first version multiply after the clip,
    which enlarges the loss of completions with a negative advantage; the second one multiplies before it, as done here.
    The other arguments are those of `geometric_mean_policy_loss`.
    """
    return geometric_mean_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        rows,
        num_rows,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        log_shift=shift.detach().log(),
    )
