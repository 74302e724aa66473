"""What is known of a mini-batch of all ranks (entropy quantile, experts, entropy weight), and a reference that follows
the policy, ranks of which one has only groups that teach nothing: on two real ranks as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.load_balance import LoadBalance
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import PlanSpec
from hybrid_rl.training.mini_batch import look_ahead
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM
from hybrid_rl.training.spec import LossSpec, MiniBatch
from hybrid_rl.weights.sources import StateSource
from hybrid_rl.workers.reference import Reference
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import context_of, sharded
from tests.reference import grpo_case
from tests.unit.training.grpo_step import case_batch, case_config, rolled_batch, with_advantages
from tests.unit.training.test_load_balance import COEF, moe

pytestmark = pytest.mark.slow

# Samples of each rank's micro-batches: unequal shares, and one of none.
SPLIT = [[[0, 1, 2], [4, 3], [5, 6, 7, 8, 9]], [[10, 11, 12], [13, 14, 15], []]]
NUM_UPDATES = 4


def rollout() -> Batch:
    """The recorded samples, as an engine leaves them."""
    batch = with_advantages(case_batch())
    completions = batch["completion_ids"]
    return batch.with_columns(
        rollout_logprobs=completions.with_values(torch.full((len(completions.values),), -3.0)),
        policy_version=completions.with_values(torch.zeros_like(completions.values)),
    )


def share_of(rank: int) -> tuple[Batch, list[list[int]]]:
    """The samples of a rank one after the other, and its micro-batches of them."""
    sizes = [len(rows) for rows in SPLIT[rank]]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    cut = [[start + i for i in range(size)] for start, size in zip(starts, sizes, strict=True)]
    return rollout().select([row for rows in SPLIT[rank] for row in rows]), cut


def config_of(target: float) -> TrainerConfig:
    keys: dict[str, Any] = {"top_entropy_quantile": 0.3, "entropy_target": target, "entropy_coef": 0.1}
    # Adam's steps are all but proportional to gradients with such an epsilon: no noise is blown up.
    keys |= {"entropy_coef_delta": 0.05, "router_aux_loss_coef": COEF, "learning_rate": 0.3, "adam_epsilon": 1.0}
    return case_config(loss_type="dapo", **keys)


def trained(
    model: CausalLM, batch: Batch, micro_batches: list[list[int]], target: float, context: RankContext
) -> dict[str, Any]:
    """What is known beforehand of the first mini-batch, the entropy weight after each update, and the model."""
    config = config_of(target)
    balance = LoadBalance.of(model, COEF)
    spec = LossSpec.of(config)
    mini = look_ahead(model, batch, micro_batches, spec, MiniBatch.of(batch, spec), balance, context)
    assert mini.least_entropy is not None and mini.expert_load is not None
    actor = Actor(model, config, context, num_optimizer_steps=NUM_UPDATES)
    weights = []
    for version in range(NUM_UPDATES):
        actor.update(batch, [micro_batches], version)
        weights.append(actor.entropy_weight.state_dict())
    return {"least": float(mini.least_entropy), "counts": mini.expert_load.counts, "weights": weights}


def on_ranks(rank: int, num_ranks: int, target: float) -> dict[str, Any]:
    module = moe("Qwen3Moe")
    found = trained(sharded(module), *share_of(rank), target, context_of(rank, num_ranks))
    return found | {"parameters": [parameter.full_tensor().detach() for parameter in module.parameters()]}


def alone(batch: Batch, target: float) -> dict[str, Any]:
    model = CausalLM(moe("Qwen3Moe"))
    cut = [[*range(0, batch.num_samples, 2)], [*range(1, batch.num_samples, 2)]]
    found = trained(model, batch, cut, target, RankContext())
    return found | {"parameters": [parameter.detach() for parameter in model.module.parameters()]}


def test_what_is_known_of_the_mini_batch_is_that_of_all_ranks() -> None:
    """The target is between the entropies of the updates, so that the bonus is paid after some of them only."""
    entropies = [weight["entropy"] for weight in alone(rollout(), 0.1)["weights"]]
    target = (min(entropies) + max(entropies)) / 2
    expected = alone(rollout(), target)
    assert len({weight["entropy_coef"] for weight in expected["weights"]}) > 1
    parts = [alone(share_of(rank)[0], target) for rank in (0, 1)]
    # One rank's samples alone would give other numbers.
    assert all(abs(part["least"] - expected["least"]) > 1e-3 for part in parts)
    assert all(abs(part["weights"][0]["entropy"] - expected["weights"][0]["entropy"]) > 1e-3 for part in parts)
    for found in run_ranks(on_ranks, 2, target):
        assert found["least"] == pytest.approx(expected["least"], rel=1e-6)
        torch.testing.assert_close(found["counts"], expected["counts"], rtol=0, atol=0)
        for mine, theirs in zip(found["weights"], expected["weights"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for parameter, wanted in zip(found["parameters"], expected["parameters"], strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=0, atol=1e-5)


SHARE = 0.25


def modules() -> tuple[Any, Any]:
    """A reference and the policy that it is to follow."""
    old, policy = grpo_case.build_model(torch.float32), grpo_case.build_model(torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5).add_(0.01)
    return old, policy


def followed(rank: int, num_ranks: int, share: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The reference's weights put together, and what it gives for this rank's samples."""
    context, config = context_of(rank, num_ranks), case_config(beta=0.1)
    old, module = modules()
    reference = Reference(ModelRecipe.of_module(old, StateSource(old.state_dict())), config, context)
    assert isinstance(reference.model, ShardedCausalLM)
    reference.take(sharded(module), share)
    batch, cut = share_of(rank)
    column = reference.logprobs(batch, [cut])
    named = reference.model.module.named_parameters()
    return {name: parameter.full_tensor() for name, parameter in named}, column.values  # type: ignore[operator]


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.sweep), SHARE])
def test_a_sharded_reference_takes_what_a_whole_one_takes(share: float) -> None:
    old, policy = modules()
    before, target = dict(old.named_parameters()), dict(policy.named_parameters())
    expected = {name: (1 - share) * before[name] + share * target[name] for name in before}
    reference = Reference(old, case_config(beta=0.1), RankContext())
    reference.take(CausalLM(policy), share)
    for rank, (whole, logprobs) in enumerate(run_ranks(followed, 2, share)):
        assert whole.keys() == expected.keys()
        for name, parameter in whole.items():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6, msg=name)
        batch, cut = share_of(rank)
        mine = reference.logprobs(batch, [cut]).values
        torch.testing.assert_close(logprobs, mine, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------- groups that teach nothing

# Rewards of groups of four: alike, mixed; alike, alike. A micro-batch takes one group: ranks have unequal numbers too.
ALIKE = (1.0,) * 4 + (0.0, 1.0, 1.0, 0.3) + (0.0,) * 4 + (0.5,) * 4
STILL_KEYS: dict[str, Any] = {"learning_rate": 1e-3, "tokens_per_micro_batch": 45, "prompts_per_step": 4}


def teach_on_ranks(rank: int, num_ranks: int) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """The weights put together from the shards, and whether each forward pass took gradients."""
    context = context_of(rank, num_ranks)
    module = grpo_case.build_model(torch.float32)
    config, passes = case_config(**STILL_KEYS), list[bool]()
    actor = Actor(sharded(module), config, context, num_optimizer_steps=4)
    module.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    mine = rolled_batch(ALIKE).select([*range(8 * rank, 8 * rank + 8)])
    actor.update(mine, PlanSpec.of(config).plan(mine, 0, context, torch.device("cpu")), 0)
    return {name: parameter.full_tensor() for name, parameter in module.named_parameters()}, passes


def test_ranks_that_teach_nothing_take_part() -> None:
    (first, its_passes), (second, other_passes) = run_ranks(teach_on_ranks, 2)
    assert its_passes == other_passes and its_passes[0] is False and its_passes[-1] is True
    config, context = case_config(**STILL_KEYS), RankContext()
    actor = Actor(CausalLM(grpo_case.build_model(torch.float32)), config, context, num_optimizer_steps=4)
    actor.update(rolled_batch(ALIKE), [[[*range(16)]]], 0)
    for name, parameter in actor.model.module.named_parameters():
        torch.testing.assert_close(first[name], parameter.detach(), rtol=0, atol=1e-6, msg=name)
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=0, msg=name)
