"""The temperature of the samples divides the logits, and no other temperature is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.batch.rollout_files import load_rollout, save_rollout
from hybrid_rl.errors import DataError
from hybrid_rl.models import CausalLM
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.scoring import batch_logprobs, distribution_columns
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels
from tests.reference.grpo_case import build_model, flatten_gradient, load_recorded
from tests.support.float64 import KeepFloat64
from tests.unit.training.grpo_step import case_batch, case_config, with_advantages

T = 0.7
RECORDED = load_recorded()["dapo_kl"]
EVERYTHING = [list(range(16))]


def model(divisor: float = 1.0) -> CausalLM:
    """The recorded model in float64, with logits divided by a number: its last norm has only the head above it."""
    module = build_model(torch.float64)
    with torch.no_grad():
        module.model.norm.weight.div_(divisor)
    return CausalLM(module)


def batch_at(temperature: float) -> Batch:
    return with_advantages(case_batch(RECORDED.old_logprobs, RECORDED.ref_logprobs, temperature=temperature))


def step(batch: Batch, spec: LossSpec, divisor: float = 1.0) -> tuple[float, torch.Tensor]:
    """Loss and gradient, without those of the last norm and the head, which the divisor scales."""
    policy, beside = model(divisor), SideModels(model(divisor) if spec.is_exact_kl else None)
    with KeepFloat64():
        loss, _, _ = micro_batch_loss(policy, batch, spec, MiniBatch.of(batch, spec), beside)
    loss.backward()
    policy.module.model.norm.weight.grad.zero_()
    return float(loss.detach()), flatten_gradient(policy.module)


@pytest.mark.parametrize("kl", ["k3", "exact"])
def test_the_loss_at_a_temperature_is_that_of_divided_logits(kl: str) -> None:
    spec = LossSpec.of(case_config(beta=0.1, kl_estimator=kl, use_bias_correction_kl=False, entropy_coef=0.1))
    loss, gradient = step(batch_at(T), spec)
    expected, wanted = step(batch_at(1.0), spec, T)
    assert loss == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)
    other, _ = step(batch_at(1.0), spec)
    assert abs(other - loss) > 1e-3


def test_saved_samples_give_the_loss_and_gradient_of_live_ones(tmp_path: Path) -> None:
    """float64, exactly equal: the file keeps the temperature, and the configuration's is not asked for."""
    live = batch_at(T).with_columns(trajectory=torch.arange(16))
    save_rollout(tmp_path, 1, 0, 1, live)
    saved = load_rollout(tmp_path, 1)
    loss, gradient = step(live, LossSpec.of(case_config(beta=0.1, temperature=T)))
    again, same = step(saved, LossSpec.of(case_config(beta=0.1, temperature=1.0)))
    assert again == loss and torch.equal(same, gradient)


def test_logprobs_are_those_of_divided_logits() -> None:
    def of(policy: CausalLM, batch: Batch) -> list[torch.Tensor]:
        found = distribution_columns(policy, batch, EVERYTHING, num_top=2, wants_squares=True)
        names = ("old_logprobs", "old_top_logprobs", "sum_pi_squared")
        return [batch_logprobs(policy, batch, EVERYTHING).values, *(found[name].values for name in names)]

    for mine, wanted in zip(of(model(), case_batch(temperature=T)), of(model(T), case_batch()), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)


def test_samples_without_one_temperature_are_refused(make_bench) -> None:
    bench = make_bench()
    batch = bench.rollout()
    temperatures = torch.where(torch.arange(batch.num_samples) < 3, 0.5, 1.0).double()
    mixed = batch.without("temperature").with_columns(temperature=temperatures)
    with pytest.raises(DataError, match=r"made at the temperatures \[0.5, 1.0\]; train on one at a time"):
        bench.group.score(mixed, 1)
    spec, bare = LossSpec.of(case_config()), batch_at(1.0).without("temperature")
    with pytest.raises(DataError, match="no column temperature"):
        micro_batch_loss(model(), bare, spec, MiniBatch.of(bare, spec))
