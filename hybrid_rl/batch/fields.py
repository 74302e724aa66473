"""The columns of a batch: alignment, dtype, writer, and the value for what was not produced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

Alignment = Literal["sample", "prompt", "completion", "sequence", "object"]

# Values of finish_reason that tell of a limit: of tokens, of rounds of tool calls, or of time.
TRUNCATIONS = frozenset({"length", "turns", "time"})


@dataclass(frozen=True)
class Field:
    """A column's declaration. align: "sample" for [N], "object" for a list of N Python objects, else one row of tokens
    per sample."""

    align: Alignment
    dtype: torch.dtype | None
    writer: str
    masked: Any
    doc: str


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "prompt_ids": Field("prompt", torch.int64, "collector", None, "token ids that the model was shown"),
        "completion_ids": Field(
            "completion", torch.int64, "collector", None, "token ids that followed, final EOS kept"
        ),
        "completion_mask": Field("completion", torch.bool, "collector", False, "True if the policy made the token"),
        "rollout_logprobs": Field("completion", torch.float32, "collector", 0.0, "ln p of the sampling distribution"),
        "policy_version": Field("completion", torch.int64, "collector", -1, "policy version that sampled each token"),
        "temperature": Field("sample", torch.float64, "collector", 1.0, "divided the logits that it was sampled from"),
        "group": Field("sample", torch.int64, "collector", None, "globally unique id of the prompt's group"),
        "trajectory": Field(
            "sample", torch.int64, "collector", None, "globally unique id; a trajectory has one sample per turn"
        ),
        "turn": Field(
            "sample", torch.int64, "collector", None, "turn within the trajectory, from 0: with it the sample's key"
        ),
        "oldest_version": Field("sample", torch.int64, "collector", -1, "oldest policy version among its tokens"),
        "prompt_length": Field("sample", torch.int64, "collector", None, "tokens of the prompt"),
        "completion_length": Field("sample", torch.int64, "collector", None, "tokens of the completion"),
        "policy_length": Field(
            "sample", torch.int64, "collector", None, "tokens of the completion that the policy made; of agents only"
        ),
        "mini_batch": Field("sample", torch.int64, "driver", None, "optimizer step within the training step, from 0"),
        "finish_reason": Field(
            "object",
            None,
            "collector",
            None,
            'of its trajectory: "stop" = it ended by itself; a limit of tokens ("length"), of rounds of tool calls '
            '("turns") or of time ("time") cut it off; "error" = its agent failed, so that it has no reward; "abort" = '
            "the engine was stopped",
        ),
        "prompt": Field("object", None, "collector", None, "the prompt as in the dataset: text or chat messages"),
        "completion": Field("object", None, "collector", None, "the completion as text, without special tokens"),
        "conversation": Field(
            "object", None, "collector", None, "messages and turns as samples.jsonl shows them, of agents only"
        ),
        "row": Field("object", None, "collector", None, "the dataset's other columns, as a dict"),
        "rewards": Field(
            "sample", torch.float64, "collector", float("nan"), "of its trajectory, weighted; NaN = failed, masked"
        ),
        "baseline_rewards": Field(
            "sample", torch.float64, "collector", float("nan"), "reward of the prompt's greedy sample; NaN = failed"
        ),
        "function_rewards": Field("object", None, "collector", None, "of its trajectory, one (or NaN) per function"),
        "extra": Field("object", None, "collector", None, "values passed to log_extra by reward functions"),
        "routed_experts": Field(
            "sequence", torch.int16, "collector", -1, "experts that each token went to, [T, layers, K]; -1 = not known"
        ),
        "replayed_experts": Field(
            "sequence", torch.int16, "actor", -1, "those of the policy's passes: its own choice if none is known"
        ),
        "token_rewards": Field("completion", torch.float32, "collector", 0.0, "dense rewards, one per token"),
        "old_logprobs": Field("completion", torch.float32, "actor", 0.0, "ln p at the start of the training step"),
        "ref_logprobs": Field("completion", torch.float32, "reference", 0.0, "ln p of the reference model"),
        "teacher_logprobs": Field("completion", torch.float32, "teacher", 0.0, "ln p of the teacher"),
        "old_top_ids": Field("completion", torch.int64, "actor", 0, "most likely tokens before the update, [T, K]"),
        "old_top_logprobs": Field("completion", torch.float32, "actor", 0.0, "their ln p, [T, K]"),
        "old_router_ids": Field("completion", torch.int64, "actor", 0, "experts chosen then, [T, layers * K]"),
        "old_router_logprobs": Field("completion", torch.float32, "actor", 0.0, "their router's ln p, [T, layers * K]"),
        "sum_pi_squared": Field("completion", torch.float32, "actor", 0.0, "sum over the vocabulary of p^2"),
        "trajectory_tokens": Field(
            "sample", torch.int64, "actor", 0, "tokens in the loss of all turns of its trajectory, if it has several"
        ),
        "prepared": Field(
            "completion", torch.float32, "actor", 0.0, "inputs of a policy loss from the whole mini-batch, [T, ...]"
        ),
        "values": Field("completion", torch.float32, "critic", 0.0, "value estimates"),
        "advantages": Field("completion", torch.float32, "actor", 0.0, "advantage of each token"),
        "returns": Field("completion", torch.float32, "critic", 0.0, "value targets"),
        "ratio": Field("completion", torch.float32, "actor", 0.0, "importance ratio in the loss, of replayed steps"),
        "clipped": Field(
            "completion", torch.bool, "actor", False, "True if the loss stopped its gradient, of replayed steps"
        ),
        "loss_weight": Field(
            "completion", torch.float32, "actor", 0.0, "weight of the token in the loss, of replayed steps"
        ),
        "gradient_share": Field(
            "completion", torch.float32, "actor", 0.0, "share of all slopes of the loss in ln p, of replayed steps"
        ),
    }
)
