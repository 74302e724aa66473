"""The critic on two real ranks against one process: values, gradients, metrics, updates and checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_rl.checkpoint.writing import write_checkpoint
from hybrid_rl.config import TrainerConfig, ValueHeadConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.metrics.metric_sums import MetricSums, joined
from hybrid_rl.models.heads.value_head import value_model_of
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.models.saving import save_weights
from hybrid_rl.training.batch_plan import Plan
from hybrid_rl.training.critic import Critic
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM
from hybrid_rl.weights.sources import ObjectSource
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import context_of, gather
from tests.reference import grpo_case
from tests.support.float64 import KeepFloat64
from tests.unit.training.critic_case import RecordedGradients, config_of, critic_batch, policy_with_head

pytestmark = pytest.mark.slow  # processes are started

# The samples of each rank, and its mini-batches of micro-batches of them; the second rank runs short.
ROWS = (list(range(11)), list(range(11, 16)))
PLANS: tuple[Plan, ...] = ([[[0, 1, 2, 3], [9, 8], [4]], [[5, 6, 10, 7]]], [[[1, 0], [2], []], [[3, 4]]])
# The same samples with the same mini-batches in one process, cut and ordered otherwise.
WHOLE: Plan = [[[0, 12, 9, 1], [2, 3, 4], [8, 13, 11]], [[15, 5], [10, 7, 6, 14]]]
NUM_STEPS = 3
OPTIONS = ValueHeadConfig(critic_learning_rate=1e-3)


def exact_config() -> TrainerConfig:
    """All of it in float64, which a user cannot ask for."""
    DTYPES["float64"] = torch.float64
    config = config_of(lr_scheduler_type="linear", learning_rate=0.1)
    model = dataclasses.replace(config.model, dtype="float64")  # type: ignore[arg-type]
    fsdp = dataclasses.replace(config.fsdp, reduce_dtype="float64")  # type: ignore[arg-type]
    return dataclasses.replace(config, model=model, fsdp=fsdp)


def make_critic(context: RankContext, recipe: ModelRecipe) -> Critic:
    with KeepFloat64():
        return Critic(recipe, exact_config(), context, num_optimizer_steps=20, options=OPTIONS)


def run(critic: Critic, rows: list[int], plan: Plan) -> tuple[Tensor, list[MetricSums], list[dict[str, Tensor]]]:
    """Values, then training steps; metrics of each, gradients of every optimizer step."""
    batch = critic_batch().select(rows)
    recorded = RecordedGradients(critic)
    with KeepFloat64():
        values = critic.values(batch, plan).values
        metrics = [critic.update(batch, plan) for _ in range(NUM_STEPS)]
    return values, metrics, recorded.by_step


def whole_weights(critic: Critic) -> dict[str, Tensor]:
    named = critic.model.module.named_parameters()
    return {
        name: (p.full_tensor() if isinstance(critic.model, ShardedCausalLM) else p).detach().clone()  # type: ignore[operator]
        for name, p in named
    }


def on_ranks(rank: int, num_ranks: int, root: Path, policy: ModelRecipe) -> dict[int, dict[str, Any]]:
    """By dp_replicate."""
    return {copies: on_mesh(rank, num_ranks, root, policy, copies) for copies in (1, 2)}


def on_mesh(rank: int, num_ranks: int, root: Path, policy: ModelRecipe, dp_replicate: int) -> dict[str, Any]:
    context = context_of(rank, num_ranks, dp_replicate)
    recipe = ModelRecipe.of_folder(str(root / "critic"))
    critic = make_critic(context, recipe)
    values, metrics, gradients = run(critic, ROWS[rank], PLANS[rank])
    seen: dict[str, Any] = {"values": values, "metrics": metrics, "gradients": list(gradients)}
    seen["weights"] = whole_weights(critic)
    folder = root / f"checkpoint-{dp_replicate}"
    parts = {"critic": critic.optimizer_state()}
    write_checkpoint(folder, lambda f: critic.save_model(f / "critic"), {}, {}, parts=parts, rank=rank, gather=gather)
    again = make_critic(context, policy)
    seen["fresh"] = whole_weights(again)
    again.load(folder / "critic")
    seen["sums"] = [sums_over_ranks(its, rank) for its in (critic, again)]
    seen["after"], seen["resumed"] = whole_weights(critic), whole_weights(again)
    return seen


def bf16_on_ranks(rank: int, num_ranks: int, root: Path) -> tuple[torch.dtype, bool, bool]:
    """fp32 shards computed with in bfloat16: its dtype; whether its weights were saved rounded; whether it resumes."""
    context = context_of(rank, num_ranks)
    recipe = ModelRecipe.of_folder(str(root / "critic"))
    config = config_of(dtype="bfloat16")
    critic, again = (Critic(recipe, config, context, num_optimizer_steps=20, options=OPTIONS) for _ in range(2))
    batch = critic_batch().select(ROWS[rank])
    critic.update(batch, PLANS[rank])
    parts = {"critic": critic.optimizer_state()}
    write_checkpoint(
        root / "bf16", lambda f: critic.save_model(f / "critic"), {}, {}, parts=parts, rank=rank, gather=gather
    )
    again.load(root / "bf16" / "critic")
    before = whole_weights(critic)
    rounded = any(not torch.equal(tensor.bfloat16().float(), tensor) for tensor in before.values())
    for its in (critic, again):
        its.update(batch, PLANS[rank])
    after, resumed = whole_weights(critic), whole_weights(again)
    return critic.model.dtype, rounded, all(torch.equal(resumed[name], tensor) for name, tensor in after.items())


def test_bf16_resumes_from_fp32_masters(tmp_path: Path) -> None:
    save_weights(policy_with_head(torch.float32), tmp_path / "critic", torch.float32)
    assert run_ranks(bf16_on_ranks, 2, tmp_path) == [(torch.bfloat16, True, True)] * 2


def sums_over_ranks(critic: Critic, rank: int) -> list[int]:
    """How often ranks sum gradients in an update of one micro-batch, and of several."""
    batch, counts = critic_batch().select(ROWS[rank]), []
    for plan in ([[[0, 1, 2, 3, 4]]], [[[0], [1], [2, 3], [4]]]):
        with pytest.MonkeyPatch.context() as patch, KeepFloat64():
            calls = [counted(patch, name) for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")]
            critic.update(batch, plan)
        counts.append(sum(map(len, calls)))
    return counts


def counted(patch: pytest.MonkeyPatch, name: str) -> list[None]:
    """A None for each call of a collective, which depends on the version of PyTorch."""
    calls: list[None] = []
    original = getattr(dist, name, None)

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        assert original is not None
        return original(*arguments, **options)

    if original is not None:
        patch.setattr(dist, name, call)
    return calls


def compare(mine: dict[str, Tensor], theirs: dict[str, Tensor], exact: float) -> None:
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert float((mine[name] - tensor).abs().max()) <= exact * largest, name


def test_two_ranks_do_what_one_process_does(tmp_path: Path) -> None:
    save_weights(policy_with_head(torch.float64), tmp_path / "critic", torch.float64)
    policy = grpo_case.build_model(torch.float64)
    recipe = ModelRecipe.of_module(policy, ObjectSource.of(policy, lambda data: data))
    results = run_ranks(on_ranks, 2, tmp_path, recipe)

    here = RankContext(device=torch.device("cpu"))
    critic = make_critic(here, ModelRecipe.of_folder(str(tmp_path / "critic")))
    values, metrics, gradients = run(critic, list(range(16)), WHOLE)
    expected = [sums.result() for sums in metrics]
    assert all(step["critic/explained_variance"] < 1 and step["critic/clip_ratio"] > 0 for step in expected)
    weights, new = whole_weights(critic), value_model_of(policy).state_dict()
    for dp_replicate in (1, 2):
        seen = [result[dp_replicate] for result in results]
        torch.testing.assert_close(torch.cat([its["values"] for its in seen]), values, rtol=1e-12, atol=1e-12)
        for step in range(NUM_STEPS):
            found = joined(its["metrics"][step] for its in seen)
            assert found == pytest.approx(expected[step], rel=1e-6)  # the norm is float32
        for its in seen:
            for mine, theirs in zip(its["gradients"], gradients, strict=True):
                compare(mine, theirs, 1e-10)
            compare(its["weights"], weights, 1e-9)
            assert all(torch.equal(tensor, new[name]) for name, tensor in its["fresh"].items())
            assert all(torch.equal(its["resumed"][name], tensor) for name, tensor in its["after"].items())
            assert not torch.equal(its["after"]["score.weight"], its["weights"]["score.weight"])
            assert all(one == several > 0 for one, several in its["sums"])  # gradients wait for the last one
        alone = make_critic(here, ModelRecipe.of_folder(str(tmp_path / "critic")))
        alone.load(tmp_path / f"checkpoint-{dp_replicate}" / "critic")
        stored = whole_weights(alone)
        assert all(torch.equal(stored[name], tensor) for name, tensor in seen[0]["weights"].items())
