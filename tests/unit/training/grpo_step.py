"""The recorded GRPO batch, and one optimizer step's loss and gradient through the library's own code path."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybrid_rl.algos import group_relative_advantages
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.training.batch_plan import Plan, micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.spec import Counts, LossSpec, MiniBatch
from tests.reference import grpo_case
from tests.support.float64 import KeepFloat64
from tests.support.plans import make_plan

LIMIT = grpo_case.MAX_COMPLETION_LENGTH
ALL_TOKENS = 10_000
Rows = Sequence[Sequence[float]]


def case_config(**keys: Any) -> TrainerConfig:
    """A resolved config for the recorded batch; the old logprobs are in the batch already, or absent (detach)."""
    settings = {
        "num_generations": grpo_case.NUM_GENERATIONS,
        "prompts_per_step": len(grpo_case.PROMPT_LENGTHS),
        "max_completion_length": LIMIT,
        "loss_type": "dapo",
    }
    loaded, given = load_config(settings | keys)
    return resolve(loaded, given)


def case_batch(
    old: Rows | None = None,
    ref: Rows | None = None,
    rewards: Sequence[float] = grpo_case.REWARDS,
    temperature: float = 1.0,
) -> Batch:
    """The 16 samples as a batch, advantages not yet computed."""
    samples = grpo_case.build_samples()
    completions = Jagged.from_rows([sample.completion_ids for sample in samples], torch.int64)
    columns: dict[str, Any] = {
        "prompt_ids": Jagged.from_rows([sample.prompt_ids for sample in samples], torch.int64),
        "completion_ids": completions,
        "completion_mask": completions.with_values(torch.ones_like(completions.values, dtype=torch.bool)),
        "temperature": torch.full((len(samples),), temperature, dtype=torch.float64),
        "group": torch.tensor([sample.group for sample in samples]),
        "finish_reason": ["length" if sample.truncated else "stop" for sample in samples],
        "rewards": torch.tensor(list(rewards), dtype=torch.float64),
    }
    for name, rows in (("old_logprobs", old), ("ref_logprobs", ref)):
        if rows is not None:
            columns[name] = Jagged.from_rows([list(row) for row in rows], torch.float32)
    return Batch(columns)


def with_advantages(batch: Batch, scale_rewards: str = "group") -> Batch:
    """Advantages from the rewards, one per completion token."""
    per_sample = group_relative_advantages(batch["rewards"], batch["group"], scale_rewards=scale_rewards).float()
    completions = batch["completion_ids"]
    return batch.with_columns(advantages=completions.with_values(per_sample[completions.row_index()]))


def rolled_batch(rewards: Sequence[float] = grpo_case.REWARDS, version: int = 0) -> Batch:
    """The batch with all that an update reads: advantages, the engine's logprobs, the version that made the tokens."""
    batch = with_advantages(case_batch(rewards=rewards))
    completions = batch["completion_ids"]
    return batch.with_columns(
        trajectory=torch.arange(batch.num_samples),
        rollout_logprobs=completions.with_values(torch.full((len(completions.values),), -3.0)),
        policy_version=completions.with_values(torch.full((len(completions.values),), version)),
    )


def plan_of(batch: Batch, tokens_per_micro_batch: int, seed: int = 0) -> Plan:
    """One mini-batch, cut under a token cap."""
    return make_plan(batch, tokens_per_micro_batch=tokens_per_micro_batch, seed=seed)


def terms_of(config: TrainerConfig, counts: Counts) -> tuple[LossSpec, MiniBatch]:
    """The loss, and the numbers of the mini-batch in the first training step."""
    spec = LossSpec.of(config)
    return spec, MiniBatch(counts, beta=spec.beta, entropy_coef=spec.algorithm.entropy_coef)


def loss_and_gradient(
    batch: Batch,
    config: TrainerConfig,
    micro_batches: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    counts: Counts | None = None,
) -> tuple[float, torch.Tensor, Mapping[str, float]]:
    """Loss, flat gradient and metrics of one optimizer step over these micro-batches. counts: of all ranks, None where
    this is the only one."""
    model = CausalLM(grpo_case.build_model(dtype))
    counts = counts or Counts.of(batch, LossSpec.of(config))
    sums, total = MetricSums(), 0.0
    for rows in micro_batches:
        with KeepFloat64():
            loss, stats, _ = micro_batch_loss(model, micro_batch(batch, rows), *terms_of(config, counts))
        loss.backward()
        total += loss.item()
        sums.merge(stats)
    return total, grpo_case.flatten_gradient(model.module), sums.result()
