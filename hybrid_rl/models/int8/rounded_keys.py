"""Attention over keys and values that are rounded as a KV cache of 8 bits holds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.models.attention.attention_function import AttentionContext, AttentionOptions
from hybrid_rl.models.attention.backends import Backend
from hybrid_rl.models.attention.unpacked import UnpackedRow
from hybrid_rl.models.int8.rounding import Int8Weight
from hybrid_rl.models.packed.packed_model import PackedModel
from hybrid_rl.models.row import Layout


@contextmanager
def rounded_keys(model: PackedModel) -> Iterator[None]:
    """Inside the block the packed rows of a model attend over keys and values that are rounded per token and head, by
    the attention that the model runs on. No gradients flow."""
    own = model.attention
    model.attention = _RoundedBackend(own.name, own.kernel)
    try:
        yield
    finally:
        model.attention = own


@dataclass(frozen=True)
class _RoundedBackend(Backend):
    """A chosen attention, over rounded keys and values."""

    def context(self, layout: Layout, device: torch.device | str) -> AttentionContext:
        """Return the attention of one row."""
        context = super().context(layout, device)
        assert not isinstance(context, UnpackedRow), "rows are packed with an engine that has such a cache"
        return _RoundedContext(context)


class _RoundedContext:
    """An attention context that gets rounded keys and values."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Round keys and values, and attend over what the integers stand for."""
        key, value = (Int8Weight.of(tensor).as_float().to(tensor.dtype) for tensor in (key, value))
        return self._context.attend(layer, query, key, value, options)
