"""The weight of the entropy bonus that follows the measured entropy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from hybrid_rl.algos.masked import next_entropy_coef
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import ConfigError
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.training.entropy import EntropyWeight
from tests.unit.training.combination_case import resolved, train
from tests.unit.training.written_losses import entropy_of, least_entropy
from tests.unit.training.written_out import expected_gradient, samples_of

BOUNDS = {"target": 0.5, "low": 0.01, "high": 0.03, "delta": 0.01}


@pytest.mark.parametrize(
    ("coef", "measured", "expected"),
    # The branches of `_compute_loss` in the GRPOTrainer of TRL 1.16.0, by hand.
    [(0.015, 0.5, 0.025), (0.025, 0.4, 0.03), (0.03, 0.51, 0.02), (0.015, 2.0, 0.01), (0.02, math.nan, 0.01)],
)
def test_the_rule_of_trl(coef: float, measured: float, expected: float) -> None:
    assert next_entropy_coef(coef, measured, **BOUNDS) == pytest.approx(expected)


KEYS: dict[str, Any] = {"entropy_coef": 0.1, "old_logprobs": "recompute"}


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_each_optimizer_step_pays_what_the_step_before_says(
    share: float, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is between the entropies of the steps; the gradient of each is that of a fixed weight."""
    keys = KEYS | {"num_iterations": 4, "top_entropy_quantile": share, "loss_type": loss_type, "learning_rate": 0.3}
    measured = entropies(train(resolved(keys), monkeypatch, dense=False), share)
    target = (min(measured[:3]) + max(measured[:3])) / 2
    more = {"entropy_target": target, "entropy_coef_delta": 0.05}
    trained = train(resolved(keys | more), monkeypatch, dense=False)
    last, coef, paid, moved = math.inf, 0.1, [], []
    for step, entropy in enumerate(entropies(trained, share)):
        applied = coef if last <= target else 0.0
        fixed = dataclasses.replace(trained.config.algorithm, entropy_coef=applied)
        same = dataclasses.replace(trained, config=dataclasses.replace(trained.config, algorithm=fixed))
        assert float((trained.gradients[step] - expected_gradient(same, step)).abs().max()) < 3e-6
        last, coef = entropy, (min(coef + 0.05, 1.0) if entropy <= target else max(coef - 0.05, 0.0))
        paid.append(applied)
        moved.append(coef)
    assert paid[0] == 0 and any(paid) and 0 in paid[1:], (paid, measured, target)
    assert trained.metrics["entropy_coef"] == pytest.approx(sum(moved) / 4)


def entropies(trained: Any, share: float) -> list[float]:
    """The mean entropy in each optimizer step of the tokens that are paid for it."""
    found = []
    for table in trained.tables:
        tokens = [token for sample in samples_of(trained, table) for token in sample.tokens if token.kept]
        least = least_entropy(tokens, share)
        values = [entropy_of(token) for token in tokens if entropy_of(token) >= least]
        found.append(sum(values) / len(values))
    return found


def weight_of(config: TrainerConfig) -> EntropyWeight:
    return EntropyWeight(config.entropy, config.algorithm.entropy_coef, is_subset=False)


def test_a_resumed_run_goes_on_from_its_weight() -> None:
    config = resolved({"entropy_target": 1.0, "entropy_coef": 0.2})
    first, sums = weight_of(config), MetricSums()
    assert weight_of(resolved({"entropy_coef": 0.2})).applied == 0.2 and first.applied == 0.0
    sums.mean("entropy", 5.0, 10)
    first.follow(sums, RankContext())
    second = weight_of(config)
    second.load_state_dict(first.state_dict())
    assert second.applied == first.applied == pytest.approx(0.205)
    assert weight_of(config).state_dict() == {"entropy_coef": 0.2, "entropy": None}


def test_the_start_lies_within_the_bounds() -> None:
    with pytest.raises(ConfigError, match="entropy_coef=0.2 is the first .* entropy_coef_max=0.1 bound it; give one"):
        resolved({"entropy_target": 1.0, "entropy_coef": 0.2, "entropy_coef_max": 0.1})
    with pytest.raises(ConfigError, match="entropy_coef is fixed; set entropy_target"):
        resolved({"entropy_coef_delta": 0.1})


def test_a_step_without_tokens_in_the_loss_measures_nothing() -> None:
    """It is not a step of entropy 0, which is below every target: no weight rises, and no bonus is paid after it."""
    config = resolved({"entropy_target": 1.0, "entropy_coef": 0.2})
    weight, high = weight_of(config), MetricSums()
    weight.follow(MetricSums(), RankContext())
    assert weight.state_dict() == {"entropy_coef": 0.2, "entropy": None} and weight.applied == 0.0
    high.mean("entropy", 50.0, 10)
    weight.follow(high, RankContext())
    before = weight.state_dict()
    assert weight.follow(MetricSums(), RankContext()).result() == {"entropy_coef": pytest.approx(0.195)}
    assert weight.state_dict() == before and weight.applied == 0.0
