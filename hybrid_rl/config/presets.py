"""Algorithms by the names of their papers: which records they choose, and the papers' values if they differ from
the defaults.

What a paper says about data, lengths, learning rates and numbers of mini-batches is not part of an algorithm and is
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Preset:
    """title and source of a paper; settings: by the names of sections and keys. What a user gives overrides them."""

    title: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)


# REINFORCE over completions as wholes: ln p of a completion is the sum over its tokens, however many there are.
_BANDIT = {"policy_loss": "reinforce", "loss_type": "sequence_sum"}
# The mean over completions of token means, as in GRPO's paper; the default is the mean over all tokens.
_PER_COMPLETION = {"loss_type": "grpo"}
_CLIP_HIGHER = {"epsilon": 0.2, "epsilon_high": 0.28}

_PRESETS = {
    # The defaults, which are TRL's. The paper has loss_type=grpo, beta=0.04 and num_generations=64.
    "grpo": Preset("Group Relative Policy Optimization", "arXiv:2402.03300"),
    # With a critic.
    "ppo": Preset(
        "Proximal Policy Optimization with a critic, as in InstructGPT",
        "arXiv:1707.06347, arXiv:2203.02155",
        {
            "advantage": "gae",
            "epsilon": 0.2,
            "cliprange_value": 0.2,
            "num_generations": 1,
            "kl": "reward",
            "beta": 0.02,
        },
    ),
    "vapo": Preset(
        "Value-model-based Augmented PPO",
        "arXiv:2504.05118",
        {
            "advantage": "vapo",
            "lam_critic": 1.0,
            "length_adaptive_alpha": 0.05,
            **_CLIP_HIGHER,
            "loss_type": "dapo",
            "num_generations": 16,
            "positive_nll_coef": 0.1,
            "critic_learning_rate": 2e-6,
            "critic_warmup_steps": 50,
        },
    ),
    "impala": Preset(
        "IMPALA: V-trace for samples of an older policy",
        "arXiv:1802.01561",
        {"advantage": "vtrace", "rho_clip": 1.0, "c_clip": 1.0, "policy_loss": "reinforce", "num_generations": 1},
    ),
    # Other baselines and scales.
    "dr_grpo": Preset(
        "GRPO done right: no division by length or standard deviation",
        "arXiv:2503.20783",
        {"scale_rewards": "none", "loss_type": "dr_grpo"},
    ),
    "lite_ppo": Preset(
        "Lite PPO: group mean, standard deviation of the batch, mean over tokens",
        "arXiv:2508.08221",
        {"scale_rewards": "batch", "loss_type": "dapo"},
    ),
    "rloo": Preset(
        "REINFORCE Leave-One-Out",
        "arXiv:2402.14740",
        {"advantage": "rloo", **_BANDIT, "num_generations": 4, "kl": "reward", "beta": 0.03},
    ),
    "reinforce_pp": Preset(
        "REINFORCE++",
        "arXiv:2501.03262",
        {
            "advantage": "reinforce_plus_plus",
            "epsilon": 0.2,
            "num_generations": 1,
            "kl": "reward",
            "kl_estimator": "k1",
            "beta": 0.01,
        },
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++ with the mean of the group as baseline",
        "arXiv:2501.03262",
        {
            "advantage": "reinforce_plus_plus_baseline",
            "epsilon": 0.2,
            "kl": "loss",
            "kl_estimator": "k2",
            "use_bias_correction_kl": False,
            "beta": 0.001,
        },
    ),
    "remax": Preset(
        "ReMax: the reward of the greedy completion as baseline",
        "arXiv:2310.10505",
        {"advantage": "remax", **_BANDIT, "num_generations": 1, "kl": "reward", "beta": 0.05},
    ),
    "opo": Preset(
        "On-Policy RL with Optimal reward baseline",
        "arXiv:2505.23585",
        # A mean over all tokens divides every completion's sum by the same number.
        {"advantage": "opo", "policy_loss": "reinforce", "loss_type": "dapo"},
    ),
    "optimal_token_baseline": Preset(
        "Optimal Token Baseline",
        "arXiv:2602.07078",
        {"advantage": "optimal_token_baseline", "loss_type": "dapo"},
    ),
    "gpg": Preset(
        "Group Policy Gradient",
        "arXiv:2504.02546",
        {"advantage": "gpg", "scale_rewards": "none", "policy_loss": "reinforce", "loss_type": "dapo"},
    ),
    "maxrl": Preset("Maximum Likelihood Reinforcement Learning", "arXiv:2602.02710", {"advantage": "maxrl", **_BANDIT}),
    "pass_at_k": Preset(
        "Pass@k Training",
        "arXiv:2508.10751",
        {"advantage": "pass_at_k", "pass_k": 4, "num_generations": 32},
    ),
    "max_of_group": Preset(
        "What a completion adds to the maximum of its group (max@k)",
        "arXiv:2503.19595",
        {"advantage": "max_of_group", "scale_rewards": "none"},
    ),
    # Other losses and trust regions.
    "dapo": Preset(
        "Decoupled Clip and Dynamic Sampling Policy Optimization",
        "arXiv:2503.14476",
        # Its overlong penalty depends on the length limit: set rewards.overlong_buffer (the paper: 4096 of 20480).
        {**_CLIP_HIGHER, "loss_type": "dapo", "num_generations": 16, "max_refills": 10},
    ),
    "prorl": Preset(
        "Prolonged RL: the reference is reset to the policy",
        "arXiv:2505.24864",
        # The paper resets by hand, when validation no longer improves.
        {
            "epsilon": 0.2,
            "epsilon_high": 0.4,
            "num_generations": 16,
            "max_refills": 10,
            "kl": "loss",
            "beta": 1e-4,
            "reference_reset_steps": 200,
        },
    ),
    "gspo": Preset(
        "Group Sequence Policy Optimization",
        "arXiv:2507.18071",
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, **_PER_COMPLETION},
    ),
    "luspo": Preset(
        "Length-Unbiased Sequence Policy Optimization",
        "arXiv:2602.05261",
        {"importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3, "loss_type": "sequence_sum"},
    ),
    "gmpo": Preset(
        "Geometric-Mean Policy Optimization",
        "arXiv:2507.20673",
        {"policy_loss": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4, **_PER_COMPLETION},
    ),
    "rspo": Preset(
        "Router-Shift Policy Optimization, for mixtures of experts",
        "arXiv:2510.23027",
        {"policy_loss": "rspo", **_PER_COMPLETION},
    ),
    "cispo": Preset(
        "Clipped Importance Sampling Policy Optimization",
        "arXiv:2506.13585, bounds of arXiv:2510.13786",
        {"policy_loss": "cispo", "epsilon_high": 4.0, "loss_type": "dapo"},
    ),
    "sapo": Preset("Soft Adaptive Policy Optimization", "arXiv:2511.20347", {"policy_loss": "sapo", **_PER_COMPLETION}),
    "vespo": Preset(
        "Variational Sequence-level Soft Policy Optimization",
        "arXiv:2602.10693",
        # Its weights compare with the policy that made the completion.
        {"policy_loss": "vespo", "old_logprobs": "rollout"},
    ),
    "dppo": Preset(
        "Divergence Proximal Policy Optimization",
        "arXiv:2602.04879",
        {"policy_loss": "dppo", "loss_options.divergence_threshold": 0.15},
    ),
    "clip_cov": Preset(
        "Clip-Cov: tokens of high covariance lose their gradient", "arXiv:2505.22617", {"policy_loss": "clip_cov"}
    ),
    "kl_cov": Preset(
        "KL-Cov: tokens of the highest covariance pay a KL penalty", "arXiv:2505.22617", {"policy_loss": "kl_cov"}
    ),
    "simko": Preset("Simple Pass@K Optimization", "arXiv:2510.14807", {"policy_loss": "simko"}),
    "lambda_grpo": Preset(
        "Lambda-GRPO: a learned preference for length",
        "arXiv:2510.06870",
        {"policy_loss": "lambda_grpo", "loss_type": "dapo"},
    ),
    "decoupled_ppo": Preset(
        "AReaL: the clip is around a recent policy, not the one that sampled",
        "arXiv:2505.24298",
        {"policy_loss": "decoupled", "epsilon": 0.2},
    ),
    "a3po": Preset(
        "A-3PO: decoupled PPO with an estimated proximal policy",
        "arXiv:2512.06547",
        {"policy_loss": "a3po", "epsilon": 0.2},
    ),
    "icepop": Preset(
        "GRPO without tokens on which engine and trainer disagree (Ring-1T)",
        "arXiv:2510.18855",
        {"correction": "icepop", "correction_low": 0.5, "correction_high": 5.0},
    ),
    # Imitation.
    "sft": Preset(
        "Supervised fine-tuning on the completions of the data set",
        "arXiv:2203.02155",
        {"advantage": "sft", "policy_loss": "reinforce", "loss_type": "dapo", "num_generations": 1},
    ),
    "rejection_sampling": Preset(
        "Imitation of the best of its own completions (RAFT)",
        "arXiv:2304.06767",
        {
            "advantage": "rejection",
            "num_best": 1,
            "policy_loss": "reinforce",
            "loss_type": "dapo",
            "num_generations": 32,
        },
    ),
    "distillation": Preset(
        "On-policy distillation: reverse KL to a teacher at every token",
        "arXiv:2306.13649, Thinking Machines 2025",
        {"advantage": "distillation", "policy_loss": "reinforce", "loss_type": "dapo", "num_generations": 4},
    ),
}

PRESETS: Mapping[str, Preset] = MappingProxyType(_PRESETS)
