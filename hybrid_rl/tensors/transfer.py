"""Tensors between host and device, so that neither waits for the other.

A plain `tensor.to("cuda")` of memory that is not pinned holds up the host until the copy is through, and `tensor.cpu()`
until the device has done everything that was asked of it. Here uploads go through pinned memory, many tensors in one
copy; downloads are started and waited for once, when everything has been asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes: what kernels with wide loads, Triton's among them, may want of the start of a tensor


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on a device, contiguous, sent there in one copy that nobody waits for; on the CPU themselves.

    tensors: on the CPU, without gradient. What comes back are parts of one piece of memory.
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
    # PyTorch hands out pinned memory again only after the copies from it are through.
    there = packed.to(device, non_blocking=True)
    return [_part(there, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def start_download(tensor: Tensor) -> Tensor:
    """A copy on the host, detached, filled in when `finish_downloads` has returned; on the CPU the tensor itself."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


def finish_downloads(device: torch.device) -> None:
    """Wait for what this thread asked of the device, and so for all downloads that it started."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _part(packed: Tensor, start: int, like: Tensor) -> Tensor:
    """The place of a tensor in uint8 `packed`, which starts at that byte."""
    num_bytes = like.numel() * like.element_size()
    return packed[start : start + num_bytes].view(like.dtype).view(like.shape)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module, without those of the modules inside, to a device."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        setattr(module, name, buffer.to(device))
