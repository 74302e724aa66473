"""Gradients of the GRPO step on real ranks against one plain process: sums over ranks, whatever the split."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hybrid_rl.algos import ALGORITHMS
from hybrid_rl.models import CausalLM
from hybrid_rl.workers.fsdp import ShardedCausalLM, ShardOptions, accumulating, device_mesh, shard
from hybrid_rl.workers.plan import micro_batch
from hybrid_rl.workers.step import Counts, batch_logprobs, micro_batch_loss
from tests.distributed.ranks import run_ranks
from tests.float64 import KeepFloat64
from tests.reference import grpo_case
from tests.unit.workers.grpo_step import case_batch, case_config, with_advantages

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
    config = case_config(loss_type="dapo", beta=0.0)
    batch = with_advantages(case_batch())
    counts = Counts.of(batch, config.algorithm)
    total = 0.0
    for index, rows in enumerate(micro_batches):
        with KeepFloat64(), accumulating(model, is_last=index == len(micro_batches) - 1):
            loss, _, _ = micro_batch_loss(
                model,
                micro_batch(batch, rows),
                ALGORITHMS["grpo"],
                config.algorithm,
                counts,
                temperature=0.9,
                max_completion_length=grpo_case.MAX_COMPLETION_LENGTH,
            )
            loss.backward()
        total += float(loss.detach())
    return total


def gradients_on_ranks(
    rank: int, num_ranks: int, dtype: torch.dtype, split: Split, checkpointing: bool, settings: Mapping[str, Any]
) -> tuple[float, dict[str, torch.Tensor], float]:
    """This rank's part of the loss, the gradients put together from the shards, and what `verify` found."""
    options = ShardOptions(
        **{"dp_replicate": 1, "dp_shard": num_ranks, "param_dtype": dtype, "reduce_dtype": dtype, **settings}
    )
    module = grpo_case.build_model(dtype)
    model = ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options))
    gap = model.verify()
    if checkpointing:
        model.enable_gradient_checkpointing()
    before = batch_logprobs(model, case_batch(), split[rank], 1.0)
    loss = grpo_backward(model, split[rank])
    after = batch_logprobs(model, case_batch(), split[rank], 1.0)
    assert torch.equal(before.values, after.values)
    return loss, {name: p.grad.full_tensor() for name, p in module.named_parameters()}, gap


def plain_gradients(dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    model = CausalLM(grpo_case.build_model(dtype))
    loss = grpo_backward(model, [list(range(16))])
    return loss, {name: p.grad for name, p in model.module.named_parameters()}


@pytest.mark.parametrize(
    ("num_ranks", "split", "dtype", "checkpointing", "settings"),
    [
        pytest.param(2, EVEN, torch.float32, False, {}, id="even fp32"),
        pytest.param(2, UNEVEN, torch.float32, True, {}, id="uneven fp32 checkpointing"),
        pytest.param(2, WITHOUT_WORK, torch.float64, False, {"sync_every_micro_batch": True}, id="without work, sync"),
        pytest.param(3, THREE, torch.float64, False, {"reshard_after_forward": False}, id="three ranks, kept gathered"),
        pytest.param(4, FOUR, torch.float64, True, {"dp_replicate": 2, "dp_shard": 2}, id="2x2"),
        pytest.param(
            4,
            FOUR,
            torch.float32,
            False,
            {"dp_replicate": 2, "dp_shard": 2, "sync_every_micro_batch": True},
            id="2x2 sync",
        ),
        pytest.param(2, UNEVEN, torch.float64, False, {"dp_replicate": 2, "dp_shard": 1}, id="replicas only"),
    ],
)
def test_gradient_of_the_grpo_step_is_that_of_one_process(num_ranks, split, dtype, checkpointing, settings) -> None:
    expected_loss, expected = plain_gradients(dtype)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    results = run_ranks(gradients_on_ranks, num_ranks, dtype, split, checkpointing, settings)
    assert sum(loss for loss, _, _ in results) == pytest.approx(expected_loss, rel=EXACT[dtype], abs=1e-7)
    for _, mine, gap in results:
        assert gap < 2e-6
        assert mine.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                mine[name], gradient, rtol=0, atol=EXACT[dtype] * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


def bf16_on_ranks(rank: int, num_ranks: int) -> dict[str, Any]:
    """fp32 shards computed with in bfloat16."""
    options = ShardOptions(1, num_ranks, torch.bfloat16)
    module = grpo_case.build_model(torch.bfloat16)
    stored = {name: p.detach().float() for name, p in module.named_parameters()}
    model = ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options), "sdpa")
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
