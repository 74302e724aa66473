"""How a mini-batch is cut and ordered changes neither loss nor gradient nor metrics."""

import itertools
import math

import pytest
import torch

from hybrid_rl.models import CausalLM
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.spec import Counts, LossSpec
from tests.reference.grpo_case import REWARDS, build_model, load_recorded
from tests.unit.training.grpo_step import (
    case_batch,
    case_config,
    loss_and_gradient,
    terms_of,
    with_advantages,
)

pytestmark = pytest.mark.slow

RECORDED = load_recorded()["dapo_kl"]
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "sequence_sum")
# Sums of some hundred rounded terms of order 0.1, taken in another order.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
ONE_FAILED = [math.nan if index in (1, 6) else reward for index, reward in enumerate(REWARDS)]


def equal_cuts(count: int, order: list[int]) -> list[list[int]]:
    size = len(order) // count
    return [order[start : start + size] for start in range(0, len(order), size)]


def batch_and_config(loss_type: str, rewards=REWARDS, **keys):
    batch = with_advantages(case_batch(RECORDED.old_logprobs, RECORDED.ref_logprobs, rewards))
    return batch, case_config(loss_type=loss_type, beta=0.04, **keys)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.sweep), torch.float64], ids=["fp32", "fp64"]
)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    ("rewards", "keys"),
    [
        (REWARDS, {}),
        (ONE_FAILED, {"mask_truncated_completions": True}),
        (REWARDS, {"importance_sampling_level": "sequence"}),
    ],
    ids=["plain", "failed+truncated", "sequence"],
)
def test_cut_and_order_change_nothing(loss_type: str, rewards, keys, dtype: torch.dtype) -> None:
    batch, config = batch_and_config(loss_type, rewards, **keys)
    whole = list(range(16))
    expected_loss, expected, expected_metrics = loss_and_gradient(batch, config, [whole], dtype)
    counts, orders = (2, 4, 8, 16), (whole, torch.randperm(16).tolist())
    every = dtype == torch.float32  # in the sweep; else the fewest as they come, and the most shuffled
    for count, order in itertools.product(counts, orders) if every else [(2, orders[0]), (16, orders[1])]:
        loss, gradient, metrics = loss_and_gradient(batch, config, equal_cuts(count, order), dtype)
        assert abs(loss - expected_loss) < TOLERANCE[dtype]
        torch.testing.assert_close(gradient, expected, rtol=0, atol=TOLERANCE[dtype])
        assert metrics == pytest.approx(expected_metrics, abs=1e-5)  # metrics are summed in float32


@pytest.mark.parametrize("keys", [{"old_logprobs": "detach"}, {"old_logprobs": "recompute"}], ids=["detach", "ratio"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_empty_micro_batches_change_nothing(loss_type: str, keys) -> None:
    """What a rank runs that has fewer micro-batches than another one."""
    batch, config = batch_and_config(loss_type, **keys)
    if keys["old_logprobs"] == "detach":
        batch = batch.without("old_logprobs")
    cuts = [list(range(8)), list(range(8, 16))]
    expected_loss, expected, expected_metrics = loss_and_gradient(batch, config, cuts)
    loss, gradient, metrics = loss_and_gradient(batch, config, [[], *cuts, [], []])
    assert loss == expected_loss
    assert torch.equal(gradient, expected)
    assert metrics == expected_metrics


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_rank_of_empty_micro_batches_gives_every_parameter_a_gradient_of_zero(loss_type: str) -> None:
    """Not None: ranks that reduce gradients together wait for each other's."""
    batch, config = batch_and_config(loss_type)
    batch = batch.select([])
    model = CausalLM(build_model(torch.float32))
    of_others = Counts(100, 16, 40)
    loss, _, _ = micro_batch_loss(model, micro_batch(batch, []), *terms_of(config, of_others))
    loss.backward()
    assert loss.item() == 0.0
    gradients = [parameter.grad for parameter in model.module.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    assert Counts.of(batch, LossSpec.of(config)) == Counts()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_failed_sample_might_as_well_not_be_there(loss_type: str) -> None:
    """Masked: not in the baseline, not in the loss, not in a denominator, although the batch keeps it."""
    batch, config = batch_and_config(loss_type, ONE_FAILED)
    scored = [index for index, reward in enumerate(ONE_FAILED) if not math.isnan(reward)]
    small = batch.without("advantages").select(scored)
    with_loss, with_gradient, _ = loss_and_gradient(batch, config, [list(range(16))], torch.float64)
    loss, gradient, _ = loss_and_gradient(with_advantages(small), config, [list(range(14))], torch.float64)
    assert abs(loss - with_loss) < 1e-12
    torch.testing.assert_close(gradient, with_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("column", "value"), [("old_logprobs", -200.0), ("ref_logprobs", 200.0)])
def test_tokens_of_no_policy_have_no_gradient(column: str, value: float) -> None:
    """completion_mask False (a tool's answer, say) takes a token out of numerator and denominator."""
    batch, config = batch_and_config("dapo")
    mask = batch["completion_mask"].values.clone()
    mask[::3] = False
    masked = batch.without("completion_mask").with_columns(completion_mask=batch["completion_ids"].with_values(mask))
    weird = masked[column].values.clone()
    weird[::3] = value  # exp(200) overflows float32: it must not reach the sum
    spoilt = masked.without(column).with_columns(**{column: masked["completion_ids"].with_values(weird)})
    loss, gradient, _ = loss_and_gradient(masked, config, [list(range(16))])
    spoilt_loss, spoilt_gradient, _ = loss_and_gradient(spoilt, config, [list(range(16))])
    assert loss == spoilt_loss
    assert torch.equal(gradient, spoilt_gradient)


def test_masked_sample_without_any_token_in_the_loss() -> None:
    """All samples of a mini-batch unscored: loss 0, gradient 0, no division by zero."""
    batch, config = batch_and_config("grpo", [math.nan] * 16)
    loss, gradient, metrics = loss_and_gradient(batch, config, [list(range(8)), list(range(8, 16))])
    assert loss == 0.0
    assert not gradient.any()
    assert "entropy" not in metrics
