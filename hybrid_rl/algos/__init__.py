"""Algorithms as pure functions over tensors, and the records that bind them to options. Needs torch alone."""

from hybrid_rl.algos.advantages import GRPO, group_has_signal, group_relative_advantages
from hybrid_rl.algos.correction import Correction, CorrectionInputs
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages, LossInputs, PolicyLoss, WholeMiniBatch
from hybrid_rl.algos.kl import kl_estimate
from hybrid_rl.algos.kl_terms import KLInLoss, KLInReward, KLTerm
from hybrid_rl.algos.masked import row_mean, row_sum, token_weights
from hybrid_rl.algos.policy_losses import Clip, clipped_policy_loss
from hybrid_rl.algos.records import AdvantageEstimator, PolicyObjective
from hybrid_rl.algos.registry import ADVANTAGES, CORRECTIONS, KL_TERMS, POLICY_LOSSES, register

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "GRPO",
    "KL_TERMS",
    "POLICY_LOSSES",
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "Clip",
    "Correction",
    "CorrectionInputs",
    "KLInLoss",
    "KLInReward",
    "KLTerm",
    "LossInputs",
    "PolicyLoss",
    "PolicyObjective",
    "WholeMiniBatch",
    "clipped_policy_loss",
    "group_has_signal",
    "group_relative_advantages",
    "kl_estimate",
    "register",
    "row_mean",
    "row_sum",
    "token_weights",
]
