"""Gradients of the GRPO step on real ranks against one plain process: sums over ranks, whatever the split."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hybrid_rl.models import CausalLM
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.scoring import batch_logprobs
from hybrid_rl.training.sharding.fsdp import accumulating
from hybrid_rl.training.spec import Counts, LossSpec
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import sharded
from tests.reference import grpo_case
from tests.support.float64 import KeepFloat64
from tests.unit.training.grpo_step import case_batch, case_config, terms_of, with_advantages

pytestmark = pytest.mark.slow

# Samples of each rank's micro-batches, as many on every rank; an empty one is a micro-batch of weight zero.
Split = list[list[list[int]]]
EVEN: Split = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]]
UNEVEN: Split = [[list(range(11)), [11], [12]], [[13, 14], [15], []]]
WITHOUT_WORK: Split = [[list(range(9)), list(range(9, 16))], [[], []]]
THREE: Split = [[[0, 1, 2, 3, 4], [5, 6, 7]], [[8, 9], [10, 11, 12, 13, 14]], [[15], []]]
FOUR: Split = [[[0, 1, 2], [3, 4, 5]], [[6], []], [[7, 8, 9, 10], [11, 12]], [[13, 14], [15]]]
EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}  # of the largest gradient


def grpo_backward(model: CausalLM, micro_batches: list[list[int]]) -> float:
    """Backward passes of one rank's micro-batches, with the counts of all samples; this rank's part of the loss."""
    config = case_config(loss_type="dapo", beta=0.0, temperature=0.9)
    batch = with_advantages(case_batch(temperature=0.9))
    counts = Counts.of(batch, LossSpec.of(config))
    total = 0.0
    for index, rows in enumerate(micro_batches):
        with KeepFloat64(), accumulating(model, is_last=index == len(micro_batches) - 1):
            loss, _, _ = micro_batch_loss(model, micro_batch(batch, rows), *terms_of(config, counts))
            loss.backward()
        total += float(loss.detach())
    return total


@dataclass(frozen=True)
class Case:
    """How the step is split. settings: of ShardOptions."""

    split: Split
    dtype: torch.dtype
    checkpointing: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


REPLICATED = {"dp_replicate": 2, "dp_shard": 2}
CASES: dict[int, dict[str, Case]] = {  # by the number of ranks
    2: {
        "even fp32": Case(EVEN, torch.float32),
        "uneven fp32, checkpointing": Case(UNEVEN, torch.float32, checkpointing=True),
        "uneven fp64": Case(UNEVEN, torch.float64),
        "without work, sync": Case(WITHOUT_WORK, torch.float64, settings={"sync_every_micro_batch": True}),
        "replicas only": Case(UNEVEN, torch.float64, settings={"dp_replicate": 2, "dp_shard": 1}),
    },
    3: {
        "kept gathered": Case(THREE, torch.float64, settings={"reshard_after_forward": False}),
        "fp32": Case(THREE, torch.float32),
    },
    4: {
        "2x2": Case(FOUR, torch.float64, settings=REPLICATED),
        "2x2 sync fp32": Case(
            FOUR, torch.float32, checkpointing=True, settings={**REPLICATED, "sync_every_micro_batch": True}
        ),
    },
}


def gradients_on_ranks(rank: int, num_ranks: int) -> dict[str, tuple[float, dict[str, torch.Tensor], float]]:
    """By case: this rank's part of the loss, the gradients put together from the shards, what `verify` found."""
    return {name: _gradients(rank, case) for name, case in CASES[num_ranks].items()}


def _gradients(rank: int, case: Case) -> tuple[float, dict[str, torch.Tensor], float]:
    module = grpo_case.build_model(case.dtype)
    model = sharded(module, case.dtype, reduce_dtype=case.dtype, **case.settings)
    gap = model.verify()
    if case.checkpointing:
        model.enable_gradient_checkpointing()
    before = batch_logprobs(model, case_batch(), case.split[rank])
    loss = grpo_backward(model, case.split[rank])
    after = batch_logprobs(model, case_batch(), case.split[rank])
    assert torch.equal(before.values, after.values)
    return loss, {name: p.grad.full_tensor() for name, p in module.named_parameters()}, gap


def plain_gradients(dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    model = CausalLM(grpo_case.build_model(dtype))
    loss = grpo_backward(model, [list(range(16))])
    return loss, {name: p.grad for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("num_ranks", CASES)
def test_gradient_of_the_grpo_step_is_that_of_one_process(num_ranks: int) -> None:
    results = run_ranks(gradients_on_ranks, num_ranks)
    for label, case in CASES[num_ranks].items():
        expected_loss, expected = plain_gradients(case.dtype)
        exact = EXACT[case.dtype]
        assert sum(result[label][0] for result in results) == pytest.approx(expected_loss, rel=exact, abs=1e-7), label
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        for _, mine, gap in (result[label] for result in results):
            assert gap < 2e-6
            assert mine.keys() == expected.keys()
            for name, gradient in expected.items():
                error = float((mine[name] - gradient).abs().max()) / scale
                assert error <= exact, f"{label}, {name}: {error:.1e}"


def bf16_on_ranks(rank: int, num_ranks: int) -> dict[str, Any]:
    """fp32 shards computed with in bfloat16."""
    module = grpo_case.build_model(torch.bfloat16)
    stored = {name: p.detach().float() for name, p in module.named_parameters()}
    model = sharded(module, torch.bfloat16, "sdpa")
    grpo_backward(model, EVEN[rank])
    with model.twin.bound():
        twin_dtypes = {p.dtype for p in model.twin.module.parameters()}
    return {
        "dtypes": (model.dtype, {p.dtype for p in module.parameters()}, {p.grad.dtype for p in module.parameters()}),
        "twin": twin_dtypes,
        "same": all(torch.equal(p.full_tensor(), stored[name]) for name, p in module.named_parameters()),
        "gradients": {name: p.grad.full_tensor() for name, p in module.named_parameters()},
        "sizes": (model.vocab_size, model.max_positions, model.device),
    }


def test_bf16_computes_on_fp32_masters_and_sums_in_fp32() -> None:
    _, expected = plain_gradients(torch.float64)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for seen in run_ranks(bf16_on_ranks, 2):
        assert seen["dtypes"] == (torch.bfloat16, {torch.float32}, {torch.float32})
        assert seen["twin"] == {torch.bfloat16}
        assert seen["same"]
        assert seen["sizes"] == (grpo_case.VOCAB_SIZE, 64, torch.device("cpu"))
        for name, gradient in seen["gradients"].items():
            error = float((gradient - expected[name]).abs().max()) / scale
            assert error < 0.05, name  # bfloat16 has 8 bits
        assert any((g.bfloat16().float() != g).any() for g in seen["gradients"].values())
