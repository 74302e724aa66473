"""Adapters put into a module, on meta or with weights, before it is sharded."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models.lora.plain import ADAPTER, is_adapted
from hybrid_rl.tensors.boxes import local_box, local_tensor


def inject(module: PreTrainedModel, settings: Any) -> None:
    """Freeze a module and put adapters into it; their values are undefined until `init_adapters`.

    settings: a peft LoraConfig. Raises ConfigError if it names layers that the module does not have, ModelError if it
    has adapters already.
    """
    from peft import inject_adapter_in_model

    if is_adapted(module):
        raise ModelError("the module has adapters already; pass it without peft_config and lora.r to train them")
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    try:
        inject_adapter_in_model(settings, module, ADAPTER, low_cpu_mem_usage=on_meta)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"lora: {error}") from error
    # The wrappers of fused experts have the dtype of a new layer, others that of the layer they wrap.
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != module.dtype:
            parameter.data = parameter.data.to(module.dtype)
        assert parameter.requires_grad == is_adapter_name(name), name


def train_adapters(module: PreTrainedModel) -> None:
    """Prepare the adapters that a module came with: they are trained, in the module's dtype, and nothing else is.

    peft keeps adapters of a bfloat16 model in float32; here the optimizer does that. Raises ModelError if other
    parameters are to be trained too.
    """
    dtype, others = module.dtype, []
    for name, parameter in module.named_parameters():
        if is_adapter_name(name):
            parameter.requires_grad_(True)
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        elif parameter.requires_grad:
            others.append(name)
    if others:
        raise ModelError(
            f"{len(others)} parameters besides the adapters require a gradient ({others[0]}, ...); freeze them with "
            "requires_grad_(False), or name their modules in modules_to_save"
        )


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter, or of a copy that is trained whole."""
    return ".lora_" in name or ".modules_to_save." in name


@torch.no_grad()
def init_adapters(module: nn.Module, seed: int) -> None:
    """Draw the adapters' values as peft does: A uniform as nn.Linear draws it, B zero; the same on any number of ranks,
    because each tensor has a seed of its own. Magnitudes and copies of modules are not touched."""
    for name, parameter in module.named_parameters():
        if ".lora_B." in name:
            local_tensor(parameter).zero_()
        elif ".lora_A." in name:
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            full = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
            local_tensor(parameter).copy_(full[local_box(parameter)])
