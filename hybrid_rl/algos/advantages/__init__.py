"""From rewards to advantages: one file per family of estimators."""

from hybrid_rl.algos.advantages.baselines import (
    GPG,
    OPO,
    RLOO,
    MaxRL,
    ReMax,
    gpg_advantages,
    greedy_baseline_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    maxrl_advantages,
)
from hybrid_rl.algos.advantages.distillation import Distillation, reverse_kl_advantages
from hybrid_rl.algos.advantages.gae import GAE, VAPO, generalized_advantages, length_adaptive_lambda
from hybrid_rl.algos.advantages.groups import STD_FLOOR, Groups, group_has_signal
from hybrid_rl.algos.advantages.grpo import GRPO, group_relative_advantages, process_advantages
from hybrid_rl.algos.advantages.optimal_token import OptimalTokenBaseline, optimal_token_advantages
from hybrid_rl.algos.advantages.pass_at_k import MaxOfGroup, PassAtK, max_of_group_advantages, pass_at_k_advantages
from hybrid_rl.algos.advantages.reinforce import (
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    centred_rewards,
    returns_to_go,
)
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.advantages.supervised import SFT, Rejection, accepted_samples
from hybrid_rl.algos.advantages.vtrace import VTrace, vtrace
from hybrid_rl.algos.advantages.whitening import whitened

ESTIMATORS = (
    GRPO,
    RLOO,
    GPG,
    MaxRL,
    OPO,
    ReMax,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    OptimalTokenBaseline,
    PassAtK,
    MaxOfGroup,
    GAE,
    VAPO,
    VTrace,
    Distillation,
    Rejection,
    SFT,
)

__all__ = [
    "ESTIMATORS",
    "GAE",
    "GPG",
    "GRPO",
    "OPO",
    "RLOO",
    "SFT",
    "STD_FLOOR",
    "VAPO",
    "Distillation",
    "Groups",
    "MaxOfGroup",
    "MaxRL",
    "OptimalTokenBaseline",
    "PassAtK",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Rejection",
    "Steps",
    "VTrace",
    "accepted_samples",
    "centred_rewards",
    "generalized_advantages",
    "gpg_advantages",
    "greedy_baseline_advantages",
    "group_has_signal",
    "group_relative_advantages",
    "leave_one_out_advantages",
    "length_adaptive_lambda",
    "length_weighted_advantages",
    "max_of_group_advantages",
    "maxrl_advantages",
    "optimal_token_advantages",
    "pass_at_k_advantages",
    "process_advantages",
    "returns_to_go",
    "reverse_kl_advantages",
    "step_rewards",
    "vtrace",
    "whitened",
]
