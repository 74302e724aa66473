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
    "DoRA": ("qwen2", {**PLAIN, "use_dora": True}),
    "rsLoRA, ranks of some": (
        "llama",
        {"r": 2, "target_modules": ["q_proj", "mlp.down_proj"], "use_rslora": True, "lora_alpha": 3}
        | {"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"down_proj": 7}},
    ),
    "head and embedding whole": ("qwen2", {**PLAIN, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "transposed layers": ("gpt2", PLAIN),
}


FAMILIES = ("qwen2", "llama", "gemma2", "qwen3-moe")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in FAMILIES or dtype == torch.float64 else pytest.mark.sweep)
        for name in CASES
        for dtype in TOLERANCE
    ],
)
def test_loss_and_gradients_are_those_of_peft(name: str, dtype: torch.dtype) -> None:
    family, keys = CASES[name]
    theirs, old = by_peft(family, keys, dtype)
    model = CausalLM(adapted(family, keys, dtype))
    loss = step(model, config_of(keys), recorded(old))
    check((loss, gradients(model.module)), theirs, TOLERANCE[dtype])


def test_checkpoints_and_the_exact_kl_change_nothing() -> None:
    theirs, old = by_peft("qwen2", PLAIN, torch.float32, exact_kl=True)
    model = CausalLM(adapted("qwen2", PLAIN, torch.float32), activation_offload=True)
    model.enable_gradient_checkpointing()
    loss = step(model, config_of(PLAIN, kl_estimator="exact"), recorded(old))
    check((loss, gradients(model.module)), theirs, TOLERANCE[torch.float32])
