"""An update computes groups without advantages forward only: weights, loss and metrics are as with a backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_rl.controller import RankContext
from hybrid_rl.models import CausalLM
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import PlanSpec
from hybrid_rl.training.spec import LossSpec
from tests.reference.grpo_case import build_model
from tests.support.plans import make_plan
from tests.unit.training.grpo_step import case_config, rolled_batch

# Four groups of four: the first and the third are alike.
REWARDS = (1.0, 1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 0.7, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0)


def updated(
    dtype: torch.dtype, keys: Mapping[str, Any], *, splits: bool, rewards: tuple[float, ...] = REWARDS
) -> tuple[list[Tensor], dict[str, float], list[bool]]:
    """One update with `splits_alike` on or off: the weights, the metrics, and whether each forward pass took gradients.
    The optimizer has momentum from a step before, so that a gradient of zero moves the weights too."""
    config = case_config(learning_rate=1e-3, **keys)
    actor = Actor(CausalLM(build_model(dtype)), config, RankContext(), num_optimizer_steps=4)
    passes: list[bool] = []

    def note(module: nn.Module, args: Any) -> None:
        passes.append(torch.is_grad_enabled())

    for version, batch in enumerate((rolled_batch(), rolled_batch(rewards, version=1))):
        is_split = splits and version == 1  # both sides begin from the same weights, to the bit
        plan = make_plan(batch, tokens_per_micro_batch=1000, splits_alike=is_split)
        if version == 1:
            actor.model.module.model.layers[0].register_forward_pre_hook(note)
        metrics = actor.update(batch, plan, version).result()
    return [parameter.detach().clone() for parameter in actor.model.module.parameters()], metrics, passes


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"loss_type": "dr_grpo"}, {"importance_sampling_level": "sequence", "loss_type": "grpo"}],
    ids=["clip", "dr_grpo", "gspo"],
)
def test_groups_that_are_alike_need_no_backward_pass(
    keys: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    weights, metrics, passes = updated(dtype, keys, splits=True)
    expected, its_metrics, its_passes = updated(dtype, keys, splits=False)
    assert (passes, its_passes) == ([False, True], [True])
    assert metrics.pop("perf/forward_only_share") > 0.3
    assert its_metrics.pop("perf/forward_only_share") == 0
    assert metrics == pytest.approx(its_metrics, rel=1e-5, abs=1e-7)
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def test_if_all_groups_are_alike_the_optimizer_still_takes_its_step() -> None:
    """With gradients of zero: its momentum moves the weights as it would without the rule."""
    alike = (1.0,) * 16
    weights, metrics, passes = updated(torch.float64, {}, splits=True, rewards=alike)
    expected, _, _ = updated(torch.float64, {}, splits=False, rewards=alike)
    assert passes == [True] and metrics["grad_norm"] == 0
    for mine, theirs, first in zip(weights, expected, build_model(torch.float64).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-15)
        assert not torch.equal(mine, first)


@pytest.mark.parametrize(
    "keys",
    [
        {"beta": 0.1},
        {"beta": 0.1, "kl": "reward"},
        {"entropy_coef": 0.01},
        {"entropy_target": 0.5},
        {"positive_nll_coef": 0.1},
        {"top_entropy_quantile": 0.5},
        {"policy_loss": "kl_cov"},
    ],
    ids=lambda keys: " ".join(keys),
)
def test_a_term_of_its_own_wants_the_gradient_of_every_sample(keys: dict[str, Any]) -> None:
    config = case_config(**keys)
    assert not PlanSpec.of(config).splits_alike and not LossSpec.of(config).follows_advantages


def test_only_estimators_that_compare_groups_pack_by_rewards() -> None:
    assert PlanSpec.of(case_config()).splits_alike
    for keys in (
        {"advantage": "reinforce_plus_plus"},
        {"advantage": "rejection", "policy_loss": "reinforce"},
        {"token_level": True},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ):
        assert not PlanSpec.of(case_config(**keys)).splits_alike, keys
