"""Algorithms: records with their options, equations and needs, and the functions on tensors that they share. Needs
torch only."""

from hybrid_rl.algos.advantages import GRPO, GroupEstimator, group_has_signal, group_relative_advantages
from hybrid_rl.algos.correction import Corrected, Correction, CorrectionInputs
from hybrid_rl.algos.interface import (
    ADVANTAGES,
    CORRECTIONS,
    KL_TERMS,
    POLICY_LOSSES,
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    KLTerm,
    LossInputs,
    Needs,
    PolicyLoss,
    PolicyObjective,
    WholeMiniBatch,
    register,
)
from hybrid_rl.algos.kl import KLInLoss, KLInReward, kl_estimate
from hybrid_rl.algos.masked import row_mean, row_sum, token_weights
from hybrid_rl.algos.policy_losses import Clip, ClipRange

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
    "ClipRange",
    "Corrected",
    "Correction",
    "CorrectionInputs",
    "GroupEstimator",
    "KLInLoss",
    "KLInReward",
    "KLTerm",
    "LossInputs",
    "Needs",
    "PolicyLoss",
    "PolicyObjective",
    "WholeMiniBatch",
    "group_has_signal",
    "group_relative_advantages",
    "kl_estimate",
    "register",
    "row_mean",
    "row_sum",
    "token_weights",
]
