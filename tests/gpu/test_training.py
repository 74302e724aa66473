"""Packed training steps on the device against the CPU: logprobs, loss and gradients."""

from __future__ import annotations

import pytest
import torch

from hybrid_rl.models import CausalLM
from tests.gpu.device import DEVICE
from tests.reference import grpo_case
from tests.unit.models import families
from tests.unit.models.families import SUPPORTED, VOCABULARY
from tests.unit.training import grpo_step

LENGTHS = [19, 1, 35, 7]
TARGETS = torch.tensor([1, 8, 18, 21, 40, 54, 56, 61])  # 19 is a sequence of its own; 20 and 55 start the next two


def outputs_and_gradients(name: str, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """ln p, entropy and the gradient of a mix of both for every parameter, on the CPU in float64."""
    module = families.build(name, dtype=dtype).to(device)
    token_ids = (torch.arange(sum(LENGTHS)) * 7919 + 3) % VOCABULARY
    model = CausalLM(module)
    logprobs, entropy = model.packed_logprobs(token_ids.to(device), LENGTHS, TARGETS.to(device), 0.8)
    direction = torch.linspace(-1, 1, len(TARGETS), device=device)
    ((logprobs + 0.3 * entropy) * direction).sum().backward()
    found = {"logprobs": logprobs, "entropy": entropy}
    found |= {key: p.grad for key, p in module.named_parameters() if p.grad is not None}
    return {key: value.detach().double().cpu() for key, value in found.items()}


@pytest.mark.parametrize("name", SUPPORTED)
def test_families_give_the_numbers_of_the_cpu_in_fp32(name: str) -> None:
    mine, theirs = (outputs_and_gradients(name, device, torch.float32) for device in (DEVICE, "cpu"))
    assert mine.keys() == theirs.keys()
    largest = max(float(value.abs().max()) for value in theirs.values())
    for key, value in mine.items():
        gap = float((value - theirs[key]).abs().max())
        assert gap <= 5e-6 * largest, f"{key} is off by {gap:.1e} of at most {largest:.1e}"


@pytest.mark.parametrize("name", ["qwen2", "llama", "mistral", "gemma2", "gemma3", "gpt2"])
def test_bf16_gradients_point_where_those_of_fp32_point(name: str) -> None:
    """bf16 keeps 8 bits through every layer: single elements are rough, the direction of the whole is not."""
    mine = outputs_and_gradients(name, DEVICE, torch.bfloat16)
    theirs = outputs_and_gradients(name, "cpu", torch.float32)
    keys = [key for key in theirs if key not in ("logprobs", "entropy")]
    flat = [torch.cat([found[key].flatten() for key in keys]) for found in (mine, theirs)]
    assert float(torch.cosine_similarity(*flat, dim=0)) > 0.98
    assert float((mine["logprobs"] - theirs["logprobs"]).abs().mean()) < 0.15


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_families_pass_verification(name: str, dtype: torch.dtype) -> None:
    gap = CausalLM(families.build(name, dtype=dtype).to(DEVICE)).verify()
    assert gap < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded GRPO case with its model on the device."""
    original = grpo_case.build_model
    monkeypatch.setattr(grpo_case, "build_model", lambda *arguments: original(*arguments).to(DEVICE))


@pytest.mark.parametrize("cap", [24, grpo_step.ALL_TOKENS])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_loss_and_gradient_of_a_grpo_step_are_those_of_the_cpu(loss_type: str, cap: int, request) -> None:
    config = grpo_step.case_config(loss_type=loss_type)
    batch = grpo_step.with_advantages(grpo_step.case_batch())
    plan = grpo_step.plan_of(batch, cap)
    expected = grpo_step.loss_and_gradient(batch, config, plan[0])
    request.getfixturevalue("on_device")
    loss, gradient, metrics = grpo_step.loss_and_gradient(batch, config, plan[0])
    assert loss == pytest.approx(expected[0], rel=1e-5, abs=1e-7)
    scale = float(expected[1].abs().max())
    torch.testing.assert_close(gradient.cpu(), expected[1], rtol=0, atol=1e-5 * scale)
    assert metrics == pytest.approx(dict(expected[2]), rel=1e-4, abs=1e-6)


def test_bf16_gradient_of_a_grpo_step_points_where_that_of_fp32_points(on_device: None) -> None:
    config = grpo_step.case_config()
    batch = grpo_step.with_advantages(grpo_step.case_batch())
    rows = grpo_step.plan_of(batch, grpo_step.ALL_TOKENS)[0]
    exact = grpo_step.loss_and_gradient(batch, config, rows)[1].float()
    rough = grpo_step.loss_and_gradient(batch, config, rows, torch.bfloat16)[1].float()
    assert float(torch.cosine_similarity(exact, rough, dim=0)) > 0.98
