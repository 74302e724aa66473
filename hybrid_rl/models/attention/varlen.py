"""Attention of a packed row through CUDA kernels that take segments of different lengths without padding.

Two kernels of one kind: the operators behind `torch.nn.attention.varlen` (its public function gives the logsumexp but
takes none in the backward pass, and its arguments differ between torch 2.11 and 2.13; the operators' do not), and
those of the optional package flash-attn. Both know grouped key heads, align causality and windows with the last query
and key of a segment, and return a logsumexp of [H, T_q] in float32 (Dao 2023, arXiv:2307.08691).

A completion that shares its prompt attends in two parts, to itself and to its prompt: softmax(q [K_1 K_2]) [V_1 V_2] is
the mean of the parts' outputs weighted by exp(lse_1) and exp(lse_2). The backward pass of a part, called with the
output and logsumexp of the *whole*, gives that part's share of the gradients: it needs only P = exp(q K^T - lse) and
the row sums of grad * out (Liu et al. 2023, arXiv:2310.01889). A prefix of the row is one more part, for everything
after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rl.batch import lengths_to_offsets
from hybrid_rl.memory.transfer import upload
from hybrid_rl.models.attention.attention_function import AttentionOptions
from hybrid_rl.models.row import Layout

Gradients = tuple[Tensor, Tensor, Tensor]


class Segments(NamedTuple):
    """Segments of queries and of the keys that they see, one after the other without gaps, none empty.

    query_offsets, key_offsets: int32 [N + 1] on the device; max_*: tokens of the longest; causal: the last query of a
    segment sees all of its keys, the one before it one less, and so on.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    max_queries: int
    max_keys: int
    causal: bool

    def window(self, options: AttentionOptions) -> dict[str, int]:
        """Return how many tokens before and after its own place a query sees, -1 for all, as both libraries take it."""
        if not self.causal:
            return {"window_size_left": -1, "window_size_right": -1}
        return {"window_size_left": -1 if options.window is None else options.window - 1, "window_size_right": 0}


class AttentionState(NamedTuple):
    """The tensors of attention that a backward pass needs. query, out: [T_q, H, D]; key, value: [T_k, H_kv, D]; lse:
    logsumexp of the scaled scores, float32 [H, T_q]. All contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class TorchKernel:
    """What torch.nn.attention.varlen calls: FlashAttention 2, or 3 after PyTorch's switch (see backends.py)."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the output [T_q, H, D] and logsumexp [H, T_q] of contiguous rows."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(query, key, value, *segments[:4], 0.0, segments.causal and options.window is None, False),
            scale=options.scale,
            **segments.window(options),
        )
        return out, lse

    def backward(self, grad: Tensor, state: AttentionState, segments: Segments, options: AttentionOptions) -> Gradients:
        """Return the gradients of query, key and value, for any output and logsumexp. grad: [T_q, H, D], contiguous."""
        # The state of a random generator and its offset, for dropout, which is off.
        random = torch.zeros(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device)
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            *(grad, *state, *segments[:4], 0.0, segments.causal and options.window is None, *random),
            scale=options.scale,
            **segments.window(options),
        )
        return gradients


class FlashAttnKernel:
    """The flash-attn package, version 2.7 or newer. functions: its module flash_attn.flash_attn_interface."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Same arguments as TorchKernel.forward."""
        out, lse, *_ = self._functions._flash_attn_varlen_forward(
            query, key, value, *segments[:4], **self._settings(query, segments, options)
        )
        return out, lse

    def backward(self, grad: Tensor, state: AttentionState, segments: Segments, options: AttentionOptions) -> Gradients:
        """Same arguments as TorchKernel.backward."""
        gradients = (torch.empty_like(state.query), torch.empty_like(state.key), torch.empty_like(state.value))
        self._functions._flash_attn_varlen_backward(
            grad,
            *state,
            *gradients,
            *segments[:4],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._settings(state.query, segments, options),
        )
        return gradients

    def _settings(self, query: Tensor, segments: Segments, options: AttentionOptions) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "softmax_scale": query.shape[-1] ** -0.5 if options.scale is None else options.scale,
            "causal": segments.causal,
            **segments.window(options),
            "softcap": options.softcap or 0.0,
            "alibi_slopes": None,
        }


Kernel = TorchKernel | FlashAttnKernel


class SharedPart(NamedTuple):
    """Tokens at the end of a row (queries), which see all of a segment before them (keys)."""

    queries: slice
    keys: slice
    segments: Segments

    def of(self, state: AttentionState) -> AttentionState:
        """Return the rows of this part."""
        queries, keys, lse = self.queries, self.keys, state.lse[:, self.queries].contiguous()
        return AttentionState(state.query[queries], state.key[keys], state.value[keys], state.out[queries], lse)


@dataclass(frozen=True)
class Parts:
    """The parts of the attention of a row. own: every segment with itself, causally; shared: what else is seen."""

    own: Segments
    shared: Sequence[SharedPart] = ()


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, parts: Parts, options: AttentionOptions
    ) -> Tensor:
        results = kernel.forward(query, key, value, parts.own, options)
        state = AttentionState(query, key, value, *(tensor.contiguous() for tensor in results))
        for part in parts.shared:
            mine = part.of(state)
            other, other_lse = kernel.forward(mine.query, mine.key, mine.value, part.segments, options)
            total = torch.logaddexp(mine.lse, other_lse)
            weights = [(lse - total).exp().t()[..., None] for lse in (mine.lse, other_lse)]
            mine.out.copy_(weights[0] * mine.out + weights[1] * other)
            state.lse[:, part.queries] = total
        ctx.save_for_backward(*state)
        ctx.settings = kernel, parts, options
        return state.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kernel, parts, options = ctx.settings
        state, grad = AttentionState(*ctx.saved_tensors), grads[0].contiguous()
        gradients = kernel.backward(grad, state, parts.own, options)
        for part in parts.shared:
            others = kernel.backward(grad[part.queries], part.of(state), part.segments, options)
            gradients[0][part.queries] += others[0]
            gradients[1][part.keys] += others[1]
            gradients[2][part.keys] += others[2]
        return (*gradients, None, None, None)


class VarlenAttention:
    """AttentionContext of a row, with or without shared prompts, on such a kernel.

    If a window hides part of a prompt from its completions, each completion gets a copy of its prompt's keys and
    values: a segment of keys has one window, and the completions of a prompt would need one each. With a prefix each
    prompt and each completion gets a copy of that, too.
    """

    def __init__(self, layout: Layout, kernel: Kernel, device: torch.device | str) -> None:
        self._layout, self._kernel, self._device = layout, kernel, torch.device(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Same arguments as AttentionContext.attend."""
        layout = self._layout
        layout.check_num_tokens(query)
        is_shared = bool(layout.children or layout.prefix)
        if not is_shared or options.window is None or options.window >= layout.longest:
            return self._run(query, key, value, self._parts, options)
        first = layout.prefix or layout.num_root_tokens
        front = self._run(query[:first], key[:first], value[:first], self._front, options)
        keys, values = (tensor.index_select(0, self._copied_keys) for tensor in (key, value))
        return torch.cat([front, self._run(query[first:], keys, values, self._back, options)])

    def _run(self, query: Tensor, key: Tensor, value: Tensor, parts: Parts, options: AttentionOptions) -> Tensor:
        apply: Any = _VarlenAttention.apply
        out: Tensor = apply(query.contiguous(), key.contiguous(), value.contiguous(), self._kernel, parts, options)
        return out

    def _segments(self, *lengths: tuple[Sequence[int], Sequence[int], bool]) -> list[Segments]:
        """Make segments from the lengths of queries and keys and `causal` of each, sent to the device in one copy."""
        offsets = [lengths_to_offsets(own).int() for queries, keys, _ in lengths for own in (queries, keys)]
        there = iter(upload(offsets, self._device))
        return [Segments(next(there), next(there), max(q), max(k), causal) for q, k, causal in lengths]

    @cached_property
    def _parts(self) -> Parts:
        layout, places = self._layout, list[tuple[slice, slice]]()
        lengths: list[tuple[Sequence[int], Sequence[int], bool]] = [(layout.lengths, layout.lengths, True)]
        prefix, prompts = layout.prefix, layout.roots[: layout.num_shared]
        if layout.children:
            places.append((slice(layout.num_root_tokens, None), slice(prefix, prefix + sum(prompts))))
            lengths.append((layout.child_totals(), prompts, False))
        if prefix:
            places.append((slice(prefix, None), slice(prefix)))
            lengths.append(([layout.num_tokens - prefix], [prefix], False))
        own, *parts = self._segments(*lengths)
        pairs = zip(places, parts, strict=True)
        return Parts(own, [SharedPart(queries, keys, segments) for (queries, keys), segments in pairs])

    @property
    def _num_front(self) -> int:
        """Segments that see nothing before themselves: the prefix, or if there is none the roots."""
        return self._layout.first_root or self._layout.first_child

    @cached_property
    def _front(self) -> Parts:
        lengths = self._layout.lengths[: self._num_front]
        return Parts(self._segments((lengths, lengths, True))[0])

    @cached_property
    def _back(self) -> Parts:
        totals = [len(places) for places in self._layout.seen()[self._num_front :]]
        return Parts(self._segments((self._layout.lengths[self._num_front :], totals, True))[0])

    @cached_property
    def _copied_keys(self) -> Tensor:
        (places,) = upload([torch.cat(self._layout.seen()[self._num_front :])], self._device)
        return places
