"""The pass without gradients and the training pass give the same bits, because they share one plan."""

import pytest
import torch

from hybrid_rl.models import PackedRow
from hybrid_rl.training.scoring import batch_logprobs
from tests.support.inside.workers import actor_of, plan_of


@pytest.mark.parametrize(
    ("cap", "dtype", "checkpointing"),
    [(17, "float32", False), (17, "bfloat16", True), (40, "bfloat16", False), (16384, "float32", True)],
)
def test_logprobs_are_bitwise_those_of_the_training_pass(make_bench, cap: int, dtype: str, checkpointing: bool) -> None:
    bench = make_bench(
        tokens_per_micro_batch=cap, dtype=dtype, gradient_checkpointing=checkpointing, old_logprobs="recompute"
    )
    batch = bench.rollout()
    lengths = batch["prompt_ids"].lengths + batch["completion_ids"].lengths
    assert len(set((lengths % 2).tolist())) == 2  # odd and even lengths
    actor = actor_of(bench.worker)
    plan = plan_of(bench.worker, batch, 1)
    scored = actor.columns(batch, plan)["old_logprobs"]
    for micro in (rows for mini in plan for rows in mini):
        chosen = batch.select(micro)
        row = PackedRow.of(chosen["prompt_ids"], chosen["completion_ids"], actor.model.device)
        logprobs, _ = actor.model.row_logprobs(row, 1.0)
        assert logprobs.requires_grad
        assert torch.equal(logprobs.detach(), scored.select(torch.tensor(micro)).values)


@pytest.mark.parametrize(
    "keys",
    [
        {"tokens_per_micro_batch": 20, "dtype": "bfloat16", "gradient_checkpointing": True},
        {"tokens_per_micro_batch": 25, "temperature": 0.7, "importance_sampling_level": "sequence"},
    ],
    ids=["bfloat16, checkpointing", "sequence"],
)
def test_first_update_has_ratio_one_with_many_micro_batches(make_bench, keys: dict) -> None:
    bench = make_bench(old_logprobs="recompute", **keys)
    batch = bench.prepared()
    assert len(plan_of(bench.worker, batch, 1)[0]) > 2
    metrics = bench.update(batch)
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0


def test_every_place_is_written_once(make_bench) -> None:
    """Whatever the order of the plan, row i of the result belongs to sample i."""
    bench = make_bench()
    batch, model = bench.rollout(), actor_of(bench.worker).model
    one_by_one = batch_logprobs(model, batch, [[row] for row in range(batch.num_samples)])
    backwards = batch_logprobs(model, batch, [[5, 2, 11], [10, 0], [9, 8, 1, 3, 4, 6, 7]])
    torch.testing.assert_close(backwards.values, one_by_one.values, rtol=0, atol=1e-6)


def test_gradient_checkpointing_changes_no_number(make_bench) -> None:
    plain, checkpointed = (make_bench(gradient_checkpointing=on) for on in (False, True))
    first, second = (bench.train() for bench in (plain, checkpointed))
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-6)
    for mine, theirs in zip(plain.module.parameters(), checkpointed.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
