"""Algorithms as pure functions over tensors."""

from hybrid_rl.algos.advantages import group_has_signal, group_relative_advantages
from hybrid_rl.algos.kl import kl_estimate
from hybrid_rl.algos.masked import row_mean, row_sum, token_weights
from hybrid_rl.algos.policy_losses import PolicyLoss, clipped_policy_loss
from hybrid_rl.algos.registry import ALGORITHMS, Algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "PolicyLoss",
    "clipped_policy_loss",
    "group_has_signal",
    "group_relative_advantages",
    "kl_estimate",
    "row_mean",
    "row_sum",
    "token_weights",
]
