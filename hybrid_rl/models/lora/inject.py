"""Adapters put into a module, on meta or with weights, before it is sharded."""

from __future__ import annotations

import hashlib
import math
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.compat.transformers import mark_adapted
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models.experts.routing import find_routers
from hybrid_rl.models.lora.target_layers import not_excluded, why_refused
from hybrid_rl.weights.boxes import full_tensor, local_box, local_tensor
from hybrid_rl.weights.plain import ADAPTER, is_adapted, take_out, wrappers

# Warnings of what peft does by itself: nobody else can act on them.
PEFT_ALONE = (
    "fan_in_fan_out is set to False but the target module is",
    r"The following (rank|alpha)_pattern keys did not match .*: \['\.\*\\\\\.gate_up_proj'\]",  # fused experts
    "You have passed exclude_modules=.* but no modules were excluded",  # only experts; names are checked
    "Model has `tie_word_embeddings=True`",  # refused below
)

# What required a gradient in a module before adapters were put into it.
_trainable: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


def inject(module: PreTrainedModel, settings: Any) -> None:
    """Freeze a module and put adapters into it; their values are undefined until `init_adapters`.

    settings: a peft LoraConfig. Raises ConfigError if it names layers that the module does not have, or that cannot be
    trained so, and ModelError if the module has adapters already; the module is then as it was.
    """
    from peft import inject_adapter_in_model

    from hybrid_rl.models.lora.layer import use_adapted_linears

    if is_adapted(module):
        raise ModelError("the module has adapters already; pass it without peft_config and lora.r to train them")
    parameters = dict(module.named_parameters())
    trainable = {name: parameter.requires_grad for name, parameter in parameters.items()}
    on_meta = any(parameter.is_meta for parameter in parameters.values())
    try:
        try:
            with warnings.catch_warnings():
                for message in PEFT_ALONE:
                    warnings.filterwarnings("ignore", message)
                targets = {*(settings.target_parameters or ())}
                inject_adapter_in_model(settings, module, ADAPTER, low_cpu_mem_usage=on_meta)
                if _exclude(settings, targets, parameters):
                    take_out(module)
                    inject_adapter_in_model(settings, module, ADAPTER, low_cpu_mem_usage=on_meta)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(f"lora: {why_refused(error)}") from error
        _refuse_layers(module)
    except BaseException:
        take_out(module)
        for name, parameter in parameters.items():
            parameter.requires_grad_(trainable[name])
        raise
    # The wrappers of fused experts have the dtype of a new layer, others that of the layer they wrap.
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != module.dtype:
            parameter.data = parameter.data.to(module.dtype)
        assert parameter.requires_grad == is_adapter_name(name), name
    use_adapted_linears(module)
    _trainable[module] = frozenset(name for name, is_trained in trainable.items() if is_trained)


def _exclude(settings: Any, given: set[str], parameters: Iterable[str]) -> bool:
    """Take what exclude_modules names out of the target_parameters of a peft config, besides those that were given;
    return whether that changed them.

    In a mixture of experts peft makes parameters of the target_modules that are routers and fused experts, when it puts
    adapters in, and does not look at exclude_modules for them.
    """
    added = {*(settings.target_parameters or ())} - given
    left = not_excluded(parameters, added, settings.exclude_modules or ())
    if added == {*left}:
        return False
    settings.target_parameters = sorted(given.union(left))
    return True


def leave(module: PreTrainedModel) -> None:
    """Leave a module with adapters to whoever passed it. Adapters that learned nothing are taken out again if they were
    put in here, with what required a gradient before; others stay, and transformers is told."""
    show(module)
    if not is_untouched(module):
        return
    take_out(module)
    mark_adapted(module, False)
    before = _trainable.pop(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in before)


def show(module: PreTrainedModel) -> None:
    """Tell transformers of the adapters in a module, if it has any: so its `save_pretrained` writes them, without
    peft's wrappers, and `disable_adapters` switches them off."""
    if is_adapted(module):
        mark_adapted(module)


def is_untouched(module: nn.Module) -> bool:
    """Return whether a module has adapters that were put in here and have learned nothing: they go again (`leave`)."""
    return module in _trainable and is_adapted(module) and not _has_learned(module)


def _has_learned(module: nn.Module) -> bool:
    """Return whether adapters change anything: B begins as zero, and what is trained whole as it is in the base."""
    if any(bool(p.any()) for name, p in module.named_parameters() if ".lora_B." in name):
        return True
    return any(
        not torch.equal(wrapper.modules_to_save[ADAPTER].get_parameter(name), original)
        for _, _, wrapper in wrappers(module)
        if hasattr(wrapper, "modules_to_save")
        for name, original in wrapper.original_module.named_parameters()
    )


def train_adapters(module: PreTrainedModel, settings: Any) -> bool:
    """Prepare the adapters of a module: those that it came with, or new ones of a peft LoraConfig (`inject`). They are
    trained, in the module's dtype, and nothing else is. Returns whether they are new.

    peft keeps adapters of a bfloat16 model in float32; here the optimizer does that. Raises ModelError if other
    parameters are to be trained too, ConfigError for layers that cannot be trained so.
    """
    from hybrid_rl.models.lora.layer import use_adapted_linears

    if not is_adapted(module):
        inject(module, settings)
        return True
    _refuse_layers(module)
    _trainable.pop(module, None)  # whoever put them in must leave them in
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
    use_adapted_linears(module)
    return False


def check_in_use(module: PreTrainedModel) -> None:
    """Raise ConfigError if adapters of a module are merged into its weights, or switched off."""
    names = {id(child): name for name, child in module.named_modules()}
    for _, _, wrapper in wrappers(module):
        name = names[id(wrapper)]
        if getattr(wrapper, "merged", False):
            raise ConfigError(
                f"the adapter of {name} is merged into its weight, which would count it twice; call unmerge_adapter() "
                "of the PeftModel"
            )
        if wrapper.disable_adapters:
            raise ConfigError(
                f"the adapter of {name} is switched off; call enable_adapters() of the module, or "
                "base_model.enable_adapter_layers() of the PeftModel"
            )


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter, or of a copy that is trained whole."""
    return ".lora_" in name or ".modules_to_save." in name or name.startswith("modules_to_save.")


def _refuse_layers(module: PreTrainedModel) -> None:
    """Raise ConfigError for layers whose adapters could not be trained or handed to an engine."""
    from peft.tuners.lora.layer import Linear, ParamWrapper

    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    whole = " or, as this model has one tensor for embedding and head, train all weights (without lora)"
    whole = whole if _are_tied(module) else ", or train it whole with lora.peft.modules_to_save"
    names = {id(child): name for name, child in module.named_modules()}
    routers = {router for router, _ in find_routers(module) if type(router).forward is not nn.Linear.forward}
    for _, _, wrapper in wrappers(module):
        name = names[id(wrapper)]
        if hasattr(wrapper, "modules_to_save"):
            if wrapper in (embedding, head) and _are_tied(module):
                raise ConfigError(
                    f"lora.peft.modules_to_save names {name}, but this model's head is its embedding: trained whole, "
                    "one of the two would stay behind, and engines and saved models have one tensor for both; leave it "
                    "out"
                )
        elif wrapper is head:
            raise ConfigError(
                f"lora.target_modules names {name}, the head: adapters are not supported there. Leave it out{whole}"
            )
        elif isinstance(wrapper, Linear) and wrapper.get_base_layer() in routers:
            end = name.rpartition(".")[2]
            raise ConfigError(
                f"lora.target_modules names {name}, a router that gives more than its product, to which an adapter of "
                f"a layer cannot be added. Leave it out (peft.exclude_modules=[{end}]), or give its weight an adapter "
                f"(peft.target_parameters=[{end}.weight] besides)"
            )
        elif not isinstance(wrapper, (Linear, ParamWrapper)):
            kind = type(wrapper.get_base_layer()).__name__
            raise ConfigError(
                f"lora.target_modules names {name}, which is a {kind}: only linear layers can have adapters. Leave it "
                f"out{whole if wrapper is embedding else ', or train it whole with lora.peft.modules_to_save'}"
            )


def _are_tied(module: PreTrainedModel) -> bool:
    ends: list[Any] = [module.get_input_embeddings(), module.get_output_embeddings()]
    ends = [getattr(end, "original_module", end) for end in ends]
    return None not in ends and ends[0].weight is ends[1].weight


@torch.no_grad()
def init_adapters(module: nn.Module, seed: int) -> None:
    """Give adapters the values that peft starts with: A uniform as nn.Linear draws it, B zero, magnitudes (DoRA) those
    of the base weights, and what is trained whole as it is in the base.

    The same on any number of ranks, because each tensor has a seed of its own. Collective if the module is sharded.
    """
    for name, parameter in module.named_parameters():
        if ".lora_B." in name:
            local_tensor(parameter).zero_()
        elif ".lora_A." in name:
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            full = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
            local_tensor(parameter).copy_(full[local_box(parameter)])
    for _, _, wrapper in wrappers(module):
        if hasattr(wrapper, "modules_to_save"):
            copies = dict(wrapper.modules_to_save[ADAPTER].named_parameters())
            for name, original in wrapper.original_module.named_parameters():
                local_tensor(copies[name]).copy_(local_tensor(original))
        elif ADAPTER in getattr(wrapper, "lora_magnitude_vector", {}):
            magnitude = wrapper.lora_magnitude_vector[ADAPTER].weight
            base = full_tensor(wrapper.get_base_layer().weight).float()
            norms = torch.linalg.vector_norm(base.T if wrapper.fan_in_fan_out else base, dim=1)
            local_tensor(magnitude).copy_(norms[local_box(magnitude)])
