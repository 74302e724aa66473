"""What the adapters of a module add to its weights, by the weights' names in the module without adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_rl.compat.peft import is_swapped
from hybrid_rl.weights.boxes import full_tensor, local_box, local_tensor
from hybrid_rl.weights.low_rank import LowRank
from hybrid_rl.weights.plain import ADAPTER, wrappers


@torch.no_grad()
def low_rank_changes(module: nn.Module, dtype: torch.dtype) -> dict[str, LowRank]:
    """Return the change of each adapted tensor by its name inside `plain`, whole on every rank; collective if the
    module is sharded.

    dtype: in which the module computes. Factors are rounded to it first: the engine gets what the trainer computes
    with.
    """
    return {f"{path}.{name}": _change(wrapper, dtype) for path, name, wrapper in _adapted(module)}


def _adapted(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield each adapted tensor: the path of its layer inside `plain`, its name there, and the wrapper that adapts it
    (of experts, each parameter has one of its own around the others)."""
    paths = {id(child): path for path, child in module.named_modules()}
    for _, _, outermost in wrappers(module):
        wrapper: Any = outermost
        while hasattr(wrapper, "lora_A"):
            yield paths[id(outermost)], getattr(wrapper, "parameter_name", "weight"), wrapper
            wrapper = wrapper.base_layer


def _change(wrapper: Any, dtype: torch.dtype) -> LowRank:
    a, b = (_whole(side[ADAPTER].weight, dtype) for side in (wrapper.lora_A, wrapper.lora_B))
    scale = float(wrapper.scaling[ADAPTER])
    if not hasattr(wrapper, "parameter_name"):
        change = LowRank(a, b, scale, is_transposed=bool(wrapper.fan_in_fan_out), dtype=dtype)
        if ADAPTER not in wrapper.lora_magnitude_vector:
            return change
        magnitude = wrapper.lora_magnitude_vector[ADAPTER].weight
        return replace(change, row_factor=_row_factor(wrapper.get_base_layer().weight, change, magnitude))
    if wrapper.num_experts > 1:
        a = a.reshape(wrapper.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    # peft calls the middle dim of experts their input unless it has found them to be stored the other way round.
    is_transposed = wrapper.num_experts > 1 and not is_swapped(wrapper)
    return LowRank(a, b, scale, is_transposed=is_transposed, dtype=dtype)


def _row_factor(weight: Tensor, change: LowRank, magnitude: Tensor) -> Tensor:
    """Return the factors of DoRA (arXiv:2402.09353), magnitude / |W + s B A| of each row, float32 [out].

    A row's norm is computed in float32 by the rank that holds the row; of a weight that is stored as [in, out] ranks
    hold parts of all rows, so each gathers it. Then norm and factor are rounded to the dtype that the trainer computes
    in.
    """
    if change.is_transposed:
        full = _whole(weight, weight.dtype)
        norm = torch.linalg.vector_norm(change.merged(full, local_box(full)), dim=0)
    else:
        norm = torch.linalg.vector_norm(change.merged(local_tensor(weight), local_box(weight)), dim=1)
    if isinstance(weight, DTensor) and not change.is_transposed:
        shape: Any = weight.shape[:1]
        norm = DTensor.from_local(
            norm, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=(1,)
        ).full_tensor()
    return (_whole(magnitude, change.dtype).to(change.dtype) / norm.to(change.dtype)).float()


def _whole(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return full_tensor(parameter.detach().to(dtype)).float()


@dataclass(frozen=True)
class AdapterShape:
    """The adapter of a tensor. layer: that has the tensor; inputs, outputs: of the layer, all experts together; rank: r
    of one expert; width: r times the experts."""

    layer: str
    inputs: int
    outputs: int
    rank: int
    width: int


def adapter_shapes(module: nn.Module) -> dict[str, AdapterShape]:
    """Return the shape of the adapter of each adapted tensor, by its name inside `plain`; nothing is communicated."""
    shapes: dict[str, AdapterShape] = {}
    for path, name, wrapper in _adapted(module):
        a, b = (side[ADAPTER].weight.shape for side in (wrapper.lora_A, wrapper.lora_B))
        layer = path.rpartition(".")[2]
        shapes[f"{path}.{name}"] = AdapterShape(layer, a[1], b[0], int(wrapper.r[ADAPTER]), a[0])
    return shapes
