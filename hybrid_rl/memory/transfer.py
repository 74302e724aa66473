"""Copies between host and device in which neither waits for the other.

A plain `tensor.to("cuda")` of memory that is not pinned blocks the host until the copy is done, and `tensor.cpu()`
until the device has finished all of its work. Here uploads go through pinned memory, many tensors in one copy;
downloads are started early and waited for once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes: the alignment that kernels with wide loads, such as Triton's, may expect of a tensor


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to a device, contiguous, in one copy that the host does not wait for; on the CPU return them as they
    are.

    tensors: on the CPU, without gradient. The results are views of one allocation.
    """
    if device.type == "cpu":
        return list(tensors)
    starts, total = [], 0
    for tensor in tensors:
        starts.append(total)
        total += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=True):
        _part(packed, start, tensor).copy_(tensor)
    # PyTorch reuses pinned memory only after the copies from it are done.
    there = packed.to(device, non_blocking=True)
    return [_part(there, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def start_download(tensor: Tensor) -> Tensor:
    """Start a copy to the host, detached, complete after `finish_downloads`. On the CPU return the tensor itself."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


def finish_downloads(device: torch.device) -> None:
    """Wait for all work that this thread has queued on the device, which includes the downloads that it started."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _part(packed: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the view of packed uint8 memory, from byte `start`, with the dtype and shape of `like`."""
    num_bytes = like.numel() * like.element_size()
    return packed[start : start + num_bytes].view(like.dtype).view(like.shape)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module, but not of its submodules, to a device."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        setattr(module, name, buffer.to(device))
