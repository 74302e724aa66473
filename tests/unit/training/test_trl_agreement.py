"""One GRPO step on an identical batch gives TRL's loss, gradient, advantages and metrics."""

import pytest
import torch

from tests.reference.grpo_case import RecordedCase, load_recorded
from tests.unit.training.grpo_step import (
    ALL_TOKENS,
    case_batch,
    case_config,
    loss_and_gradient,
    plan_of,
    with_advantages,
)

CASES = load_recorded()
# The bound that was promised; two float32 implementations differ by 2.5e-7 here, either from float64 by 3e-7.
TOLERANCE = 1e-6
CONFIG_KEYS = (
    *("scale_rewards", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "mask_truncated_completions"),
)


def ours(case: RecordedCase):
    """Our batch and config for a recorded case."""
    keys = {name: case.options[name] for name in CONFIG_KEYS}
    if case.options["beta"]:
        keys |= {name: case.options[name] for name in ("beta", "use_bias_correction_kl")}
    # bnpo divides by the tokens of a micro-batch: over an unsplit batch that is dapo.
    loss_type = {"bnpo": "dapo"}.get(case.options["loss_type"], case.options["loss_type"])
    config = case_config(loss_type=loss_type, **keys)
    batch = case_batch(case.old_logprobs, case.ref_logprobs, temperature=case.options["temperature"])
    batch = with_advantages(batch, case.options["scale_rewards"])
    return batch, config


@pytest.mark.parametrize(
    ("cap", "dtype"),
    [
        pytest.param(ALL_TOKENS, torch.float32, id="whole-fp32"),
        pytest.param(40, torch.float64, id="cut-fp64"),
        pytest.param(40, torch.float32, id="cut-fp32", marks=pytest.mark.sweep),
        pytest.param(ALL_TOKENS, torch.float64, id="whole-fp64", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_are_those_of_trl(name: str, cap: int, dtype: torch.dtype) -> None:
    """clip_ratio counts tokens, or samples if their tokens share one ratio; kl includes the importance weight."""
    case = CASES[name]
    batch, config = ours(case)
    plan = plan_of(batch, cap)[0]
    assert (len(plan) == 1) == (cap == ALL_TOKENS)
    loss, gradient, metrics = loss_and_gradient(batch, config, plan, dtype)
    assert abs(loss - case.loss) < TOLERANCE
    assert gradient.abs().max() > 1e-3  # a gradient of nothing would agree with nothing
    torch.testing.assert_close(gradient.float(), case.gradient, rtol=0, atol=TOLERANCE)
    theirs = {key: value for key, value in case.metrics.items() if key in ("entropy", "kl") or "clip_ratio/" in key}
    assert len(theirs) >= 6
    assert {key: metrics[key] for key in theirs} == pytest.approx(theirs, abs=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_advantages_are_those_of_trl(name: str) -> None:
    case = CASES[name]
    batch, _ = ours(case)
    first_tokens = batch["advantages"].values[batch["advantages"].offsets[:-1]]
    torch.testing.assert_close(first_tokens, torch.tensor(case.advantages), rtol=0, atol=TOLERANCE)


def test_no_two_cases_are_alike() -> None:
    """Were two alike, agreement in one would prove nothing about its option."""
    cases = list(CASES.values())
    for index, case in enumerate(cases):
        assert all((case.gradient - other.gradient).abs().max() > 10 * TOLERANCE for other in cases[:index])
