"""Kernels that only allocate, for models on the meta device: what the kernels of the planned device keep and need.

A model runs on meta as it does elsewhere, operator by operator, except where it would call a kernel of a device. These
have the memory of those kernels, and no arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from hybrid_rl.compat import native
from hybrid_rl.compat.torch import base_of, storage_id, version_of
from hybrid_rl.models.activation_offload import NUM_AHEAD, SMALLEST_BYTES
from hybrid_rl.models.attention.attention_function import AttentionOptions
from hybrid_rl.models.attention.varlen import AttentionState, Gradients, Segments


class FlashKernel:
    """The memory of attention kernels that read segments in place, on CUDA: FlashAttention's backward pass, with its
    float32 gradient of the queries, and gradients of keys and values for each head of queries."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Same arguments as TorchKernel.forward."""
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        return out, query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)

    def backward(self, grad: Tensor, state: AttentionState, segments: Segments, options: AttentionOptions) -> Gradients:
        """Same arguments as TorchKernel.backward."""
        gradients = tuple(map(torch.empty_like, (state.query, state.key, state.value)))
        held = [torch.empty_like(state.query, dtype=torch.float32), torch.empty_like(state.lse)]
        if state.key.shape[1] != state.query.shape[1]:
            held += [torch.empty_like(state.query), torch.empty_like(state.query)]
        del held
        return gradients  # type: ignore[return-value]


class Kernels(TorchFunctionMode):
    """Takes the calls of scaled_dot_product_attention and grouped_mm in the block to functions that only allocate.

    device_type: of the planned device, "cuda" or "cpu". Attention that no fused kernel takes there runs as it is, with
    its scores.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, or its stand-in."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention" and self._is_fused(args[0], args[1], args[2], kwargs):
            apply: Any = _FusedAttention.apply
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.empty_like(mask, dtype=args[0].dtype)  # kernels add it to the scores
            return apply(*args[:3], mask)
        if name == "__contains__":  # transformers looks for padding, to warn of it; there is none
            return False
        if name in ("grouped_mm", "_grouped_mm"):
            apply = _GroupedProduct.apply
            return apply(args[0], args[1])
        return func(*args, **kwargs)

    def _is_fused(self, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
        if self._device_type == "cpu":
            return query.shape[-1] == value.shape[-1]
        is_grouped, is_masked = key.shape[-3] != query.shape[-3], options.get("attn_mask") is not None
        # Flash attention takes groups of heads and no mask, the memory-efficient kernel a mask and no groups.
        flash = query.dtype != torch.float32 and not is_masked and query.shape[-1] == value.shape[-1] <= 256
        return flash or not is_grouped


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Let foreign code ask for autocast on the device type "meta", where it changes nothing and torch refuses it: peft
    asks for none of it on the device of a weight, whatever that is."""
    own = torch.autocast.__init__

    def init(self: torch.autocast, device_type: str, *args: Any, **named: Any) -> None:
        if device_type == "meta":
            device_type, args, named = "cpu", (), {"enabled": False}
        own(self, device_type, *args, **named)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = own  # type: ignore[method-assign]


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, _ = query.shape
        # The kernels lay their output out as [B, L, H, D], which the caller transposes back without a copy.
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        lse = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return *(tensor.new_empty(tensor.shape) for tensor in (query, key, value)), None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(*rows.shape[:-1], weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weights = ctx.saved_tensors
        wants_rows, wants_weights = ctx.needs_input_grad
        return torch.empty_like(rows) if wants_rows else None, torch.empty_like(weights) if wants_weights else None


MIN_RANGE, RANGE_ELEMENTS, TILE = 4096, 1 << 26, 128  # of models/heads/triton_logprobs.py, which imports Triton
NUM_PARTS = 16


@functools.cache
def allocate_compiled() -> torch.library.Library:
    """Let the operators of csrc that train on a CPU run on meta, where they allocate what they return; if they were
    built."""
    library = torch.library.Library("hybrid_rl", "IMPL", "Meta")
    like, row = torch.empty_like, lambda rows: rows.new_empty(rows.numel() // max(rows.shape[-1], 1))
    functions: dict[str, Any] = {
        "rms_norm": lambda rows, weight, *_: (like(rows), row(rows)),
        "rms_norm_backward": lambda grad, rows, weight, *_: (like(rows), like(weight)),
        "silu_gate": lambda gate, up: like(gate),
        "silu_gate_backward": lambda grad, gate, up: (like(gate), like(up)),
        "label_logprobs": lambda logits, *_: (row(logits), row(logits), row(logits)),
        "label_logprobs_backward": lambda *_: None,
        "packed_attention": lambda query, key, value, *_: (
            query.new_empty(*query.shape[:2], value.shape[2]),
            query.new_empty(query.shape[:2]),
        ),
        "packed_attention_backward": lambda grad, query, key, value, *_: (like(query), like(key), like(value)),
    }
    for name, function in functions.items():
        if native.operator(name) is not None:
            library.impl(name, function)
    return library  # which takes its functions back when it is gone


class FusedHead(torch.autograd.Function):
    """The memory of models/heads/triton_logprobs.py: logprobs and entropies [M] of hidden states [M, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, is_wide: bool) -> tuple[Tensor, Tensor]:
        """Allocate what the forward pass does."""
        num_rows = hidden.shape[0]
        parts = hidden.new_empty(3, NUM_PARTS, num_rows, dtype=torch.float32)
        rows = [hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(3)]
        del parts
        ctx.save_for_backward(hidden, weight, bias, *rows)
        ctx.is_wide = is_wide
        return hidden.new_empty(num_rows, dtype=torch.float32), hidden.new_empty(num_rows, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocate what the backward pass does, a range of columns at a time."""
        hidden, weight, bias, *_ = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if bias is not None and wants_bias else None
        width = min(max(MIN_RANGE, RANGE_ELEMENTS // max(hidden.shape)) // TILE * TILE, weight.shape[0])
        dtype = torch.float32 if ctx.is_wide else hidden.dtype
        logits = hidden.new_empty(hidden.shape[0], width, dtype=dtype)
        if wants_hidden:
            torch.empty_like(hidden, dtype=torch.float32)
        if wants_weight:
            weight.new_empty(width, weight.shape[1], dtype=torch.float32)
        del logits
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None


class OffloadedActivations:
    """The memory of models/activation_offload.py on a device with a host of its own. host_bytes: the most that waits
    there."""

    def __init__(self) -> None:
        self.host_bytes = 0
        self._saved: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}
        self._fetched: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def hooks(self) -> AbstractContextManager[None]:
        """Return the context in which activations are saved."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | int:
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)
        num_bytes = tensor.numel() * tensor.element_size()
        if is_weight or num_bytes < SMALLEST_BYTES or tensor.device.type != "meta":
            return tensor
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage_id(tensor), version_of(tensor), *layout)
        if key not in self._known or self._known[key][0].expired():
            self.host_bytes += num_bytes
            self._saved.append((tensor.shape, tensor.stride(), tensor.dtype))
            self._known[key] = (StorageWeakRef(tensor.untyped_storage()), len(self._saved) - 1)
        return self._known[key][1]

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        for number in range(max(0, packed - NUM_AHEAD), packed + 1):
            if number == packed or number not in self._taken:
                shape, stride, dtype = self._saved[number]
                if number not in self._fetched:
                    self._fetched[number] = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        self._taken.add(packed)
        return self._fetched.pop(packed)
