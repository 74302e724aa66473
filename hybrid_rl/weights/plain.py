"""A module with adapters as if it had none.

peft puts a wrapper in the place of each layer. Inside `plain` the layers themselves stand in their places again: names,
classes and forward are those of the model before, over the same parameters, which may be sharded. So whatever reads or
writes a model's weights needs to know nothing about adapters, and the reference of a run is the policy inside this
block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

ADAPTER = "default"  # peft's name of the adapter that is trained


def wrappers(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return peft's outermost wrappers in a module: parent, name in the parent, wrapper."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    return [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, kinds)
        for name, child in parent.named_children()
        if isinstance(child, kinds)
    ]


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module has adapters."""
    return bool(wrappers(module))


@contextmanager
def plain(module: nn.Module, *, trained: bool = True) -> Iterator[None]:
    """Take the adapters out of a module inside the block. trained: whether modules that are trained whole
    (`modules_to_save`) are those of the policy, or as they were before training."""
    places = wrappers(module)
    for parent, name, wrapper in places:
        parent._modules[name] = _layer(wrapper, trained=trained)
    try:
        yield
    finally:
        for parent, name, wrapper in places:
            parent._modules[name] = wrapper


def take_out(module: nn.Module) -> None:
    """Remove the adapters of a module for good; modules that were trained whole are as they were before."""
    for parent, name, wrapper in wrappers(module):
        parent._modules[name] = _layer(wrapper, trained=False)
    vars(module).pop("peft_config", None)  # where peft notes what it has injected


def take_out_empty(module: nn.Module) -> None:
    """Remove peft's wrappers around layers that have no adapter any more, because it was deleted: they compute what the
    layer does."""
    for parent, name, wrapper in wrappers(module):
        names = ("modules_to_save",) if hasattr(wrapper, "modules_to_save") else wrapper.adapter_layer_names
        if not any(len(getattr(wrapper, each)) for each in names):
            parent._modules[name] = _layer(wrapper, trained=False)


def running(module: Any) -> Any:
    """Return what runs in the place of a module: of peft's wrapper of a module that is trained whole, the copy that is
    trained; otherwise the module itself."""
    return _layer(module, trained=True) if hasattr(module, "modules_to_save") else module


def _layer(wrapper: Any, *, trained: bool) -> Any:
    if not hasattr(wrapper, "modules_to_save"):
        return wrapper.get_base_layer()
    return wrapper.modules_to_save[ADAPTER] if trained else wrapper.original_module
