"""PyTorch's private names. Tried with torch 2.11.0 and 2.13.0; those of FSDP2 are in `compat/torch_fsdp.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["StridedShard", "TorchDispatchMode", "local_shape_and_offset", "tree_leaves", "tree_map"]

# Each private name that this file uses, and why there is no public way.
NAMES = {
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "DTensor shows no offset of its shard",
    "torch.distributed.tensor.placement_types._StridedShard": "what FSDP2 over tensor parallelism leaves in placements",
    "torch.distributed.tensor.placement_types.Shard._split_tensor": "which rank holds which rows, without a mesh",
    "torch.utils._python_dispatch.TorchDispatchMode": "the only way to see the operators of foreign code",
    "torch.utils._pytree.tree_leaves": "arguments of an operator may be lists of tensors",
    "torch.utils._pytree.tree_map": "arguments of a block may be tuples of tensors",
    "torch.UntypedStorage._cdata": "meta tensors have no address: only this shows whether two share memory",
    "torch.Tensor._base": "whether autograd saved a view of a parameter",
    "torch.Tensor._version": "whether a tensor that was saved twice was changed in between",
    "torch._ops.OpOverload._schema": "which arguments an operator writes, and which results are views",
    "torch.UntypedStorage._release_ipc_counter": "memory that was exported and never opened would be kept for ever",
    "torch._grouped_mm": "a function mode sees this one; the public grouped_mm only calls it",
    "torch._foreach_copy_": "one launch for all parameters",
    "torch._foreach_add_": "one launch for all parameters",
    "torch._foreach_norm": "one launch for all parameters; the public total is in float32",
    "torch._foreach_zero_": "one launch for all parameters",
    "torch.nn.Module._apply": "gives memory to meta tensors; the public to_empty breaks ties and discards values",
    "torch.nn.Module._call_impl": "what torch compiles of a module, hooks included",
    "torch.nn.Module._compiled_call_impl": "the public compile() cannot be taken back",
    "torch.nn.Module._forward_pre_hooks": "weight_norm and spectral_norm are known by their hook alone",
    "torch.nn.Module._parameters": "left out of a module's plain attributes",
    "torch.nn.Module._buffers": "left out of a module's plain attributes",
    "torch.nn.Module._modules": "left out of a module's plain attributes",
    "torch.optim.Optimizer._opt_called": "a step that was skipped on purpose is not a mistake to warn of",
    "torch.optim.lr_scheduler.LRScheduler._step_count": "a schedule's state at a step that it did not count itself",
    "torch.optim.lr_scheduler.LRScheduler._last_lr": "a schedule's state at a step that it did not count itself",
}

grouped_mm = torch._grouped_mm
foreach_copy = torch._foreach_copy_
foreach_add = torch._foreach_add_
foreach_zero = torch._foreach_zero_


def foreach_norm(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the L2 norm of each tensor, [] each, in the tensor's dtype."""
    return tuple(torch._foreach_norm(tensors))  # type: ignore[attr-defined]


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors of the same memory share while it lives, also on meta."""
    number: int = tensor.untyped_storage()._cdata
    return number


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of; None if it is not a view."""
    return tensor._base


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator: `arguments` and `returns`, each with its `alias_info`."""
    return operator._schema


def release_exported(counter: Any, offset: int) -> None:
    """Let go of CUDA memory that was exported to a process that never opened it."""
    torch.UntypedStorage._release_ipc_counter(counter, offset, device=None)


def split_over_axis(placement: Any, tensor: Tensor, num_chunks: int) -> Sequence[Tensor]:
    """Return the parts of a tensor on the ranks of a mesh axis. placement: Shard or StridedShard; some parts may be
    empty."""
    parts: Sequence[Tensor] = placement._split_tensor(tensor, num_chunks, with_padding=False)[0]
    return parts


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module, as `module.to` does."""
    module._apply(function)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are not a parameter, buffer or submodule."""
    return {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before the module's forward."""
    return list(module._forward_pre_hooks.values())


def compiled_form(module: nn.Module) -> Callable[..., Any]:
    """Return the compiled call of a module, which runs only after `use_compiled`."""
    compiled: Callable[..., Any] = torch.compile(module._call_impl, dynamic=True)
    return compiled


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of the module runs a compiled form."""
    return module._compiled_call_impl is not None


def use_compiled(module: nn.Module, form: Callable[..., Any] | None) -> None:
    """Let calls of the module run this compiled form, or with None the module as it is."""
    module._compiled_call_impl = form


def mark_stepped(optimizer: Any) -> None:
    """Tell schedules that the optimizer has been called: else the first one to step warns of a mistake."""
    optimizer._opt_called = True


def set_schedule(schedule: LambdaLR, num_steps: int, rates: Sequence[float]) -> None:
    """Put a schedule of functions to where it is after `num_steps` steps. rates: of each parameter group there."""
    functions = [None] * len(rates)
    schedule.load_state_dict(
        {"last_epoch": num_steps, "_step_count": num_steps + 1, "_last_lr": [*rates], "lr_lambdas": functions}
    )
