"""A checkpoint of a module as views of the module's own tensors.

A checkpoint may name a tensor differently from the module, or hold in parts what the module has fused. Here
transformers' conversion to a checkpoint runs on meta tensors. Its results show which part of which tensor of the module
each tensor of the checkpoint is, and no weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.compat.torch import TorchDispatchMode, storage_id
from hybrid_rl.weights.names import Conversion, checkpoint_conversions, own_classes, saved_names


@dataclass(frozen=True)
class CheckpointViews:
    """tensors: of the module, by its own names, a tied one once: contiguous meta tensors of the global shapes. views:
    (checkpoint name, view of one of the tensors), in the order of a checkpoint. tied: further names of tied tensors,
    which a checkpoint need not hold. without_view: checkpoint names that are computed, not cut out, and by what.
    """

    tensors: dict[str, Tensor]
    views: list[tuple[str, Tensor]]
    tied: list[tuple[str, Tensor]]
    without_view: dict[str, str]


def checkpoint_views(module: PreTrainedModel) -> CheckpointViews:
    """Return parameters and persistent buffers of a module, plain, sharded or on meta, as views by checkpoint name."""
    with own_classes(module):
        tensors, aliases = _global_tensors(module)
        conversions = checkpoint_conversions(module, list(tensors))
        views: list[tuple[str, Tensor]] = []
        without_view: dict[str, str] = {}
        storages = {storage_id(tensor) for tensor in tensors.values()}
        for conversion in conversions:
            results, failure = _run(module, conversion, tensors)
            for name, view in results.items():
                if storage_id(view) in storages:
                    views.append((name, view))
                else:
                    without_view[name] = f"{type(conversion.transform).__name__} computes new values or a new order"
            if failure:
                without_view.update({name: failure for _, name in conversion.parts})
        names = {id(tensor): name for name, tensor in tensors.items()}
        tied = []
        for alias, tensor in aliases.items():
            like = checkpoint_conversions(module, [alias])
            tied += [(c.name, tensor) for c in like if len(c.parts) == 1 and names[id(tensor)] != c.name]
    return CheckpointViews(tensors, views, tied, without_view)


class _KeepStorage(TorchDispatchMode):
    """Mode in which `contiguous` and `clone` return the tensor itself: its memory layout does not matter here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def _run(
    module: PreTrainedModel, conversion: Conversion, tensors: dict[str, Tensor]
) -> tuple[dict[str, Tensor], str | None]:
    """Return the results of a conversion, or why it fails if `contiguous` copies nothing."""
    try:
        with torch.no_grad(), _KeepStorage():
            return conversion.run(module, tensors.__getitem__), None
    except Exception as error:  # conversions are transformers' code, and reshape what contiguous() did not lay out
        return {}, f"{type(conversion.transform).__name__} fails on views: {error}"


def _global_tensors(module: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return meta tensors of the global shapes, by their name in a checkpoint; and tied ones by their other names."""
    state = module.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, Tensor] = {}
    for name, *others in saved_names(module):
        tensors[name] = torch.empty(state[name].shape, dtype=state[name].dtype, device="meta")
        aliases |= dict.fromkeys(others, tensors[name])
    return tensors, aliases
