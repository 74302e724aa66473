"""GPU memory that a process exports as a handle, and that another process maps for its own GPU.

The reader opens a handle while its own device is the current one: CUDA maps the memory into that device's address space
and enables access between the two GPUs (cudaIpcOpenMemHandle with cudaIpcMemLazyEnablePeerAccess). The tensor made from
it counts as one of the reader's device, so kernels run there and read over the link; the reader gets no context on the
other GPU. PyTorch itself tests this use of its handles (test/distributed/test_p2p_ipc.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from hybrid_rl.compat.torch import release_exported
from hybrid_rl.errors import HandoffError

# PyTorch reduces a tensor to a function and its arguments; these are the positions of some of them.
Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]
_DEVICE, _COUNTER, _COUNTER_OFFSET, _WAITS_FOR_EVENT = 6, 11, 12, 14


class CannotShareError(HandoffError):
    """Memory that other processes cannot map."""


def gpu_of(device: torch.device) -> str:
    """Return the uuid of a GPU, because processes may number the same GPUs differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_tensors(parts: Sequence[Tensor]) -> list[Handle]:
    """Return a handle of each contiguous CUDA tensor, valid until `give_back`. Raises CannotShareError."""
    check_shareable(parts)
    handles: list[Handle] = []
    try:
        for part in parts:
            handles.append(reduce_tensor(part))
    except RuntimeError as error:
        give_back(handles)
        raise CannotShareError(f"CUDA gives no handle of its memory ({_first_line(error)})") from error
    return handles


def check_shareable(parts: Sequence[Tensor]) -> None:
    """Raise CannotShareError, with what to do, for CUDA tensors in memory that cannot be shared by handle."""
    if any(not part.is_contiguous() for part in parts):
        raise CannotShareError("a shard is not contiguous; make it contiguous")
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise CannotShareError(
            f"the allocator {backend} gives no handles of its memory; take backend:{backend} out of "
            f"PYTORCH_CUDA_ALLOC_CONF"
        )
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["is_expandable"]]
    for part in parts:
        for segment in segments:
            if 0 <= part.data_ptr() - segment["address"] < segment["total_size"]:
                raise CannotShareError(
                    "they lie in expandable segments, whose handles other processes cannot rely on; take "
                    "expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF"
                )


def check_readable(device: torch.device, gpu: str) -> None:
    """Raise CannotShareError, with the reason, if a device cannot read the memory of a GPU of its node."""
    if device.type != "cuda":
        raise CannotShareError(f"they are on GPU {gpu}, and the engine here is on {device}")
    visible = [gpu_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if gpu not in visible:
        raise CannotShareError(
            f"GPU {gpu} is not visible to this process; leave CUDA_VISIBLE_DEVICES alone, so that every rank sees all "
            f"GPUs of its node"
        )
    peer = visible.index(gpu)
    if peer != _index(device) and not torch.cuda.can_device_access_peer(_index(device), peer):
        raise CannotShareError(
            f"{device} has no access to the memory of GPU {gpu}; `nvidia-smi topo -p2p r` shows which GPUs have"
        )


def open_tensor(handle: Handle, device: torch.device) -> Tensor:
    """Return the memory of a handle as a tensor of `device`, which must only be read.

    It stays mapped while the tensor lives. Raises CannotShareError if CUDA cannot map it.
    """
    rebuild, arguments = handle
    changed = list(arguments)
    changed[_DEVICE] = _index(device)
    # A handoff waits for the writer's device before anyone reads; PyTorch would open an event and never close it.
    changed[_WAITS_FOR_EVENT] = False
    try:
        return rebuild(*changed)
    except RuntimeError as error:
        raise CannotShareError(f"its memory cannot be mapped for {device} ({_first_line(error)})") from error


def give_back(handles: Sequence[Handle]) -> None:
    """Release handles that no process reads any more.

    PyTorch keeps exported memory until a reader has released it; without this call, memory that no reader ever opened
    would be kept for ever.
    """
    for _, arguments in handles:
        release_exported(arguments[_COUNTER], arguments[_COUNTER_OFFSET])


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
