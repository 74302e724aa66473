"""Attention of a packed row through csrc/packed_attention.cpp: CPU, float32; bfloat16 is widened, and rounded after.

One call per layer whatever the row holds: nothing is padded, no key of a shared prompt is copied, and windows and
soft-capping are no exceptions. `PaddedAttention` is its oracle, and runs instead if the extension was not built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rl.batch import lengths_to_offsets
from hybrid_rl.compat import native
from hybrid_rl.models.attention.attention_function import AttentionOptions
from hybrid_rl.models.row import Layout

LARGEST_HEAD = 512


def is_available() -> bool:
    """Whether the operators were built."""
    return None not in (native.operator("packed_attention"), native.operator("packed_attention_backward"))


class CompiledAttention:
    """AttentionContext of one row."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        lengths = layout.lengths
        starts = lengths_to_offsets(lengths).tolist()
        families = [[segment] for segment in range(layout.first_child)]  # the prefix and the roots, with their children
        for child, root in enumerate(layout.parents, layout.first_child):
            families[layout.first_root + root].append(child)
        order = [segment for family in families for segment in family]
        self._segments = (
            torch.tensor([starts[segment] for segment in order]),
            torch.tensor([lengths[segment] for segment in order]),
            lengths_to_offsets([len(family) for family in families]),
            layout.prefix,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Same arguments as AttentionContext.attend."""
        self._layout.check_num_tokens(query)
        scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
        settings = (*self._segments, scale, options.window or 0, options.softcap or 0.0)
        apply: Any = _CompiledAttention.apply
        out: Tensor = apply(*(tensor.float().contiguous() for tensor in (query, key, value)), settings)
        return out.to(query.dtype)


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, settings: tuple[Any, ...]) -> Tensor:
        out, lse = native.built_operator("packed_attention")(query, key, value, *settings)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.settings = settings
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        backward = native.built_operator("packed_attention_backward")
        return (*backward(grads[0].contiguous(), *ctx.saved_tensors, *ctx.settings), None)
