"""Reward functions: how they are called in the background, ready-made ones, and judges."""

from __future__ import annotations

from typing import Any

from hybrid_rl.process.hooks import extra
from hybrid_rl.rewards.completions import completion_text
from hybrid_rl.rewards.engine_judge import EngineJudge
from hybrid_rl.rewards.entries import GivenReward, RewardList, RewardModelEntry, with_model_entries
from hybrid_rl.rewards.functions import RewardFunction, RewardInput, format_completion
from hybrid_rl.rewards.gym_reward import reasoning_gym_reward
from hybrid_rl.rewards.judge import LLMJudge
from hybrid_rl.rewards.judging import JudgeStyle
from hybrid_rl.rewards.marks import dense_reward, group_reward, shaping_reward
from hybrid_rl.rewards.results import (
    RewardFailure,
    RewardResult,
    check_failure_share,
    check_not_ended,
    format_failures,
)
from hybrid_rl.rewards.reward_runner import RewardRunner
from hybrid_rl.rewards.shaping import (
    cosine_reward,
    format_reward,
    kimi_length_reward,
    lcpo_exact,
    lcpo_max,
    overlong_penalty,
    tag_count_reward,
)
from hybrid_rl.rewards.state import TrainerState
from hybrid_rl.rewards.trl import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from hybrid_rl.rewards.verifiers import exact_match, gsm8k_reward, math_reward

__all__ = [
    "EngineJudge",
    "GivenReward",
    "JudgeStyle",
    "LLMJudge",
    "RewardFailure",
    "RewardFunction",
    "RewardInput",
    "RewardList",
    "RewardModelEntry",
    "RewardResult",
    "RewardRunner",
    "TrainerState",
    "accuracy_reward",
    "check_failure_share",
    "check_not_ended",
    "code_reward",
    "completion_text",
    "cosine_reward",
    "dense_reward",
    "exact_match",
    "format_completion",
    "format_failures",
    "format_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "group_reward",
    "gsm8k_reward",
    "kimi_length_reward",
    "lcpo_exact",
    "lcpo_max",
    "math_reward",
    "overlong_penalty",
    "reasoning_accuracy_reward",
    "reasoning_gym_reward",
    "shaping_reward",
    "tag_count_reward",
    "think_format_reward",
    "with_model_entries",
]


def __getattr__(name: str) -> Any:
    if name == "code_reward":  # an extra
        return extra(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
