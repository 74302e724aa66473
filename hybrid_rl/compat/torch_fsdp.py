"""Private names of PyTorch's FSDP2, and the one table of how torch 2.11 and torch 2.13 differ in it.

Everything that reads or writes FSDP's own state goes through this file. Read and tried with torch 2.11.0 (which vLLM
0.25.1 requires) and 2.13.0, torch/distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hybrid_rl.compat import Difference

_ROOM = "torch.distributed.fsdp._fully_shard"
# Each private name that this file uses, and why there is no public way.
NAMES = {
    f"{_ROOM}._fsdp_common.TrainingState": "a unit that forgets a pass is idle again",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup": "the public interface has no unit's groups",
    f"{_ROOM}._fully_shard.FSDPModule._get_fsdp_state": "the way from a unit to its groups",
    f"{_ROOM}._fsdp_state.FSDPState._fsdp_param_groups": "the groups of a unit (2.13)",
    f"{_ROOM}._fsdp_state.FSDPState._fsdp_param_group": "the group of a unit (2.11)",
    f"{_ROOM}._fsdp_state.FSDPState._comm_ctx": "what is under way on this rank",
    f"{_ROOM}._fsdp_state.FSDPState._state_ctx": "whether a pass is under way",
    f"{_ROOM}._fsdp_state.FSDPState._device_handle": "the stream that waits",
    f"{_ROOM}._fsdp_state.FSDPState._training_state": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._all_gather_result": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._post_reduce_event": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._all_reduce_state": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._reshard_after_forward_event": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._partial_reduce_output": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._post_forward_indices": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._training_state": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._to_sharded": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param_group.FSDPParamGroup._wait_all_gather_streams_on_event": "2.11 cannot forget a pass",
    f"{_ROOM}._fsdp_param.FSDPParam._unsharded_param": "the gradient that was not reduced yet",
    f"{_ROOM}._fsdp_param.FSDPParam.all_gather_outputs": "the memory that a parameter is gathered into",
    f"{_ROOM}._fsdp_param.FSDPParam._sharded_param_data": "the memory of a shard, which other processes are to map",
    "torch.distributed.tensor.DTensor._local_tensor": "the shard that the optimizer steps, in the same memory",
}


DIFFERENCES: dict[str, Difference] = {
    "has_several_groups": Difference(
        "a unit has a list of parameter groups",
        lambda unit: hasattr(unit._get_fsdp_state(), "_fsdp_param_groups"),
        "one group, or None if the unit has no parameters of its own",
        frozenset({"_fsdp_param_groups"}),
    ),
    "reduces_unused": Difference(
        "parameters without a gradient take part in the reduce-scatter with zeros",
        lambda unit: hasattr(unit, "set_reduce_scatter_unused_params"),
        "the group fills in zero gradients before it reduces: see _ReducesUnused",
        frozenset({"set_reduce_scatter_unused_params"}),
    ),
    "resets": Difference(
        "a root forgets what an interrupted forward or backward pass left",
        lambda unit: hasattr(unit, "reset_iter_state"),
        "the same is done here, unit by unit: see _reset",
        frozenset({"reset_iter_state"}),
    ),
}


def has(name: str, unit: Any) -> bool:
    """Return whether this sharded unit has what a row of DIFFERENCES names."""
    return DIFFERENCES[name].is_there(unit)


def units(module: nn.Module) -> list[FSDPModule]:
    """Return the modules inside (itself included) that are sharded as a whole: one per block, one for the rest."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def groups(unit: Any) -> list[Any]:
    """Return the FSDPParamGroups of a unit, which gather and reduce their parameters together."""
    state = unit._get_fsdp_state()
    if has("has_several_groups", unit):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def parameters(module: nn.Module) -> list[Any]:
    """Return the FSDPParams of all units inside a module: shard, gathered parameter and gradients of each parameter."""
    return [parameter for unit in units(module) for group in groups(unit) for parameter in group.fsdp_params]


def reduce_unused(unit: Any) -> None:
    """Let a rank whose samples do not reach some parameters of this unit take part in summing their gradients."""
    if has("reduces_unused", unit):
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in groups(unit):
        group.__class__ = _ReducesUnused


def reset(root: Any) -> None:
    """Shards again, whatever was under way on this rank; gradients that were being reduced are lost.

    Nothing happens before the first forward pass, in which FSDP makes what would be reset.
    """
    if not hasattr(root._get_fsdp_state()._comm_ctx, "all_gather_state"):
        return
    if has("resets", root):
        root.reset_iter_state()
    else:
        _reset(root)


class _ReducesUnused(FSDPParamGroup):
    """A group that does what set_reduce_scatter_unused_params(True) does in newer versions. Groups become one after
    they are made, so it has no fields of its own."""

    def post_backward(self, *unused: Any) -> None:
        """Give parameters that this backward pass reduces but did not reach a gradient of zeros."""
        if self.reduce_grads:
            for parameter in self.fsdp_params:
                full = getattr(parameter, "_unsharded_param", None)  # none before it was gathered for the first time
                if full is None or not full.requires_grad or full.grad is not None:
                    continue
                if parameter.unsharded_accumulated_grad is None:
                    full.grad = torch.zeros_like(full)
        super().post_backward(*unused)


def _reset(root: Any) -> None:
    """FSDPModule.reset_iter_state for torch 2.11: waits for what is under way, then forgets it."""
    state = root._get_fsdp_state()
    stream = state._device_handle.current_stream()
    pending = state._comm_ctx
    for under_way in (pending.all_gather_state, pending.reduce_scatter_state):
        if under_way is not None and under_way.event is not None:
            stream.wait_event(under_way.event)
    pending.all_gather_state = pending.reduce_scatter_state = None
    pending.post_forward_order.clear()
    for unit in units(root):
        unit._get_fsdp_state()._training_state = TrainingState.IDLE
        for group in groups(unit):
            _reset_group(group, stream)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any) -> None:
    gathered = group._all_gather_result
    if gathered is not None:
        if gathered.all_gather_event is not None:
            stream.wait_event(gathered.all_gather_event)
        if gathered.all_gather_work is not None:
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    if group._post_reduce_event is not None:
        stream.wait_event(group._post_reduce_event)
    if group._all_reduce_state is not None and group._all_reduce_state.event is not None:
        stream.wait_event(group._all_reduce_state.event)
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def forget_gradients(module: nn.Module) -> None:
    """Drop the gradients of gathered parameters, which FSDP has not reduced yet."""
    for parameter in parameters(module):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def gathered_memory(parameter: Any) -> Tensor:
    """Return the flat memory that an FSDPParam was last gathered into, padding included; empty while it is sharded."""
    (memory,) = parameter.all_gather_outputs
    flat: Tensor = memory
    return flat


class Destination:
    """Memory for FSDP to gather a parameter into. memory: flat, of the shape and dtype of `gathered_memory`."""

    def __init__(self, parameter: Any, memory: Tensor) -> None:
        own: Tensor = parameter._unsharded_param
        self._parameter = parameter
        self._other = [memory], nn.Parameter(memory.as_strided(own.size(), own.stride()), own.requires_grad)

    def exchange(self) -> None:
        """Let the parameter be gathered into this memory, or if it was so already, into its own again. FSDP frees what
        it has when it shards again, which must be its own by then."""
        parameter, other = self._parameter, self._other
        self._other = parameter.all_gather_outputs, parameter._unsharded_param
        parameter.all_gather_outputs, parameter._unsharded_param = other


def padded_shard(parameter: Any) -> Tensor:
    """Return the shard of an FSDPParam, with the padding that makes all ranks' equally large, as FSDP gathers it."""
    padded: Tensor = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)
    return padded


def move_shard(parameter: Any, memory: Tensor) -> None:
    """Move the shard of an FSDPParam to `memory`, which holds what `padded_shard` gives."""
    sharded, dim = parameter.sharded_param, parameter.fsdp_placement.dim
    sharded._local_tensor = memory.narrow(dim, 0, sharded._local_tensor.shape[dim])
    parameter._sharded_param_data = memory.view(-1)
