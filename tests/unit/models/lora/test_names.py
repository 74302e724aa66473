"""What adapters are asked for is there, or refused with what there is; and how many parameters they have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PrefixTuningConfig, VeraConfig

from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError
from hybrid_rl.models.lora.adapter_size import adapter_size, copy_on_meta
from hybrid_rl.models.lora.folder import read_settings, settings_of
from hybrid_rl.models.lora.form import difference, form_of
from hybrid_rl.models.lora.inject import inject
from hybrid_rl.models.lora.peft_config import keys_of, peft_config_of
from tests.support.tiny import build_model
from tests.unit.models.families import build

MODEL = build_model()  # hidden 16, inner 32, 2 layers, 2 heads of 8, 1 of keys and values
ALL = {"r": 4, "target_modules": "all-linear"}


def size_of(**keys: Any) -> int:
    return adapter_size(MODEL, peft_config_of(keys)).num_trained


def test_parameters_are_counted() -> None:
    """r (in + out) for each layer: q 16+16, k and v 16+8, o 16+16, gate and up 16+32, down 32+16."""
    layer = 32 + 2 * 24 + 32 + 2 * 48 + 48
    assert size_of(**ALL) == 2 * 4 * layer
    assert size_of(r=4, target_modules=["q_proj"]) == 2 * 4 * 32
    assert size_of(r=4, target_modules=r".*\.1\.self_attn\.[qk]_proj") == 4 * (32 + 24)
    assert size_of(**ALL, rank_pattern={"q_proj": 1}) == 2 * (4 * layer - 3 * 32)
    assert size_of(**ALL, modules_to_save=["norm"]) == 2 * 4 * layer + 16 * 5  # those of the layers as well
    # peft's choice for this architecture: q_proj and v_proj.
    assert size_of(r=4, target_modules=None) == 2 * 4 * (32 + 24)
    found = adapter_size(MODEL, peft_config_of(ALL))
    assert found.num_base == sum(parameter.numel() for parameter in MODEL.parameters())
    assert str(found).startswith(f"adapter r=4, {100 * found.num_trained / found.num_base:.2g} % trained (2,048 ")


def test_counting_touches_nothing() -> None:
    names = {name for name, _ in MODEL.named_parameters()}
    copy = copy_on_meta(MODEL)
    size_of(**ALL)
    assert {name for name, _ in MODEL.named_parameters()} == names
    assert all(p.requires_grad and not p.is_meta for p in MODEL.parameters())
    assert all(p.is_meta for p in copy.parameters()) and {name for name, _ in copy.named_parameters()} == names


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"target_modules": ["q_proj", "query"]},
            "target_modules: query is not the end of any name in .* q_proj",
        ),
        ({"target_modules": "q_proj"}, r"'q_proj' matches nothing .*regular expression of whole names .*\[q_proj\]"),
        ({"target_modules": "(q_proj"}, "is no regular expression"),
        ({"target_modules": "*.q_proj"}, r"is no regular expression: .*; \.\*\.q_proj is meant$"),
        ({"exclude_modules": ".*"}, "lora: no layer is left for an adapter: exclude_modules or"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["q_proj"]}, "lora: no layer is left for an adapter"),
        (
            {"target_modules": "all_linear"},
            "matches nothing in this model; all-linear is meant; .* down_proj$",
        ),
        ({"target_modules": []}, "names no layer"),
        ({"exclude_modules": ["nothing"]}, "exclude_modules: nothing is not"),
        ({"modules_to_save": ["score"]}, "modules_to_save: score is not .* embed_tokens, .*, lm_head$"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "experts.gate_up_proj is not .* no experts that are fused"),
        ({"rank_pattern": {"query": 3}}, "rank_pattern='query' matches nothing"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj=0 must be a whole number above 0"),
        ({"rank_pattern": {"q_proj": 2.0}}, "rank_pattern: q_proj=2.0 must be a whole number above 0"),
        ({"rank_pattern": {"q_proj": True}}, "rank_pattern: q_proj=True must be a whole number above 0"),
        (
            {"target_modules": ["q_proj"], "alpha_pattern": {"v_proj": 2}},
            "alpha_pattern: no layer of 'v_proj' has an adapter; there are q_proj$",
        ),
        ({"target_modules": ["norm"]}, "RMSNorm"),
        ({"target_modules": ["self_attn"]}, "layer of type Qwen2Attention: only linear layers .* inside it$"),
    ],
)
def test_names_that_are_not_there_are_refused(keys: dict[str, Any], sentence: str) -> None:
    """peft itself ignores most of them, or some."""
    with pytest.raises(ConfigError, match=sentence):
        size_of(**{**ALL, **keys})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (object(), "peft_config=object is no peft config"),
        (PrefixTuningConfig(task_type="CAUSAL_LM"), "PrefixTuningConfig learns tokens in front of the prompt"),
        (VeraConfig(), "VeraConfig: of peft's methods only LoRA"),
        (LoraConfig(lora_dropout=0.05), "lora_dropout=0.05: dropout makes the ratio .* set lora_dropout=0"),
        (LoraConfig(bias="all"), "bias='all': biases of the model are frozen"),
        (LoraConfig(lora_bias=True), "lora_bias=True: a handoff changes weights only"),
        (LoraConfig(init_lora_weights="pissa"), "init_lora_weights='pissa': adapters begin with"),
        (LoraConfig(layers_to_transform=[0], target_modules=["q_proj"]), "layers_to_transform=.*regular expression"),
        (LoraConfig(task_type="SEQ_CLS"), "task_type=SEQ_CLS: a policy is a causal language model"),
        (LoraConfig(ensure_weight_tying=True), "ensure_weight_tying=True: this option of peft is not supported"),
    ],
)
def test_what_of_peft_cannot_be_trained_is_refused(config: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        keys_of(config)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4),
        LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        LoraConfig(r=4, target_modules=["v_proj", "q_proj"], use_rslora=True, alpha_pattern={"q_proj": 2}),
        LoraConfig(r=4, target_modules=r".*\.q_proj", modules_to_save=["lm_head"], use_dora=True),
    ],
)
def test_keys_give_back_the_same_config(config: LoraConfig) -> None:
    # None is peft's choice, and is said: the key's default is another one.
    assert "target_modules" in keys_of(config)
    again = peft_config_of(keys_of(config))
    wanted, found = config.to_dict(), again.to_dict()
    assert found.pop("task_type") == "CAUSAL_LM"
    del wanted["task_type"]
    same = {
        name: sorted(v) if isinstance(v, set | list) else v for name, v in wanted.items() if name != "runtime_config"
    }
    for name, value in same.items():
        other = found[name]
        assert value == (sorted(other) if isinstance(other, set | list) else other), name


@pytest.mark.parametrize(("family", "layer"), [("gpt2", "c_attn"), ("qwen3-moe", "gate")])
def test_what_peft_adds_to_a_config_is_read_back(family: str, layer: str, tmp_path: Path) -> None:
    """How GPT-2 stores weights, and routers as parameters: target_modules is empty then."""
    module = build(family)
    inject(module, peft_config_of({"r": 2, "target_modules": [layer]}))
    settings_of(module).save_pretrained(str(tmp_path))
    keys = {f"lora.{name}": value for name, value in keys_of(read_settings(tmp_path)).items()}
    again = build(family)
    inject(again, peft_config_of(vars(load_config(keys)[0].lora)))
    assert len(form_of(module)) > 2 and difference(form_of(module), form_of(again)) is None


def test_without_peft_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install peft")):
        peft_config_of(ALL)


@pytest.mark.parametrize("keys", [{"r": 10**9}, {"r": 4, "rank_pattern": {"q_proj": 10**9}}])
def test_a_rank_above_that_of_every_weight_is_refused_before_anything_is_made(keys: dict[str, Any]) -> None:
    """Adapters of that rank would take terabytes."""
    with pytest.raises(ConfigError, match="of rank 1000000000 are larger than the weights that they change"):
        adapter_size(MODEL, peft_config_of({**ALL, **keys}))
    most = max(min(weight.shape) for weight in MODEL.parameters() if weight.ndim > 1)
    assert adapter_size(MODEL, peft_config_of({**ALL, "r": most})).rank == most
    with pytest.raises(ConfigError, match=f"none of which has a rank above {most};"):
        adapter_size(MODEL, peft_config_of({**ALL, "r": most + 1}))
