"""Policy losses per token: one file per family. How tokens are weighted against each other is in masked.py."""

# ruff: noqa: F401
from hybrid_rl.algos.policy_losses.clip import SAPO, Clip, ClipRange, at_level

# The default is registered first.
# isort: split

from hybrid_rl.algos.policy_losses.covariance import ClipCov, KLCov
from hybrid_rl.algos.policy_losses.decoupled import A3PO, Decoupled
from hybrid_rl.algos.policy_losses.dppo import DPPO
from hybrid_rl.algos.policy_losses.gmpo import GMPO, RSPO
from hybrid_rl.algos.policy_losses.lambda_grpo import LambdaGRPO
from hybrid_rl.algos.policy_losses.likelihood import CISPO, VESPO, Reinforce
from hybrid_rl.algos.policy_losses.simko import SimKO
