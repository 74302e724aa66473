"""Steps of every policy loss, aggregation and further term on the recorded batch, as settings; for tests of cutting and
of ranks."""

from contextlib import nullcontext
from typing import Any

import torch

from hybrid_rl.algos import POLICY_LOSSES
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.models import CausalLM
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.learned import LearnedNumbers
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.mini_batch import prepared_column
from hybrid_rl.training.scoring import distribution_columns
from hybrid_rl.training.spec import Counts, LossSpec, MiniBatch, SideModels
from tests.reference.grpo_case import build_model, load_recorded
from tests.support.float64 import KeepFloat64
from tests.unit.training.grpo_step import case_batch, case_config, with_advantages

RECORDED = load_recorded()["dapo_kl"]
VERSION = 3

# Router scores want experts, which this model lacks: tests/unit/training/test_rspo.py.
OBJECTIVES = [name for name in POLICY_LOSSES if name != "rspo"]
STEPS: dict[str, dict[str, Any]] = {
    **{name: {"policy_loss": name} for name in OBJECTIVES},
    "gspo": {"algorithm": "gspo"},
    "gspo_token": {"importance_sampling_level": "sequence_token", "loss_type": "grpo"},
    "dual clip": {"dual_clip": 3.0, "epsilon_high": 0.28},
    "dppo, top-k": {"policy_loss": "dppo", "loss_options": {"divergence_type": "topk_tv", "num_top": 4}},
    "luspo": {"importance_sampling_level": "sequence", "loss_type": "sequence_sum"},
    "kl in the loss": {"beta": 0.1},
    "exact kl": {"beta": 0.1, "kl_estimator": "exact", "use_bias_correction_kl": False},
    "entropy and nll": {"entropy_coef": 0.01, "positive_nll_coef": 0.1, "loss_type": "dr_grpo"},
    "tis": {"correction": "tis", "staleness_decay": 0.9},
    "mis": {"correction": "mis", "correction_level": "sequence"},
    "kl_rejection": {"correction": "kl_rejection", "correction_threshold": 0.005},
}


def step_config(name: str) -> TrainerConfig:
    """The resolved configuration of a step, with logprobs computed before the update."""
    settings = STEPS[name]
    old = "rollout" if name == "a3po" else "recompute"
    return case_config(**{"old_logprobs": old, **settings})


def step_batch(config: TrainerConfig) -> Batch:
    """The recorded batch with every column that any loss reads: an engine that was off, tokens of several ages."""
    batch = with_advantages(case_batch(RECORDED.old_logprobs, RECORDED.ref_logprobs))
    completions = batch["completion_ids"]
    noise = torch.randn(len(completions.values), generator=torch.Generator().manual_seed(5))
    ages = torch.arange(len(completions.values)) % 3
    columns: dict[str, Any] = {
        "rollout_logprobs": completions.with_values(batch["old_logprobs"].values + 0.1 * noise),
        "policy_version": completions.with_values(VERSION - ages),
        "trajectory": torch.arange(batch.num_samples),
    }
    if "old_top" in config.policy_loss.needs:
        model = CausalLM(build_model(torch.float32))
        num_top: int = config.policy_loss.num_top  # type: ignore[attr-defined]
        found = distribution_columns(
            model, batch, [list(range(batch.num_samples))], num_top=num_top, wants_squares=False
        )
        columns |= {column: found[column] for column in ("old_top_ids", "old_top_logprobs")}
    return batch.with_columns(**columns)


def prepared_batch(batch: Batch, config: TrainerConfig, micro_batches: list[list[int]], context: RankContext) -> Batch:
    """Add the numbers of the whole mini-batch that the loss needs. Collective."""
    column: Jagged | None = prepared_column(batch, [micro_batches], LossSpec.of(config), context, seed=VERSION)
    return batch if column is None else batch.with_columns(prepared=column)


def backward(
    model: CausalLM, batch: Batch, config: TrainerConfig, micro_batches: list[list[int]], counts: Counts
) -> tuple[float, torch.Tensor | None]:
    """Backward passes of these micro-batches: the loss, and the gradient of the numbers learned beside the model."""
    numbers = LearnedNumbers(config.policy_loss)
    dtype = next(model.module.parameters()).dtype
    spec, beside = LossSpec.of(config), SideModels()
    mini = MiniBatch(counts, VERSION, spec.beta, spec.algorithm.entropy_coef, numbers.parameters)
    if spec.is_exact_kl:
        reference = build_model(dtype)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.1)
        beside = SideModels(CausalLM(reference))
    total = 0.0
    for rows in micro_batches:
        with KeepFloat64() if dtype == torch.float64 else nullcontext():
            loss, _, _ = micro_batch_loss(model, micro_batch(batch, rows), spec, mini, beside)
        loss.backward()
        total += float(loss.detach())
    return total, None if numbers.parameters is None else numbers.parameters.grad
