"""peft's LoraConfig from configuration keys, and the keys from a LoraConfig that a user passes."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import nn

from hybrid_rl.errors import ConfigError

# Fields of LoraConfig that are keys of their own, and those that are entries of lora.peft.
KEYS = ("r", "lora_alpha", "target_modules")
ENTRIES: tuple[str, ...] = ("exclude_modules", "target_parameters", "modules_to_save", "use_rslora", "use_dora")
ENTRIES += ("rank_pattern", "alpha_pattern")
# Fields that say nothing about training here: what saved the adapter, and for what.
SILENT = frozenset({"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"})
SILENT |= {"inference_mode", "runtime_config"}
SILENT |= {"fan_in_fan_out"}  # peft looks at each layer, and writes here what it has found
TASKS = (None, "CAUSAL_LM")
REFUSED = {
    "lora_dropout": "dropout makes the ratio of new to old probabilities noise; set lora_dropout=0",
    "bias": "biases of the model are frozen, so that a handoff changes weights only; set bias='none'",
    "lora_bias": "a handoff changes weights only, and adapters with biases would change those; leave it out",
    "init_lora_weights": "adapters begin with A uniform and B zero, so that the first policy is the base; leave it out",
    "layers_to_transform": "give the layers as a regular expression, target_modules=r'.*\\.[0-7]\\.self_attn\\.q_proj'",
    "layer_replication": "it makes another model of the base; pass that model",
    "trainable_token_indices": "train the embeddings whole, modules_to_save=['embed_tokens'], or all weights if the "
    "head is the embedding",
}
# Ways to begin that leave the base as it is: of a trained adapter they say nothing.
HARMLESS_STARTS = (False, "gaussian", "orthogonal", "eva")


def require_peft() -> None:
    """Raise ConfigError if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("adapters (lora.r, peft_config) need peft, which is not installed: pip install peft")


def peft_config_of(keys: Mapping[str, Any]) -> Any:
    """Return the LoraConfig of configuration keys, by the names that they have there."""
    require_peft()
    from peft import LoraConfig

    keys = _flat(keys)
    arguments = {name: keys[name] for name in (*KEYS, *ENTRIES) if keys.get(name) not in (None, [], {})}
    if keys.get("target_modules") == []:
        if "target_parameters" not in arguments:
            raise ConfigError("lora.target_modules=[] names no layer; leave it out for all-linear")
        arguments["target_modules"] = []  # no layer beside those parameters; without it peft would choose some
    for name in ("target_modules", "exclude_modules"):
        if arguments.get(name) == ["all-linear"]:
            arguments[name] = "all-linear"
    return LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **arguments)


def _flat(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys and entries of lora.peft side by side."""
    inner = vars(keys["peft"]) if "peft" in keys else {}
    return {**inner, **{name.removeprefix("peft."): value for name, value in keys.items()}}


def critic_peft_config(module: nn.Module, keys: Mapping[str, Any]) -> Any:
    """Return the LoraConfig of a critic's module: the policy's adapters, and its head trained whole; what the policy
    trains whole is so here if the critic has it."""
    heads = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    paths = [name for name, _ in module.named_modules()]
    keys = _flat(keys)
    shared = [name for name in keys["modules_to_save"] if any(path.endswith(name) for path in paths)]
    config = peft_config_of({**keys, "modules_to_save": [*heads, *shared]})
    config.task_type = "TOKEN_CLS"
    return config


def keys_of(peft_config: Any, trained: str = "") -> dict[str, Any]:
    """Return the configuration keys of a LoraConfig. trained: whose config it is, for errors, if its adapter has been
    trained. Raises ConfigError for anything that is not supported."""
    require_peft()
    from peft import LoraConfig, PeftConfig

    if isinstance(peft_config, type) and issubclass(peft_config, PeftConfig):
        raise ConfigError(f"peft_config={peft_config.__name__} is a class; pass {peft_config.__name__}(r=16)")
    if not isinstance(peft_config, PeftConfig):
        raise ConfigError(f"peft_config={type(peft_config).__name__} is no peft config; pass a peft.LoraConfig")
    if peft_config.is_prompt_learning:
        raise ConfigError(
            f"peft_config={type(peft_config).__name__} learns tokens in front of the prompt, which engines that get "
            "weights cannot decode with; pass a peft.LoraConfig"
        )
    if type(peft_config) is not LoraConfig:
        raise ConfigError(
            f"peft_config={type(peft_config).__name__}: of peft's methods only LoRA is supported (with use_dora and "
            "use_rslora), whose change of a weight an engine can be given; pass a peft.LoraConfig"
        )
    if peft_config.task_type not in TASKS:
        raise ConfigError(f"peft_config: task_type={peft_config.task_type}: a policy is a causal language model")
    default, keys = LoraConfig(), {}
    for item in dataclasses.fields(LoraConfig):
        value, usual = getattr(peft_config, item.name), getattr(default, item.name)
        if item.name == "target_modules":  # None is peft's choice, not ours
            keys[item.name] = sorted(value) if isinstance(value, set) else value
        elif item.name in (*KEYS, *ENTRIES):
            if value is not None and (value != usual or item.name in KEYS):
                name = item.name if item.name in KEYS else f"peft.{item.name}"
                keys[name] = sorted(value) if isinstance(value, set) else value
        elif value != usual and item.name not in SILENT:
            if trained and item.name == "init_lora_weights" and value in HARMLESS_STARTS:
                continue
            why = REFUSED.get(item.name, "this option of peft is not supported; leave it out")
            raise ConfigError(f"{trained or 'peft_config'}: {item.name}={value!r}: {why}")
    return keys
