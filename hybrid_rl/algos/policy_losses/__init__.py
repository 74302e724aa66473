"""Policy losses per token: one file per family. Aggregation is a matter of token weights (masked.py)."""

from hybrid_rl.algos.policy_losses.cispo import CISPO, cispo_policy_loss
from hybrid_rl.algos.policy_losses.clip import Clip, clipped_policy_loss
from hybrid_rl.algos.policy_losses.covariance import ClipCov, KLCov
from hybrid_rl.algos.policy_losses.decoupled import A3PO, Decoupled, decoupled_policy_loss, log_linear_proximal
from hybrid_rl.algos.policy_losses.dppo import DPPO
from hybrid_rl.algos.policy_losses.gmpo import GMPO, geometric_mean_policy_loss
from hybrid_rl.algos.policy_losses.lambda_grpo import LambdaGRPO, length_bases, length_weights
from hybrid_rl.algos.policy_losses.reinforce import Reinforce, reinforce_policy_loss
from hybrid_rl.algos.policy_losses.rspo import RSPO, router_shift_policy_loss, router_shift_ratio
from hybrid_rl.algos.policy_losses.sapo import SAPO, soft_gated_policy_loss
from hybrid_rl.algos.policy_losses.simko import SimKO
from hybrid_rl.algos.policy_losses.vespo import VESPO, gamma_kernel_policy_loss

OBJECTIVES = (Clip, Decoupled, A3PO, CISPO, SAPO, GMPO, RSPO, Reinforce, VESPO, LambdaGRPO, DPPO, ClipCov, KLCov, SimKO)

__all__ = [
    "A3PO",
    "CISPO",
    "DPPO",
    "GMPO",
    "OBJECTIVES",
    "RSPO",
    "SAPO",
    "VESPO",
    "Clip",
    "ClipCov",
    "Decoupled",
    "KLCov",
    "LambdaGRPO",
    "Reinforce",
    "SimKO",
    "cispo_policy_loss",
    "clipped_policy_loss",
    "decoupled_policy_loss",
    "gamma_kernel_policy_loss",
    "geometric_mean_policy_loss",
    "length_bases",
    "length_weights",
    "log_linear_proximal",
    "reinforce_policy_loss",
    "router_shift_policy_loss",
    "router_shift_ratio",
    "soft_gated_policy_loss",
]
