"""The memory of keys and values, in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.models import AttentionOptions

LANES = 16  # dims of a value are padded to a multiple of this on a CPU: see csrc/paged_attention.cpp


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one layer: [tokens, num_key_value_heads, dim]."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def padded_value_dim(self) -> int:
        """value_dim, rounded up to whole lanes."""
        return -(-self.value_dim // LANES) * LANES

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value, padding included."""
        return self.num_heads * (self.key_dim + self.padded_value_dim) * self.dtype.itemsize


class ShapeRecorder:
    """An attention context that records what each layer would cache, and answers with the values."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Record the shape; the values stand in for the output."""
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.dtype)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


class PagedCache:
    """Key and value memory of all layers.

    On a CPU a block of keys is [head, dim, token] and a block of values [head, token, dim], as the compiled kernel
    reads them; elsewhere both are [token, head, dim]. `views` shows either as [block, token, head, dim].
    """

    def __init__(self, layers: dict[int, LayerShape], num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache while it is allocated."""
        return self.num_blocks * self.block_size * sum(layer.bytes_per_token for layer in self.layers.values())

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is there."""
        return bool(self._memory)

    def allocate(self) -> None:
        """Get the memory, all of it or none, all zeros: hidden places weigh nothing, but nothing times a NaN left in
        fresh memory is NaN."""
        try:
            for index, layer in self.layers.items():
                self._memory[index] = self._allocated(layer)
        except BaseException:
            self.free()  # at once: the error may be kept, and the frames that it remembers with it
            raise

    def _allocated(self, layer: LayerShape) -> tuple[Tensor, Tensor]:
        outer = (self.num_blocks, layer.num_heads)
        if self.device.type == "cpu":
            keys = _lazy_zeros((*outer, layer.key_dim, self.block_size), layer.dtype)
            values = _lazy_zeros((*outer, self.block_size, layer.padded_value_dim), layer.dtype)
            return keys, values
        shape = (self.num_blocks, self.block_size, layer.num_heads)
        keys = torch.zeros(*shape, layer.key_dim, dtype=layer.dtype, device=self.device)
        return keys, torch.zeros(*shape, layer.padded_value_dim, dtype=layer.dtype, device=self.device)

    def free(self) -> None:
        """Give the memory back to the device; everything cached is lost."""
        self._memory.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def clear(self) -> None:
        """Zeros everywhere, as after `allocate`."""
        if self.device.type == "cpu":
            self.free()
            self.allocate()
            return
        for pair in self._memory.values():  # at the same place: CUDA graphs have captured it
            for tensor in pair:
                tensor.zero_()

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as they are in memory."""
        return self._memory[layer]

    def views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as [block, token, head, dim], strided."""
        keys, values = self._memory[layer]
        if self.device.type == "cpu":
            keys, values = keys.permute(0, 3, 1, 2), values.transpose(1, 2)
        return keys, values[..., : self.layers[layer].value_dim]

    def copy_blocks(self, source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks, int64 indices [n] each, in every layer."""
        for pair in self._memory.values():
            for tensor in pair:
                tensor.index_copy_(0, destination, tensor.index_select(0, source))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the operating system hands out when they are first written: an unused part of the cache costs
    no memory, which torch.zeros would touch."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
