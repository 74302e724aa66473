"""The config of adapters that a user brings: what was given is kept, the rest is theirs; and plans check them too."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig

from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.plan.request import Machine, planned_config
from hybrid_rl.models.lora.inject import inject
from hybrid_rl.models.lora.peft_config import peft_config_of
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.planning.models import adapted
from hybrid_rl.run.adapters import check_adapters, record_adapters
from tests.support.tiny import build_model
from tests.unit.training.lora_case import give_values

MODEL = build_model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter's config as peft writes it beside a base model; no weight is read."""
    MODEL.config.save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj"],
        task_type="CAUSAL_LM",
        lora_dropout=0.05,
        init_lora_weights="gaussian",
        base_model_name_or_path=base,
    ).save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def test_keys_that_are_not_given_are_those_of_the_adapter(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also of an adapter that was trained with dropout from another start, which is said."""
    base = ModelRecipe.of_folder(str(folder.parent / "base"))
    config, given, brings = record_adapters(*load_config({"lora.r": 4}), str(folder))
    assert (config.lora.r, vars(config.lora)["lora_alpha"]) == (4, 32)
    assert {"lora.r", "lora.target_modules"} <= given
    check_adapters(base, brings, config)
    assert "adapter_config.json: lora_dropout=0.05 is left out" in caplog.text
    other, _, brings = record_adapters(*load_config({"lora.r": 4, "lora_alpha": 8}), str(folder))
    with pytest.raises(ConfigError, match="the keys of lora describe others.*scaled by 2; in the model it is .* by 8"):
        check_adapters(base, brings, other)


def test_a_scale_that_the_config_does_not_have_is_named() -> None:
    module = build_model()
    inject(module, peft_config_of({"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}))
    give_values(module)
    module.peft_config["default"].inference_mode = True  # as PeftModel.from_pretrained leaves it
    config, _, brings = record_adapters(*load_config(), module)
    check_adapters(module, brings, config)
    module.model.layers[0].self_attn.q_proj.set_scale("default", 0.25)
    with pytest.raises(ConfigError, match="not what its peft config says: by that, .* by 2; in the model .* by 0.5"):
        check_adapters(module, brings, config)


def test_a_start_that_changed_the_base_is_refused_by_its_file(folder: Path) -> None:
    settings = LoraConfig.from_pretrained(str(folder))
    settings.init_lora_weights = "pissa"
    settings.save_pretrained(str(folder))
    with pytest.raises(ConfigError, match="adapter_config.json: init_lora_weights='pissa': "):
        record_adapters(*load_config(), str(folder))


def test_plans_refuse_what_runs_refuse(folder: Path) -> None:
    with pytest.raises(ConfigError, match="target_modules: foo is not the end of any name"):
        adapted(MODEL, load_config({"lora.r": 4, "lora.target_modules": ["q_proj", "foo"]})[0])
    words = [f"model.path={folder}", "device=cpu", "lora.r=8"]
    with pytest.raises(ConfigError, match="the model has adapters already, and the keys of lora describe others"):
        planned_config(words, Machine())
    assert planned_config(words[:2], Machine()).lora.r == 4
