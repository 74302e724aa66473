"""Adapters that a run is given, checked before it starts."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from hybrid_rl.config import load_config
from hybrid_rl.errors import CheckpointError, ConfigError
from hybrid_rl.models.lora.folder import CONFIG_FILE, save_adapter
from hybrid_rl.models.lora.inject import init_adapters, inject
from hybrid_rl.models.lora.peft_config import peft_config_of
from hybrid_rl.run.adapters import check_adapters, check_resumed_adapters, own_settings, record_adapters, with_adapters
from tests.support.tiny import build_model

KEYS: dict[str, Any] = {"lora.r": 4, "lora.target_modules": ["q_proj"]}


def test_a_checkpoint_whose_adapters_have_another_scale_is_not_resumed(tmp_path: Path) -> None:
    """Shapes and names are the same, so nothing else would tell."""
    module, config = build_model(), load_config(None, KEYS)[0]
    inject(module, peft_config_of(vars(config.lora)))
    init_adapters(module, seed=0)
    save_adapter(module, tmp_path, torch.float32, base=None)
    check_resumed_adapters(module, tmp_path, config)
    for other, scale in (
        ({"lora.lora_alpha": 64}, "16"),
        ({"peft.alpha_pattern": {"q_proj": 64}}, "16"),
    ):
        told = f"q_proj is of rank 4 and scaled by {scale}; in the checkpoint it is of rank 4 and scaled by 2"
        with pytest.raises(CheckpointError, match=told):
            check_resumed_adapters(module, tmp_path, load_config(None, KEYS | other)[0])
    edited = json.loads((tmp_path / CONFIG_FILE).read_text()) | {"lora_alpha": 64}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match="by the keys, .* scaled by 2; in the checkpoint .* scaled by 16"):
        check_resumed_adapters(module, tmp_path, config)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_wrappers_that_a_deleted_adapter_left_are_taken_out() -> None:
    """They compute nothing, but would pass for an adapter."""
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    model = peft.get_peft_model(build_model(), settings)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["lm_head"]))
    model.delete_adapter("other")
    module, _ = with_adapters(model, None, {})
    assert {name for name, _ in module.named_modules() if name.endswith((".base_layer", ".original_module"))} == {
        *(f"model.layers.{index}.self_attn.q_proj.base_layer" for index in range(2)),
        *(name for name, _ in module.named_modules() if name.endswith("norm.original_module")),
    }
    module = build_model()
    names = list(module.state_dict())
    module.add_adapter(settings)
    assert with_adapters(module, None, {})[0] is module and list(module.state_dict()) != names
    module.delete_adapter("default")
    assert with_adapters(module, None, {})[0] is module and list(module.state_dict()) == names


def test_adapters_that_are_merged_or_switched_off_are_refused() -> None:
    """The base would hold a merged one too, and one that is off gets no gradient."""
    model = peft.get_peft_model(build_model(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    module, config = model.get_base_model(), load_config(None, KEYS)[0]
    brings = own_settings(module)
    model.merge_adapter()
    with pytest.raises(ConfigError, match="adapter of model.layers.0.self_attn.q_proj is merged .*unmerge_adapter"):
        check_adapters(module, brings, config)
    model.unmerge_adapter()
    model.base_model.disable_adapter_layers()
    with pytest.raises(ConfigError, match="adapter of model.layers.0.self_attn.q_proj is switched off"):
        check_adapters(module, brings, config)
    model.base_model.enable_adapter_layers()
    check_adapters(module, brings, config)


def test_adapters_that_an_open_trainer_put_in_are_not_those_of_the_user() -> None:
    """Until they have learned something: close() would take them out."""
    module, config = build_model(), load_config(None, KEYS)[0]
    full, told = load_config(None, {})[0], "adapters of a Trainer that is still open, which have learned nothing"
    inject(module, peft_config_of(vars(config.lora)))
    init_adapters(module, seed=0)
    with pytest.raises(ConfigError, match=told):
        record_adapters(full, frozenset(), module)
    _, _, brings = record_adapters(config, frozenset(), module)
    check_adapters(module, brings, config)
    other = load_config(None, KEYS | {"lora.r": 8})[0]
    with pytest.raises(ConfigError, match=told):
        check_adapters(module, brings, other)
    with torch.no_grad():
        module.model.layers[0].self_attn.q_proj.lora_B["default"].weight += 1.0
    assert record_adapters(full, frozenset(), module)[0].lora.r == 4
    with pytest.raises(ConfigError, match="the keys of lora describe others"):
        check_adapters(module, brings, other)
