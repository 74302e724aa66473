"""Loss and gradients of adapters against peft on padded samples, written out in plain PyTorch."""

from typing import Any

import pytest
import torch

from hybrid_rl.models import CausalLM
from tests.unit.training.lora_case import adapted, by_peft, check, config_of, gradients, recorded, step

# Both orders of summation are rounded; log-probabilities of the batch are kept as float32.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
PLAIN = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
EXPERTS = {**PLAIN, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", PLAIN),
    "llama": ("llama", PLAIN),
    "gemma2": ("gemma2", PLAIN),
    "qwen3-moe": ("qwen3-moe", EXPERTS),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_peft(name: str, dtype: torch.dtype) -> None:
    family, keys = CASES[name]
    theirs, old = by_peft(family, keys, dtype)
    model = CausalLM(adapted(family, keys, dtype))
    loss = step(model, config_of(keys), recorded(old))
    check((loss, gradients(model.module)), theirs, TOLERANCE[dtype])
