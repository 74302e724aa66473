"""Attention in parts: each part gives its output and its logsumexp, from which the whole is put together.

softmax(q [K_1 K_2]) [V_1 V_2] is the mean of the parts' outputs weighted by exp(lse_1) and exp(lse_2). The backward
pass of a part, called with the output and logsumexp of the *whole*, gives that part's share of the gradients: it needs
only P = exp(q K^T - lse) and the row sums of grad * out (Liu et al. 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rl.models.attention.interface import AttentionOptions, Bucket, length_buckets

Gradients = tuple[Tensor, Tensor, Tensor]


class Part(Protocol):
    """Attention of runs of queries to runs of keys, a run seeing only the run of its own number."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """query: [T_q, H, D]; key, value: [T_k, H_kv, D]. Returns the output [T_q, H, D] and the logsumexp of the
        scaled scores [T_q, H], float32 (float64 for float64 input)."""
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        options: AttentionOptions,
    ) -> Gradients:
        """Gradients of query, key and value, for the output and logsumexp of all parts together."""
        ...


@dataclass(frozen=True)
class Parts:
    """What a row consists of. own: every segment with itself, causally; shared: the tokens from num_root_tokens on with
    the first num_shared_tokens, all of its run; None where nothing is shared."""

    own: Part
    shared: Part | None = None
    num_root_tokens: int = 0
    num_shared_tokens: int = 0


def parted_attention(query: Tensor, key: Tensor, value: Tensor, parts: Parts, options: AttentionOptions) -> Tensor:
    """Attention of a row put together from its parts; differentiable. Shapes as in AttentionContext."""
    apply: Any = _PartedAttention.apply
    out: Tensor = apply(query, key, value, parts, options)
    return out


class _PartedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Parts, options: AttentionOptions) -> Tensor:
        out, lse = parts.own.forward(query, key, value, options)
        if parts.shared is not None:
            own, own_lse = out[parts.num_root_tokens :], lse[parts.num_root_tokens :]
            front = slice(parts.num_shared_tokens)
            other, other_lse = parts.shared.forward(query[parts.num_root_tokens :], key[front], value[front], options)
            total = torch.logaddexp(own_lse, other_lse)
            merged = (own_lse - total).exp()[..., None] * own + (other_lse - total).exp()[..., None] * other
            own.copy_(merged)
            own_lse.copy_(total)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts, ctx.options = parts, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        query, key, value, out, lse = ctx.saved_tensors
        parts: Parts = ctx.parts
        own = parts.own.backward(grad, query, key, value, out, lse, ctx.options)
        if parts.shared is not None:
            back, front = slice(parts.num_root_tokens, None), slice(parts.num_shared_tokens)
            other = parts.shared.backward(
                grad[back], query[back], key[front], value[front], out[back], lse[back], ctx.options
            )
            for mine, theirs, rows in zip(own, other, (back, front, front), strict=True):
                mine[rows] += theirs
        return (*own, None, None)


class CausalBuckets:
    """Part: N sequences one after the other, each causally with itself, on the CPU; padded per bucket of similar
    lengths. A padded query repeats a real one and gets a gradient of zero, so it adds nothing to any key."""

    def __init__(self, lengths: Sequence[int]) -> None:
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        self._buckets = [Bucket.build(starts, lengths, members) for members in length_buckets(lengths)]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """See Part."""
        out = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(query.shape[:2], dtype=_lse_dtype(query))
        for bucket in self._buckets:
            q, k, v = (bucket.pad(tensor).transpose(1, 2) for tensor in (query, key, value))
            results = _cpu_forward(q, k, v, 0.0, True, scale=options.scale)
            for whole, part in zip((out, lse), results, strict=True):
                bucket.put(whole, part.transpose(1, 2))
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        options: AttentionOptions,
    ) -> Gradients:
        """See Part."""
        gradients = tuple(torch.empty(t.shape, dtype=t.dtype) for t in (query, key, value))
        for bucket in self._buckets:
            q, k, v, o, total = (bucket.pad(tensor).transpose(1, 2) for tensor in (query, key, value, out, lse))
            g = bucket.pad(grad)
            if bucket.real is not None:
                g = g * bucket.real.view(bucket.count, bucket.length, 1, 1)
            parts = _cpu_backward(g.transpose(1, 2), q, k, v, o, total, 0.0, True, scale=options.scale)
            for whole, part in zip(gradients, parts, strict=True):
                bucket.put(whole, part.transpose(1, 2))
        return gradients[0], gradients[1], gradients[2]


class Rectangles:
    """Part: the i-th run of queries sees all of the i-th run of keys, on the CPU; one call per run, nothing is
    padded or copied."""

    def __init__(self, queries: Sequence[int], keys: Sequence[int]) -> None:
        self._queries, self._keys = list(queries), list(keys)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """See Part."""
        results = [
            _cpu_forward(q, k, v, scale=options.scale)
            for q, k, v in zip(*self._runs((query,), (key, value)), strict=True)
        ]
        out, lse = (torch.cat([part[0].transpose(0, 1) for part in parts]) for parts in zip(*results, strict=True))
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        options: AttentionOptions,
    ) -> Gradients:
        """See Part."""
        results = [
            _cpu_backward(g, q, k, v, o, total, 0.0, False, scale=options.scale)
            for g, q, o, total, k, v in zip(*self._runs((grad, query, out, lse), (key, value)), strict=True)
        ]
        dq, dk, dv = (torch.cat([part[0].transpose(0, 1) for part in parts]) for parts in zip(*results, strict=True))
        return dq, dk, dv

    def _runs(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[list[Tensor]]:
        split = [tensor.split(self._queries) for tensor in queries] + [tensor.split(self._keys) for tensor in keys]
        return [[run.transpose(0, 1)[None] for run in runs] for runs in split]


def _lse_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


# Behind scaled_dot_product_attention on CPUs, which does not hand out the logsumexp. Both know grouped key heads; both
# end the process when there is no query.
_cpu_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
