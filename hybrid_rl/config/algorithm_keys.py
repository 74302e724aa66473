"""The section `algorithm`: the keys of every algorithm, in addition to the records that it is composed of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rl.algos.options import key


@dataclass(frozen=True)
class AlgorithmConfig:
    """The keys of every algorithm. `name` is a preset: it sets other keys (`hybrid-rl algorithms` lists them), all of
    which can be overridden."""

    name: str = key("grpo", "preset of the other keys of algorithm, advantage, policy_loss, kl, correction and critic")
    loss_type: Literal["grpo", "dapo", "dr_grpo", "sequence_sum"] = key(
        "dapo",
        "grpo: mean over sequences of token means; dapo: mean over all tokens; dr_grpo: sum over a fixed length; "
        "sequence_sum: mean over sequences of token sums",
    )
    num_generations: int = key(8, "completions per prompt: the group", minimum=1)
    mask_truncated_completions: bool = key(
        False, "leave completions that a limit cut off (of tokens, tool calls or time) out of the loss"
    )
    num_iterations: int = key(1, "passes over the completions of a training step", minimum=1)
    old_logprobs: Literal["auto", "detach", "recompute", "rollout"] = key(
        "auto",
        "denominator of the ratio: the learner's own logprobs (detach: free, right if one optimizer step uses a "
        "batch), recomputed before the first update, or the engine's; auto = detach if it is right, else recompute",
    )
    max_refills: int = key(
        0,
        "dynamic sampling (DAPO): groups whose rewards are all equal, shaping rewards left out, are replaced, with at "
        "most this many further rollouts per training step; 0 = they stay",
        minimum=0,
    )
    off_policy_mask_threshold: float | None = key(
        None,
        "drop tokens with a negative advantage if the KL(engine, policy) per token of their completion exceeds this "
        "(DeepSeek-V3.2; TRL: 0.5); None = drop none",
        above=0,
    )
    top_entropy_quantile: float = key(
        1.0,
        "only this share of a mini-batch's tokens, those of the highest entropy, is in the policy loss and the entropy "
        "bonus (0.2); 1 = all. With several micro-batches or ranks a separate forward pass finds them",
        minimum=0,
        maximum=1,
    )
    entropy_coef: float = key(0.0, "weight of an entropy bonus in the loss", minimum=0)
    positive_nll_coef: float = key(
        0.0, "weight of the mean negative log-likelihood of samples with a positive reward (VAPO: 0.1)", minimum=0
    )
    routing_replay: Literal["off", "rollout", "scoring"] = key(
        "off",
        "mixtures of experts: which experts the policy's tokens go to in scoring and update: those that the routers "
        "choose then (off), those that the engine chose as it sampled (rollout), or those of the pass that computes "
        "old_logprobs (scoring)",
    )
    router_aux_loss_coef: float | None = key(
        None,
        "mixtures of experts: weight of the load-balancing loss of a mini-batch; None = that of the model's config. "
        "With several micro-batches or ranks a separate forward pass counts which experts are chosen; 0 = none",
        minimum=0,
    )


@dataclass(frozen=True)
class EntropyConfig:
    """Base of the sections about entropy_coef over a run; this one keeps it constant."""


@dataclass(frozen=True)
class AdaptiveEntropyConfig(EntropyConfig):
    """entropy_coef follows the measured entropy (Skywork-OR1, arXiv:2505.22312; TRL's use_adaptive_entropy)."""

    entropy_target: float = key(
        0.2, "above this mean entropy of a token, in nats, no bonus is paid and its weight falls", above=0
    )
    entropy_coef_min: float = key(0.0, "lower bound of entropy_coef", minimum=0)
    entropy_coef_max: float = key(1.0, "upper bound of entropy_coef", minimum=0)
    entropy_coef_delta: float = key(0.005, "change of entropy_coef at an optimizer step", above=0)
