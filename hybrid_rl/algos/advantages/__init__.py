"""From rewards to advantages: one file per family of estimators."""

# ruff: noqa: F401
from hybrid_rl.algos.advantages.grpo import GRPO, group_relative_advantages

# The default is registered first.
# isort: split

from hybrid_rl.algos.advantages.baselines import (
    GPG,
    OPO,
    RLOO,
    MaxRL,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from hybrid_rl.algos.advantages.critics import GAE, VAPO, VTrace, generalized_advantages, length_adaptive_lambda
from hybrid_rl.algos.advantages.group_rewards import STD_FLOOR, GroupEstimator, Groups, group_has_signal, whitened
from hybrid_rl.algos.advantages.imitation import SFT, Distillation, Rejection
from hybrid_rl.algos.advantages.pass_at_k import MaxOfGroup, PassAtK
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
