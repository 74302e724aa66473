"""One attention function under every layer of any Hugging Face causal LM, and packed attention for training.

Sequences travel packed: one row of T tokens, no padding in the linear layers. The function registered here hands each
layer's projected queries, keys and values to a context object: `PackedAttention` when training, the engine's paged
cache when generating. The thread holds the context: as a keyword it would reach attention only where every layer of an
architecture hands on what it does not know. No mask function is registered beside it: transformers then builds no mask,
and does not look into the positions for packing either, which would wait for the device in every forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from hybrid_rl.errors import ModelError
from hybrid_rl.models.linear import Linears
from hybrid_rl.tensors.transfer import upload

NAME = "hybrid_rl_packed"

# Sequences whose lengths lie within this factor share one padded attention call: at most 1 - 0.75^2 of its work is
# waste, against one more kernel launch per layer for every further bucket.
BUCKET_FILL = 0.75
SMALL_LENGTH = 32  # below this a launch costs more than the padding it would save


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks for beyond causal softmax attention. window: tokens seen, own included; None = all before."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


class AttentionContext(Protocol):
    """Computes attention for one packed row of T tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query: [T, num_heads, D]; key, value: [T, num_key_value_heads, D]. Returns [T, num_heads, D]."""
        ...


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer. query: [1, H, T, D]; returns [1, T, H, D] and no weights."""
    context = current_context()
    if attention_mask is not None:  # ours is None: the architecture made one itself, which packing would ignore
        raise ModelError(f"{type(module).__name__} makes an attention mask of its own; it cannot run packed")
    layer, options = options_of(module, keywords)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return context.attend(layer, q, k, v, options).unsqueeze(0), None


# Keywords that decide nothing here: dropout is off, and positions are in queries and keys already.
IGNORED = frozenset({"dropout", "position_ids", "use_cache", "is_causal", "return_dict"})


def options_of(module: nn.Module, keywords: Mapping[str, Any]) -> tuple[int, AttentionOptions]:
    """The number of a layer, and what it asks for by the keywords of its call of attention.

    Raises ModelError for what packed attention does not have.
    """
    name = type(module).__name__
    asked = {word: value for word, value in keywords.items() if value is not None and value is not False}
    options = AttentionOptions(
        scale=asked.pop("scaling", None), window=asked.pop("sliding_window", None), softcap=asked.pop("softcap", None)
    )
    if "s_aux" in asked or "position_bias" in asked:
        raise ModelError(f"{name} uses attention sinks or a position bias, which packed attention does not have")
    if getattr(module, "is_causal", True) is False or keywords.get("is_causal") is False:
        raise ModelError(f"{name} is not causal; only causal language models are supported")
    unknown = sorted(asked.keys() - IGNORED)
    if unknown:
        raise ModelError(f"{name} hands {unknown[0]!r} to its attention, which packed attention does not know")
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        raise ModelError(
            f"{name} scales queries by their place in the row instead of their position (attn_temperature_tuning); "
            f"those of a packed row would be scaled by the samples before them"
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelError(f"{name} has no layer_idx, so its keys and values cannot be cached")
    return layer, options


AttentionInterface.register(NAME, attention_forward)


def attention_configs(module: nn.Module) -> list[Any]:
    """The distinct config objects that decide which attention function the layers of a model use."""
    return list({id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values())


class _Overrides(threading.local):
    """What this thread uses in the place of the attention functions that configs name, by the config's id, and where
    those of this module send queries, keys and values."""

    names: dict[int, str] = {}
    context: AttentionContext | None = None


_overrides = _Overrides()


def current_context() -> AttentionContext:
    """The context of this thread. Whoever names an attention function of this package gives one."""
    assert _overrides.context is not None
    return _overrides.context


_config_class: Any = PreTrainedConfig
_named: Any = _config_class._attn_implementation


def _implementation(config: Any) -> Any:
    return _overrides.names.get(id(config)) or _named.fget(config)


# What a config names belongs to its user: other threads (a reward that runs the policy, a judge made from the same
# config) go on with it while this one runs packed. So nothing is written into configs; reading them looks here first.
_config_class._attn_implementation = property(_implementation, _named.fset)


@contextmanager
def attention_functions(
    configs: Sequence[Any], names: Sequence[str], context: AttentionContext | None = None
) -> Iterator[None]:
    """Inside the block, and in this thread only, the layers of each config use the attention function of that name. A
    user's own calls of the model stay as they were. context: where the functions of this module send what they get.
    """
    before = _overrides.names, _overrides.context
    _overrides.names = before[0] | {id(config): name for config, name in zip(configs, names, strict=True)}
    _overrides.context = context
    try:
        yield
    finally:
        _overrides.names, _overrides.context = before


def checkpoint_contexts(
    configs: Sequence[Any], linears: Linears
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The context_fn of torch.utils.checkpoint: what is recomputed in the backward pass, long after the blocks of the
    forward pass were left and maybe in another thread, uses the attention and the linear layers of that pass."""
    functions = attention_functions(configs, [config._attn_implementation for config in configs], _overrides.context)
    return nullcontext(), _recompute(functions, linears, linears.num_rows)


@contextmanager
def _recompute(functions: AbstractContextManager[None], linears: Linears, num_rows: int) -> Iterator[None]:
    with functions, linears.fast(num_rows):
        yield


class PackedAttention:
    """Causal attention within each of N packed sequences; no sequence sees, or pays for, another.

    Sequences are padded per bucket of similar lengths inside the attention call only. Padding repeats a sequence's own
    last token behind its end, where causality hides it from every real query.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._num_tokens = sum(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        buckets = [Bucket.build(starts, lengths, members) for members in length_buckets(lengths)]
        (self._buckets,), (self._restore,) = sent([buckets], [restoring_order(buckets)], torch.device(device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext."""
        if query.shape[0] != self._num_tokens:
            raise ModelError(f"attention was planned for {self._num_tokens} tokens but got {query.shape[0]}")
        parts = []
        for bucket in self._buckets:
            q, k, v = (bucket.pad(tensor).transpose(1, 2) for tensor in (query, key, value))
            parts.append(bucket.unpad(causal_attention(q, k, v, options).transpose(1, 2)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self._restore is None else out[self._restore]


@dataclass(frozen=True)
class Bucket:
    """Sequences of a packed row that are padded to one length. count: how many; length: of the longest. Built on the
    CPU; `sent` brings it to where the row is."""

    count: int
    length: int
    first: int
    contiguous: bool  # equal lengths, one after the other: a view will do
    gather: Tensor  # int64 [count * length], token of each padded place
    real: Tensor | None  # bool [count * length], None where all are
    places: Tensor | None  # int64 [tokens in the bucket], the padded places that are real; None where all are
    tokens: Tensor  # int64 [tokens in the bucket]

    @classmethod
    def build(cls, starts: Tensor, lengths: Sequence[int], members: Sequence[int]) -> Bucket:
        """The bucket of the sequences `members`. starts: int64 [N], place of the first token of every sequence."""
        length = max(lengths[i] for i in members)
        own = torch.tensor([lengths[i] for i in members])
        begin = starts[list(members)]
        place = torch.arange(length)
        gather = begin[:, None] + torch.minimum(place, own[:, None] - 1)
        real = (place < own[:, None]).reshape(-1)
        full = bool(real.all())
        contiguous = full and bool((begin.diff() == length).all())
        flat = gather.reshape(-1)
        return cls(
            count=len(members),
            length=length,
            first=int(begin[0]),
            contiguous=contiguous,
            gather=flat,
            real=None if full else real,
            places=None if full else real.nonzero()[:, 0],
            tokens=flat[real],
        )

    def pad(self, tensor: Tensor) -> Tensor:
        """[T, ...] to [count, length, ...]: behind its end a sequence repeats its own last token."""
        if self.contiguous:
            rows = tensor[self.first : self.first + self.count * self.length]
        else:
            rows = tensor.index_select(0, self.gather)
        return rows.view(self.count, self.length, *tensor.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """[count, length, ...] to the rows of `tokens`."""
        flat = padded.reshape(self.count * self.length, *padded.shape[2:])
        return flat if self.places is None else flat.index_select(0, self.places)

    def put(self, whole: Tensor, padded: Tensor) -> None:
        """Write the real rows of [count, length, ...] to their places in [T, ...]."""
        if self.contiguous:
            rows = whole[self.first : self.first + self.count * self.length]
            rows.view(padded.shape).copy_(padded)
        else:
            whole.index_copy_(0, self.tokens, self.unpad(padded))


_TENSORS = ("gather", "real", "places", "tokens")


def sent(
    buckets: Sequence[Sequence[Bucket]], others: Sequence[Tensor | None], device: torch.device
) -> tuple[list[list[Bucket]], list[Any]]:
    """Lists of buckets, and other tensors or None (it stays None), on a device, in one copy."""
    own = [getattr(bucket, name) for several in buckets for bucket in several for name in _TENSORS]
    arrived = iter(upload([tensor for tensor in (*own, *others) if tensor is not None], device))

    def moved(bucket: Bucket) -> Bucket:
        there: dict[str, Any] = {name: next(arrived) for name in _TENSORS if getattr(bucket, name) is not None}
        return replace(bucket, **there)

    return [[moved(bucket) for bucket in several] for several in buckets], [
        None if tensor is None else next(arrived) for tensor in others
    ]


def restoring_order(buckets: Sequence[Bucket]) -> Tensor | None:
    """Index, on the CPU, that brings the concatenated rows of buckets back into the order of the row; None where they
    are in it, as when samples run from long to short."""
    tokens = torch.cat([bucket.tokens for bucket in buckets])
    order = torch.arange(tokens.numel())
    return None if torch.equal(tokens, order) else torch.empty_like(tokens).scatter_(0, tokens, order)


def length_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences grouped so that each is at least BUCKET_FILL as long as the longest of its bucket."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets: list[list[int]] = []
    longest = 0
    for index in order:
        if buckets and (lengths[index] >= BUCKET_FILL * longest or longest <= SMALL_LENGTH):
            buckets[-1].append(index)
        else:
            buckets.append([index])
            longest = lengths[index]
    return [sorted(bucket) for bucket in buckets]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """query: [B, H, L, D]; key, value: [B, H_kv, L, D]. Returns [B, H, L, D]."""
    length = query.shape[2]
    if options.softcap is None and (options.window is None or options.window >= length):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scale, enable_gqa=True)
    place = torch.arange(length, device=query.device)
    visible = place[:, None] >= place
    if options.window is not None:
        visible &= place[:, None] - place < options.window
    return masked_attention(query, key, value, visible, options)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    """Attention where bool `visible` (broadcastable to [B, H, L_q, L_k]) allows it; with soft-capping where asked
    for."""
    if options.softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=options.scale, enable_gqa=True)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = (query @ key.transpose(-1, -2)) * scale
    scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    precise = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(-1, dtype=precise).to(value.dtype) @ value
