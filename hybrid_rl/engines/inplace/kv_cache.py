"""The memory of keys and values, in blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.engines.base import KV_CACHE
from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.cuda_region import CudaRegion
from hybrid_rl.memory.region import TensorRegion
from hybrid_rl.models import AttentionOptions
from hybrid_rl.models.int8.rounding import Int8Weight

ALIGNMENT_BYTES = 256  # of the keys and of the values of a layer, as of PyTorch's own memory on CUDA
LANES = 16  # dims of a value are padded to a multiple of this on a CPU: see csrc/paged_attention.cpp


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one layer: [tokens, num_key_value_heads, dim]. dtype: of the model, and of the cache, unless
    is_rounded: it then holds int8, with a float32 scale of the keys and one of the values per token and head."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    is_rounded: bool = False

    @property
    def padded_value_dim(self) -> int:
        """value_dim, rounded up to whole lanes."""
        return -(-self.value_dim // LANES) * LANES

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value, padding and scales included."""
        width = self.key_dim + self.padded_value_dim
        return self.num_heads * (width + 2 * 4 if self.is_rounded else width * self.dtype.itemsize)


class ShapeRecorder:
    """An attention context that records what each layer would cache, and answers with the values.

    kv_cache_dtype: as in the section `rollout`.
    """

    def __init__(self, kv_cache_dtype: str = "auto") -> None:
        self._is_rounded = kv_cache_dtype == "int8"
        self.layers: dict[int, LayerShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Record the shape; the values stand in for the output."""
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.dtype, self._is_rounded)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


class PagedCache:
    """Key and value memory of all layers.

    On a CPU a block of keys is [head, dim, token] and a block of values [head, token, dim], as the compiled kernel
    reads them; elsewhere both are [token, head, dim]. `views` shows either as [block, token, head, dim]. A layer that
    is rounded has scales too, of keys and of values, in blocks of [head, token].

    region: where the memory lies, with room for `capacity_bytes` of it; it then sleeps and wakes at the same addresses,
    so that CUDA graphs over it stay valid. None: in host memory, at new addresses after every `free`.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        region: TensorRegion | None = None,
    ) -> None:
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._region = region
        self._memory: dict[int, tuple[Tensor, ...]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache while it is allocated."""
        return self.num_blocks * self.block_size * sum(layer.bytes_per_token for layer in self.layers.values())

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is there."""
        return bool(self._memory) and not (self._region is not None and self._region.is_asleep)

    def allocate(self) -> None:
        """Get the memory, all zeros: hidden places weigh nothing, but nothing times a NaN left in fresh memory is
        NaN. Raises MemoryStateError if a region cannot have it; nothing is allocated then."""
        if self._memory and self._region is not None:
            self._region.restore()
            return
        wanted = [part for layer in self.layers.values() for part in self._parts(layer)]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        # One tensor for all: either there is memory for every layer, or none is taken.
        parts = self._bytes(sum(map(_aligned, sizes))).split([_aligned(size) for size in sizes])
        tensors = iter(
            [
                part[:size].view(dtype).view(shape)
                for part, size, (shape, dtype) in zip(parts, sizes, wanted, strict=True)
            ]
        )
        self._memory = {index: tuple(next(tensors) for _ in self._parts(layer)) for index, layer in self.layers.items()}

    def free(self) -> None:
        """Give the memory back to the device; everything cached is lost."""
        if self._region is not None:
            self._region.release()
        else:
            self._memory = {}

    def close(self) -> None:
        """Give the memory back for good; idempotent. Nothing may be read afterwards."""
        self._memory = {}
        if self._region is not None:
            self._region.close()

    def clear(self) -> None:
        """Zeros everywhere, as after `allocate`."""
        if self._region is None:
            self.free()
            self.allocate()
            return
        for tensors in self._memory.values():
            for tensor in tensors:
                tensor.zero_()

    def memory(self, layer: int) -> tuple[Tensor, ...]:
        """Keys and values of a layer as they are in memory, and their scales if they are rounded."""
        return self._memory[layer]

    def views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as [block, token, head, dim], strided; integers if they are rounded."""
        keys, values = self._memory[layer][:2]
        if self.device.type == "cpu":
            keys, values = keys.permute(0, 3, 1, 2), values.transpose(1, 2)
        return keys, values[..., : self.layers[layer].value_dim]

    def write(self, layer: int, place: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """Write new tokens, [T, head, dim] each, rounding them if the layer is rounded. place: block and offset of
        each, int64 [T]."""
        views = self.views(layer)
        if self.layers[layer].is_rounded:
            rounded = [Int8Weight.of(new) for new in (key, value)]
            for scales, new in zip(self._scales(layer), rounded, strict=True):
                scales[place] = new.scales
            key, value = (new.values for new in rounded)
        for memory, new_tokens in zip(views, (key, value), strict=True):
            memory[place] = new_tokens

    def read(self, layer: int, place: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values [..., head, dim] at blocks, int64 [...] (then with the tokens of each), or at block
        and offset. What is rounded comes as the float32 that it stands for, whatever the model's dtype."""
        keys, values = (memory[place] for memory in self.views(layer))
        if not self.layers[layer].is_rounded:
            return keys, values
        key_scales, value_scales = (scales[place] for scales in self._scales(layer))
        return keys * key_scales[..., None], values * value_scales[..., None]

    def _scales(self, layer: int) -> tuple[Tensor, ...]:
        """Return the scales of a layer as [block, token, head], strided."""
        return tuple(scales.transpose(1, 2) for scales in self._memory[layer][2:])

    def _parts(self, layer: LayerShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and dtypes of all that a layer has in memory."""
        blocks, tokens, heads = self.num_blocks, self.block_size, layer.num_heads
        if self.device.type == "cpu":
            shapes = (blocks, heads, layer.key_dim, tokens), (blocks, heads, tokens, layer.padded_value_dim)
        else:
            shapes = (blocks, tokens, heads, layer.key_dim), (blocks, tokens, heads, layer.padded_value_dim)
        dtype = torch.int8 if layer.is_rounded else layer.dtype
        parts: list[tuple[tuple[int, ...], torch.dtype]] = [(shape, dtype) for shape in shapes]
        if layer.is_rounded:
            parts += 2 * [((blocks, heads, tokens), torch.float32)]
        return parts

    def _bytes(self, num_bytes: int) -> Tensor:
        """Return zeros, uint8 [num_bytes]."""
        if self._region is not None:
            return self._region.allocate((num_bytes,), torch.uint8)
        assert self.device.type == "cpu", f"a cache on {self.device} needs a region"
        # Pages that the operating system hands out when they are first written: an unused part of the cache costs no
        # memory, which torch.zeros would touch.
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))

    def copy_blocks(self, source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks, int64 indices [n] each, in every layer."""
        for tensors in self._memory.values():
            for tensor in tensors:
                tensor.index_copy_(0, destination, tensor.index_select(0, source))


def cache_region(layers: dict[int, LayerShape], num_tokens: int, device: torch.device) -> CudaRegion | None:
    """Return a region for the cache of these layers; None on a CPU. Raises MemoryStateError if the device or its driver
    cannot map memory at addresses of our choice."""
    if device.type == "cpu":
        return None
    try:
        return CudaRegion(KV_CACHE, capacity_bytes=region_bytes(layers, num_tokens), device=device)
    except MemoryStateError as error:
        raise MemoryStateError(
            f"{error}; the in-place engine keeps its KV cache at one address with it: install what is missing or a "
            f"newer driver, or set rollout.engine=vllm or hf"
        ) from error


def region_bytes(layers: dict[int, LayerShape], num_tokens: int) -> int:
    """Return the bytes that the cache of these layers takes at most, alignment included."""
    return sum(
        num_tokens * layer.bytes_per_token + (4 if layer.is_rounded else 2) * ALIGNMENT_BYTES
        for layer in layers.values()
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
