"""Adapter folders against peft: it reads what is written here, and what it writes is read here. Merged models."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybrid_rl.errors import ModelError
from hybrid_rl.models.lora.factors import low_rank_changes
from hybrid_rl.models.lora.folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterSource,
    load_adapter,
    read_settings,
    save_adapter,
    stored_parameters,
)
from hybrid_rl.models.lora.inject import init_adapters, inject
from hybrid_rl.models.lora.peft_config import peft_config_of
from hybrid_rl.models.saving import save_weights
from hybrid_rl.weights.plain import is_adapted, plain
from tests.unit.models.families import build
from tests.unit.training.lora_case import adapted

ATTENTION = ["q_proj", "v_proj"]
CASES = {
    "all linear, rsLoRA": ("qwen2", {"use_rslora": True, "rank_pattern": {"q_proj": 5}}),
    "DoRA and a module trained whole": (
        "llama",
        {"use_dora": True, "target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    ),
    "fused experts": (
        "qwen3-moe",
        {
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}
IDS = torch.tensor([[5, 9, 2, 40, 7, 3]])


@pytest.mark.parametrize("case", CASES)
def test_peft_reads_what_is_written_and_is_read_itself(case: str, tmp_path: Path) -> None:
    family, more = CASES[case]
    keys = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", **more}
    module = adapted(family, keys, torch.float32)
    expected = module(IDS).logits.detach()
    save_adapter(module, tmp_path / "mine", torch.float32, base=None)

    told = json.loads((tmp_path / "mine" / CONFIG_FILE).read_text())
    assert (told["peft_type"], told["r"], told["lora_alpha"]) == ("LORA", 3, 6)
    stored = load_file(tmp_path / "mine" / WEIGHTS_FILE)
    # The names that peft itself gives to these tensors.
    theirs = {f"base_model.model.{name}": t for name, t in peft.get_peft_model_state_dict(module).items()}
    assert stored.keys() == theirs.keys() and all(torch.equal(stored[name], theirs[name]) for name in stored)

    wrapped = peft.PeftModel.from_pretrained(build(family, dtype=torch.float32), str(tmp_path / "mine"))
    assert torch.equal(wrapped(IDS).logits, expected)

    changes = low_rank_changes(module, torch.float32)
    with plain(module):
        save_weights(module, tmp_path / "merged", torch.float32, changes=changes)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not is_adapted(merged)
    torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-5, rtol=0)

    wrapped.save_pretrained(str(tmp_path / "theirs"))
    again = build(family, dtype=torch.float32)
    inject(again, read_settings(tmp_path / "theirs"))
    init_adapters(again, seed=5)
    assert not torch.equal(again(IDS).logits, expected)
    load_adapter(again, AdapterSource(str(tmp_path / "theirs")))
    assert torch.equal(again(IDS).logits, expected)


def test_what_does_not_fit_is_refused_before_anything_is_overwritten(tmp_path: Path) -> None:
    module = build("qwen2", dtype=torch.float32)
    inject(module, peft_config_of({"r": 2, "lora_alpha": 4, "target_modules": ATTENTION}))
    init_adapters(module, seed=0)
    save_adapter(module, tmp_path, torch.float32, base=None)
    path, before = tmp_path / WEIGHTS_FILE, {n: p.clone() for n, p in stored_parameters(module).items()}
    good = load_file(path)
    first = min(good)
    for change, told in (
        ({first: torch.zeros(3, 32)}, rf"{first} is \[3, 32\], not \[2, 32\]"),
        ({"base_model.model.lm_head.weight": torch.zeros(2)}, "lm_head.weight has no place in the model"),
    ):
        save_file({name: tensor + 1 for name, tensor in (good | change).items()}, path)
        with pytest.raises(ModelError, match=told):
            load_adapter(module, AdapterSource(str(tmp_path)))
    save_file({name: tensor + 1 for name, tensor in good.items() if name != first}, path)
    with pytest.raises(ModelError, match=f"{first} is missing"):
        load_adapter(module, AdapterSource(str(tmp_path)))
    assert all(torch.equal(before[name], p) for name, p in stored_parameters(module).items())
    path.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="only adapter_model.bin; load it with peft once"):
        load_adapter(module, AdapterSource(str(tmp_path)))
