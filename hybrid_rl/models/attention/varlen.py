"""Attention of packed rows through CUDA kernels that take sequences of different lengths as they lie.

Two kernels of one kind: the operators behind `torch.nn.attention.varlen` (its public function gives the logsumexp but
takes none in the backward pass, and its arguments differ between torch 2.11 and 2.13; the operators' do not), and
flash-attn's. Both know grouped key heads, align causality and windows with the last query and key of a run, and return
a logsumexp of [H, T_q] in float32 (Dao 2023, arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_rl.batch import lengths_to_offsets
from hybrid_rl.models.attention.interface import AttentionOptions
from hybrid_rl.models.attention.parts import Gradients, Parts, parted_attention
from hybrid_rl.models.attention.shared import check_num_tokens, child_keys, cuts
from hybrid_rl.models.row import Layout
from hybrid_rl.tensors.transfer import upload


@dataclass(frozen=True)
class Runs:
    """Runs of queries and of keys, one after the other without gaps, none empty. query_offsets, key_offsets: int32
    [N + 1] on the device; max_*: tokens of the longest run; causal: the last query of a run sees all of its keys, the
    one before it one less, and so on."""

    query_offsets: Tensor
    key_offsets: Tensor
    max_queries: int
    max_keys: int
    causal: bool

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device, *, causal: bool) -> Runs:
        """From the tokens of every run."""
        (runs,) = cls.several([(queries, keys, causal)], device)
        return runs

    @classmethod
    def several(cls, runs: Sequence[tuple[Sequence[int], Sequence[int], bool]], device: torch.device) -> list[Runs]:
        """From queries, keys and `causal` of each, sent to the device in one copy."""
        offsets = [lengths_to_offsets(lengths).int() for queries, keys, _ in runs for lengths in (queries, keys)]
        there = upload(offsets, device)
        return [
            cls(there[2 * number], there[2 * number + 1], max(queries), max(keys), causal)
            for number, (queries, keys, causal) in enumerate(runs)
        ]

    def window(self, options: AttentionOptions) -> tuple[int, int]:
        """Tokens before and behind a query's own place that it sees, -1 for all."""
        if not self.causal:
            return -1, -1
        return (-1 if options.window is None else options.window - 1), 0


class Kernel(Protocol):
    """One library's forward and backward pass. The logsumexp is [H, T_q] here."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, runs: Runs, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Output [T_q, H, D] and logsumexp."""
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: Runs,
        options: AttentionOptions,
    ) -> Gradients:
        """Gradients of query, key and value, for any output and logsumexp."""
        ...


class TorchKernel:
    """What torch.nn.attention.varlen calls: FlashAttention 2, or 3 after PyTorch's switch (see backends.py)."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, runs: Runs, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        left, right = runs.window(options)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            runs.query_offsets,
            runs.key_offsets,
            runs.max_queries,
            runs.max_keys,
            0.0,
            runs.causal and left < 0,
            False,
            scale=options.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: Runs,
        options: AttentionOptions,
    ) -> Gradients:
        """See Kernel."""
        left, right = runs.window(options)
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the dropout that there is not
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            lse,
            runs.query_offsets,
            runs.key_offsets,
            runs.max_queries,
            runs.max_keys,
            0.0,
            runs.causal and left < 0,
            random_state,
            torch.empty(0, device=query.device),
            scale=options.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return gradients


class FlashAttnKernel:
    """The flash-attn package, version 2.7 or newer. functions: its module flash_attn.flash_attn_interface."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, runs: Runs, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        out, lse, *_ = self._functions._flash_attn_varlen_forward(
            query,
            key,
            value,
            runs.query_offsets,
            runs.key_offsets,
            runs.max_queries,
            runs.max_keys,
            **self._settings(query, runs, options),
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: Runs,
        options: AttentionOptions,
    ) -> Gradients:
        """See Kernel."""
        gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        self._functions._flash_attn_varlen_backward(
            grad,
            query,
            key,
            value,
            out,
            lse,
            *gradients,
            runs.query_offsets,
            runs.key_offsets,
            runs.max_queries,
            runs.max_keys,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._settings(query, runs, options),
        )
        return gradients

    def _settings(self, query: Tensor, runs: Runs, options: AttentionOptions) -> dict[str, Any]:
        left, right = runs.window(options)
        return {
            "dropout_p": 0.0,
            "softmax_scale": query.shape[-1] ** -0.5 if options.scale is None else options.scale,
            "causal": runs.causal,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": options.softcap or 0.0,
            "alibi_slopes": None,
        }


@dataclass(frozen=True)
class VarlenPart:
    """Part (see parts.py) computed by such a kernel."""

    kernel: Kernel
    runs: Runs

    def forward(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """See Part."""
        query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        out, lse = self.kernel.forward(query, key, value, self.runs, options)
        return out, lse.t()

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
        grad, query, key, value, out = (tensor.contiguous() for tensor in (grad, query, key, value, out))
        return self.kernel.backward(grad, query, key, value, out, lse.t().contiguous(), self.runs, options)


class VarlenAttention:
    """AttentionContext of a row, with or without shared prompts, on such a kernel.

    Where a window hides part of a prompt from its completions, each completion gets a copy of its prompt's keys and
    values: a run of a prompt has one window, and its completions would need one each.
    """

    def __init__(self, layout: Layout, kernel: Kernel, device: torch.device | str) -> None:
        self._layout, self._kernel, self._device = layout, kernel, torch.device(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext."""
        layout = self._layout
        check_num_tokens(layout, query)
        if not layout.children or not cuts(options, layout):
            return parted_attention(query, key, value, self._parts, options)
        first = layout.num_root_tokens
        roots = parted_attention(query[:first], key[:first], value[:first], self._roots, options)
        keys, values = (tensor.index_select(0, self._child_keys) for tensor in (key, value))
        return torch.cat([roots, parted_attention(query[first:], keys, values, self._children, options)])

    def _made(self, *runs: tuple[Sequence[int], Sequence[int], bool]) -> list[VarlenPart]:
        return [VarlenPart(self._kernel, its) for its in Runs.several(runs, self._device)]

    @cached_property
    def _parts(self) -> Parts:
        layout = self._layout
        own = (layout.lengths, layout.lengths, True)
        if not layout.children:
            return Parts(self._made(own)[0])
        prompts = layout.roots[: layout.num_shared]
        own_part, shared = self._made(own, (layout.child_totals(), prompts, False))
        return Parts(own_part, shared, layout.num_root_tokens, sum(prompts))

    @cached_property
    def _roots(self) -> Parts:
        return Parts(self._made((self._layout.roots, self._layout.roots, True))[0])

    @cached_property
    def _children(self) -> Parts:
        totals = [len(places) for places in child_keys(self._layout)]
        return Parts(self._made((self._layout.children, totals, True))[0])

    @cached_property
    def _child_keys(self) -> Tensor:
        (places,) = upload([torch.cat(child_keys(self._layout))], self._device)
        return places
