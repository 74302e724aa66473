"""The gradient of every policy loss, and of its company, on two real ranks against one plain process."""

import pytest
import torch

from hybrid_rl.controller import RankContext
from hybrid_rl.models import CausalLM
from hybrid_rl.training.spec import Counts, LossSpec
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import context_of, sharded
from tests.reference import grpo_case
from tests.unit.training.objective_steps import STEPS, backward, prepared_batch, step_batch, step_config

pytestmark = pytest.mark.slow

# Samples of each rank's micro-batches: unequal shares, and one of weight zero.
SPLIT = [[[0, 5, 2], [11, 3, 4, 1, 6, 7, 8], [9, 10, 12]], [[13, 14], [15], []]]


def on_ranks(rank: int, num_ranks: int) -> dict[str, tuple[float, dict[str, torch.Tensor], torch.Tensor]]:
    """By step: this rank's part of the loss, gradients put together from the shards, what is learned beside them."""
    context = context_of(rank, num_ranks)
    module = grpo_case.build_model(torch.float32)
    model = sharded(module)
    results = {}
    for name in STEPS:
        config = step_config(name)
        whole = step_batch(config)
        mine = whole.select([row for rows in SPLIT[rank] for row in rows])
        counts = Counts.of(whole, LossSpec.of(config))
        # Micro-batches of this rank's own batch, whose samples are one after the other.
        starts = [sum(map(len, SPLIT[rank][:index])) for index in range(len(SPLIT[rank]))]
        micro_batches = [[start + i for i in range(len(rows))] for start, rows in zip(starts, SPLIT[rank], strict=True)]
        mine = prepared_batch(mine, config, [rows for rows in micro_batches if rows], context)
        loss, learned = backward(model, mine, config, micro_batches, counts)
        gradients = {key: p.grad.full_tensor() for key, p in module.named_parameters()}
        results[name] = loss, gradients, torch.zeros(1) if learned is None else learned
        model.discard_gradients()
    return results


def test_gradients_are_those_of_one_process() -> None:
    ranks, alone = run_ranks(on_ranks, 2), {}
    for name in STEPS:
        config = step_config(name)
        everything = [list(range(16))]
        batch = prepared_batch(step_batch(config), config, everything, RankContext())
        model = CausalLM(grpo_case.build_model(torch.float32))
        loss, learned = backward(model, batch, config, everything, Counts.of(batch, LossSpec.of(config)))
        assert sum(result[name][0] for result in ranks) == pytest.approx(loss, rel=1e-5, abs=1e-6), name
        if learned is not None:
            torch.testing.assert_close(sum(result[name][2] for result in ranks), learned, rtol=0, atol=1e-6)
        alone[name] = grpo_case.flatten_gradient(model.module)
        expected = {key: p.grad for key, p in model.module.named_parameters()}
        for result in ranks:
            for key, gradient in expected.items():
                torch.testing.assert_close(result[name][1][key], gradient, rtol=0, atol=1e-6, msg=f"{name}: {key}")
    # Settings that do nothing would prove nothing. lambda-GRPO begins as DAPO: its exponent is 0.
    same = [(a, b) for a in alone for b in alone if a < b and torch.equal(alone[a], alone[b])]
    assert same == [("clip", "lambda_grpo")], str(same)
