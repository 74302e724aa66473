"""On-policy distillation: a teacher's opinion of every token that the policy made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_rl.algos.advantages.grpo import group_relative_advantages
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages, Needs, register
from hybrid_rl.options import key


@register
@dataclass(frozen=True)
class Distillation(AdvantageEstimator):
    """On-policy distillation: `ln p_teacher - ln p_old` of the sampled token, minus the one-sample estimate of KL(p,
    p_teacher) there, + coef * GRPO's advantage on request.

    arXiv:2306.13649 with reverse KL; as an advantage with discount 0, each token answering for its own divergence only:
    Thinking Machines, On-Policy Distillation, 2025. With REINFORCE's loss and samples of the policy the expected
    gradient is that of KL(policy, teacher) at the states that the policy visits. Samples without a reward learn from
    the teacher all the same. The teacher has the policy's vocabulary.
    """

    estimator: Literal["distillation"] = key("distillation", "the advantage estimator")
    teacher_path: str | None = key(None, "the teacher: Hugging Face name or local folder, of the policy's tokenizer")
    group_advantage_coef: float = key(
        0.0,
        "weight of the group-relative advantages of rewards (GRPO's) beside the teacher's; 0 = no rewards",
        minimum=0,
    )
    needs = frozenset({Needs.LOGPROBS, Needs.TEACHER_LOGPROBS})
    tells_tokens_apart = True

    @property
    def needs_rewards(self) -> bool:
        """True for the sum with GRPO's advantage."""
        return self.group_advantage_coef > 0

    @property
    def takes_kl_rewards(self) -> bool:
        """True for the sum with GRPO's advantage."""
        return self.needs_rewards

    @property
    def min_generations(self) -> int:
        """Two for the sum with GRPO's advantage."""
        return 2 if self.needs_rewards else 1

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Differences of logprobs, and on request GRPO's advantages."""
        logprobs, teacher = inputs.needed("logprobs"), inputs.needed("teacher_logprobs")
        advantages = torch.where(inputs.mask, teacher.double() - logprobs.double(), 0.0)
        if self.needs_rewards:
            relative = group_relative_advantages(inputs.rewards, inputs.groups)
            advantages = advantages + self.group_advantage_coef * inputs.per_token(relative)
        return Advantages(advantages)
