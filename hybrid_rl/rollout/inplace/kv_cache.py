"""Keys and values in blocks, shared by reference between the completions of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.models import AttentionOptions, PackedAttention, masked_attention


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one layer: [tokens, num_key_value_heads, dim]."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class ShapeRecorder:
    """An attention context that records what each layer would cache, and answers with the values."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext."""
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.dtype)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


class BlockPool:
    """Which blocks are free and how many sequences share each. Knows no tensors."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` fresh blocks, each with one reference. The caller has checked num_free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference on each block."""
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference less; a block without any is free."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)


class PagedCache:
    """Key and value memory of all layers. A slot is one token's place: block * block_size + offset."""

    def __init__(self, layers: dict[int, LayerShape], num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = device
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache while it is allocated."""
        return self.num_blocks * self.block_size * sum(layer.bytes_per_token for layer in self.layers.values())

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is there."""
        return bool(self._keys)

    def allocate(self) -> None:
        """Get the memory. Zeros: hidden places weigh nothing, but nothing times a NaN left in fresh memory is NaN."""
        slots = self.num_blocks * self.block_size
        for index, layer in self.layers.items():
            self._keys[index] = torch.zeros(
                slots, layer.num_heads, layer.key_dim, dtype=layer.dtype, device=self._device
            )
            self._values[index] = torch.zeros(
                slots, layer.num_heads, layer.value_dim, dtype=layer.dtype, device=self._device
            )

    def free(self) -> None:
        """Give the memory back; everything cached is lost."""
        self._keys.clear()
        self._values.clear()

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the keys and values [T, H, D] of T tokens at int64 slots [T]."""
        self._keys[layer].index_copy_(0, slots, key)
        self._values[layer].index_copy_(0, slots, value)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [B, L]: [B, H, L, D] each."""
        flat = slots.reshape(-1)
        parts = (memory[layer].index_select(0, flat) for memory in (self._keys, self._values))
        key, value = (part.view(*slots.shape, *part.shape[1:]).transpose(1, 2) for part in parts)
        return key, value

    def copy_slots(self, source: Tensor, destination: Tensor) -> None:
        """Copy tokens from int64 slots to slots, in every layer."""
        for memory in (*self._keys.values(), *self._values.values()):
            memory.index_copy_(0, destination, memory.index_select(0, source))


class PrefillAttention:
    """Whole sequences, packed: attention among themselves, keys and values into the cache."""

    def __init__(self, cache: PagedCache, lengths: list[int], slots: Tensor) -> None:
        self._cache = cache
        self._slots = slots
        self._packed = PackedAttention(lengths, slots.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext."""
        self._cache.write(layer, self._slots, key, value)
        return self._packed.attend(layer, query, key, value, options)


class DecodeAttention:
    """One new token for each of B sequences, against all of its cached tokens.

    slots: int64 [B, L], the place of every token of each sequence, the new one at `positions` int64 [B]; places behind
    it are ignored.
    """

    def __init__(self, cache: PagedCache, slots: Tensor, positions: Tensor) -> None:
        self._cache = cache
        self._slots = slots
        self._positions = positions
        self._write_slots = slots.gather(1, positions[:, None])[:, 0]
        self._place = torch.arange(slots.shape[1], device=slots.device)
        self._visible: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext."""
        self._cache.write(layer, self._write_slots, key, value)
        keys, values = self._cache.read(layer, self._slots)
        num_sequences, num_heads, dim = query.shape
        # The query heads that share a key head become its rows: grouped attention without repeating keys.
        grouped = query.view(num_sequences, keys.shape[1], num_heads // keys.shape[1], dim)
        out = masked_attention(grouped, keys, values, self._mask(options.window), options)
        return out.reshape(num_sequences, num_heads, -1)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._visible:
            visible = self._place <= self._positions[:, None]
            if window is not None:
                visible &= self._positions[:, None] - self._place < window
            self._visible[window] = visible[:, None, None, :]
        return self._visible[window]
