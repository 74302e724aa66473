"""On-policy distillation: a teacher's opinion of every token that the policy made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.grpo import group_relative_advantages
from hybrid_rl.algos.columns import check_columns
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.options import key


@dataclass(frozen=True)
class Distillation(AdvantageEstimator):
    """Minus the reverse KL to a teacher at each token, on request with group-relative advantages of rewards besides."""

    estimator: Literal["distillation"] = key("distillation", "the advantage estimator")
    teacher_path: str | None = key(None, "the teacher: Hugging Face name or local folder, of the policy's tokenizer")
    group_advantage_coef: float = key(
        0.0,
        "weight of the group-relative advantages of rewards (GRPO's) beside the teacher's; 0 = no rewards",
        minimum=0,
    )
    needs = frozenset({"logprobs", "teacher_logprobs"})
    needs_rewards = takes_kl_rewards = False
    tells_tokens_apart = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_advantage_coef > 0:
            object.__setattr__(self, "needs_rewards", True)
            object.__setattr__(self, "takes_kl_rewards", True)
            object.__setattr__(self, "min_generations", 2)

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator. Samples without a reward learn from the teacher all the same."""
        advantages = reverse_kl_advantages(inputs.needed("logprobs"), inputs.needed("teacher_logprobs"), inputs.mask)
        if self.group_advantage_coef > 0:
            relative = group_relative_advantages(inputs.rewards, inputs.groups)
            advantages = advantages + self.group_advantage_coef * inputs.per_token(relative)
        return Advantages(advantages)


def reverse_kl_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """A_t = ln teacher - ln policy of the sampled token: minus the one-sample estimate of KL(policy || teacher) there.

    On-policy distillation, arXiv:2306.13649 with reverse KL; as an advantage with discount 0, each token answering for
    its own divergence only, Thinking Machines, On-Policy Distillation, 2025. With REINFORCE's loss and samples of the
    policy the expected gradient is that of KL(policy || teacher) at the states that the policy visits.

    logprobs: float [T], of the policy at the start of the training step; teacher_logprobs: float [T], of the same
    tokens; mask: bool [T]. Returns float64 [T], 0 where masked.
    """
    check_columns(logprobs=logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    return torch.where(mask, teacher_logprobs.double() - logprobs.double(), 0.0)
