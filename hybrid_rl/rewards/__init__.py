"""Rewards: the calling convention for users' functions, their background runner, ready-made verifiers."""

from hybrid_rl.rewards.functions import RewardFunction, RewardInput, format_completion, resolve_functions
from hybrid_rl.rewards.results import RewardFailure, RewardResult, check_failure_share, format_failures
from hybrid_rl.rewards.runner import RewardRunner
from hybrid_rl.rewards.state import TrainerState
from hybrid_rl.rewards.verifiers import completion_text, exact_match

__all__ = [
    "RewardFailure",
    "RewardFunction",
    "RewardInput",
    "RewardResult",
    "RewardRunner",
    "TrainerState",
    "check_failure_share",
    "completion_text",
    "exact_match",
    "format_completion",
    "format_failures",
    "resolve_functions",
]
