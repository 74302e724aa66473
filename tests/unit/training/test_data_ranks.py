"""Ranks that have the same samples, here the two of a pretended tensor-parallel pair, count them once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.metrics.metric_sums import MetricSums, joined
from hybrid_rl.models import CausalLM
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.estimate import AdvantageSpec, with_advantages
from tests.reference.grpo_case import build_model
from tests.unit.training.grpo_step import case_batch, case_config

SHARES = ([*range(8)], [*range(8, 16)])  # whole groups


class Meeting:
    """What `RankContext.gather` is for ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        self._values: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=60)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


def share_of(context: RankContext) -> Batch:
    """The samples of a rank, as an engine and the reference leave them, with tokens of the environment."""
    batch = case_batch()
    completions = batch["completion_ids"]
    noise = torch.randn(len(completions.values), generator=torch.Generator().manual_seed(5))
    made = torch.arange(len(noise)) % 4 != 2
    batch = batch.without("completion_mask").with_columns(
        completion_mask=completions.with_values(made),
        rollout_logprobs=completions.with_values(torch.where(made, -3.0 + 0.1 * noise, 0.0)),
        ref_logprobs=completions.with_values(-3.0 - 0.1 * noise),
        policy_version=completions.with_values(torch.where(made, 0, -1)),
        trajectory=torch.arange(16),
    )
    return batch.select(SHARES[context.data_rank])


def trained(shape: Mapping[str, int], keys: Mapping[str, Any]) -> tuple[dict[str, float], list[Actor], list[Batch]]:
    """A training step on ranks of a mesh: its metrics, the actors and the batches with advantages."""
    mesh, config = RankMesh(**shape), case_config(**keys)
    meeting = Meeting(mesh.num_ranks)

    def run(rank: int) -> tuple[MetricSums, Actor, Batch]:
        context = RankContext(rank=rank, mesh=mesh, gather=lambda value: meeting.gather(rank, value))
        actor = Actor(models[rank], config, context, num_optimizer_steps=4)
        batch, plan = share_of(context), [[[0, 1, 2, 3, 4], [5, 6, 7]]]
        batch = batch.with_columns(**actor.columns(batch, plan))
        batch = with_advantages(batch, AdvantageSpec.of(config), context, actor.kl_weight.beta)
        sums = actor.update(batch, plan, 0)
        return sums if context.is_data_leader else MetricSums(), actor, batch

    models = [CausalLM(build_model(torch.float32)) for _ in range(mesh.num_ranks)]
    with ThreadPoolExecutor(mesh.num_ranks) as pool:
        found = list(pool.map(run, range(mesh.num_ranks)))
    return joined([sums for sums, _, _ in found]), [actor for _, actor, _ in found], [batch for _, _, batch in found]


@pytest.mark.parametrize(
    "keys",
    [
        {"beta": 0.1, "kl_target": 0.01, "loss_type": "grpo"}
        | {"top_entropy_quantile": 0.3, "entropy_coef": 0.1, "entropy_target": 3.0},
        {
            "advantage": "reinforce_plus_plus",
            "kl": "reward",
            "beta": 0.1,
            "policy_loss": "clip_cov",
            "correction": "tis",
        },
        {"policy_loss": "lambda_grpo", "loss_options.lambda_learning_rate": 0.1},
    ],
    ids=["kl and entropy in the loss", "whitened, whole mini-batch", "learned numbers"],
)
def test_a_pair_of_ranks_with_the_same_samples_changes_no_number(keys: dict[str, Any]) -> None:
    """Bit for bit: denominators, norms, weights that follow the KL or the entropy, and all metrics."""
    metrics, actors, batches = trained({"dp_shard": 2}, keys)
    again, pairs, theirs = trained({"dp_shard": 2, "tp": 2}, keys)
    assert again == metrics and metrics["skipped_updates"] == 0
    for rank, (actor, batch) in enumerate(zip(pairs, theirs, strict=True)):
        alone = actors[rank // 2]
        assert torch.equal(batch["advantages"].values, batches[rank // 2]["advantages"].values)
        assert actor.optimizer_state()["algorithm"] == alone.optimizer_state()["algorithm"]
        for mine, its in zip(actor.model.module.parameters(), alone.model.module.parameters(), strict=True):
            assert torch.equal(mine, its)
