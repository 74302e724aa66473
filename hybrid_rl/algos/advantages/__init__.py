"""From rewards to advantages: one file per family of estimators."""

# ruff: noqa: F401
from hybrid_rl.algos.advantages.grpo import GRPO, group_relative_advantages

# The default is registered first.
# isort: split

from hybrid_rl.algos.advantages.baselines import GPG, OPO, RLOO, MaxRL, ReMax
from hybrid_rl.algos.advantages.distillation import Distillation
from hybrid_rl.algos.advantages.gae import GAE, VAPO, generalized_advantages, length_adaptive_lambda
from hybrid_rl.algos.advantages.groups import STD_FLOOR, GroupEstimator, Groups, group_has_signal
from hybrid_rl.algos.advantages.optimal_token import OptimalTokenBaseline
from hybrid_rl.algos.advantages.pass_at_k import MaxOfGroup, PassAtK
from hybrid_rl.algos.advantages.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.advantages.supervised import SFT, Rejection
from hybrid_rl.algos.advantages.vtrace import VTrace
from hybrid_rl.algos.advantages.whitening import whitened
