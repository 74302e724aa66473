"""One GRPO step with the same LoraConfig on an identical batch gives TRL's loss, KL, reference and gradients."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.models.lora.inject import inject
from hybrid_rl.models.lora.peft_config import keys_of, peft_config_of
from hybrid_rl.models.packed.causal_lm import WithoutAdapters
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.scoring import batch_logprobs
from hybrid_rl.training.spec import Counts, LossSpec
from tests.reference import grpo_case
from tests.unit.training.grpo_step import case_batch, case_config, plan_of, terms_of, with_advantages
from tests.unit.training.test_trl_agreement import CONFIG_KEYS, TOLERANCE

RECORDED: dict[str, Any] = json.loads(grpo_case.RECORDED_LORA.read_text())
GRADIENTS = load_file(grpo_case.RECORDED_LORA_GRADIENTS)


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_a_step_is_that_of_trl(name: str) -> None:
    from peft import LoraConfig

    case, options = RECORDED["cases"][name], RECORDED["options"]
    keys = {f"lora.{key}": value for key, value in keys_of(LoraConfig(**case["lora"])).items()}
    names = (*CONFIG_KEYS, "loss_type", "beta", "use_bias_correction_kl")
    config = case_config(**{key: options[key] for key in names}, **keys)
    module = grpo_case.build_model()
    inject(module, peft_config_of(vars(config.lora)))
    grpo_case.fill_adapters(module)
    model = CausalLM(module)
    batch = with_advantages(case_batch(old=case["old_logprobs"]))
    plan = plan_of(batch, 60)[0]
    assert len(plan) > 1
    reference = batch_logprobs(WithoutAdapters(model), batch, plan)  # type: ignore[arg-type]
    torch.testing.assert_close(reference.values, torch.tensor(sum(case["ref_logprobs"], [])), rtol=0, atol=2e-6)

    batch = batch.with_columns(ref_logprobs=reference)
    counts = Counts.of(batch, LossSpec.of(config))
    sums, total = MetricSums(), 0.0
    for rows in plan:
        loss, stats, _ = micro_batch_loss(model, micro_batch(batch, rows), *terms_of(config, counts))
        loss.backward()
        total += loss.item()
        sums.merge(stats)
    assert total == pytest.approx(case["loss"], abs=TOLERANCE)
    assert sums.result()["kl"] == pytest.approx(case["kl"], rel=TOLERANCE)
    found = {f"{name}/{key}": p.grad for key, p in module.named_parameters() if p.requires_grad}
    theirs = {key: gradient for key, gradient in GRADIENTS.items() if key.startswith(f"{name}/")}
    assert found.keys() == theirs.keys()
    for key, gradient in theirs.items():
        assert float(gradient.abs().max()) > 1e-3, key
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=TOLERANCE, msg=key)
