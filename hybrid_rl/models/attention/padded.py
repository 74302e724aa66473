"""Attention of a packed row through PyTorch's scaled_dot_product_attention: the oracle of the other forms.

It runs on every device and dtype, and with every option, so it also runs if no other form can. Its price is
padding and copies: sequences are padded per bucket of similar lengths, and each completion gets a copy of the keys and
values of its prompt, each prompt one of those of the prefix. Everything outside attention is still computed once per
token of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybrid_rl.memory.transfer import upload
from hybrid_rl.models.attention.attention_function import AttentionOptions
from hybrid_rl.models.row import Layout, padded

# Sequences whose lengths are within this factor share one padded attention call: at most 1 - 0.75^2 of its work is
# waste, against one more kernel launch per layer for every further bucket.
BUCKET_FILL = 0.75
SMALL_LENGTH = 32  # below this a launch costs more than the padding it would save


class PaddedAttention:
    """AttentionContext of one row. No sequence sees another one, except a completion its prompt and all the prefix."""

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        self._layout = layout
        own, seen = torch.arange(layout.num_tokens).split(layout.lengths), layout.seen()
        # What sees nothing before itself needs no mask: the prefix, or if there is none the roots.
        num_plain = layout.first_root or len(layout.roots)
        seen[:num_plain] = own[:num_plain]
        buckets, order = [], []
        for segments in (range(num_plain), range(num_plain, len(own))):
            for members in length_buckets([len(seen[segment]) for segment in segments]):
                chosen = [segments[member] for member in members]
                buckets.append(_Bucket.of([own[i] for i in chosen], [seen[i] for i in chosen]))
                order += [own[i] for i in chosen]
        tokens = torch.cat(order)
        in_order = bool((tokens.diff() == 1).all())  # as if samples run from long to short
        sent = iter(_sent([*chain(*buckets), None if in_order else tokens.argsort()], torch.device(device)))
        self._buckets = [_Bucket._make(islice(sent, len(bucket))) for bucket in buckets]
        self._restore: Tensor | None = next(sent)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Same arguments as AttentionContext.attend."""
        self._layout.check_num_tokens(query)
        out = torch.cat([bucket.attend(query, key, value, options) for bucket in self._buckets])
        return out if self._restore is None else out.index_select(0, self._restore)


class _Bucket(NamedTuple):
    """B sequences padded to L_q queries and L_k keys. Padding repeats the last token of a sequence, which
    causality hides from every real query.

    queries: the tokens of all padded places, int64 [B * L_q], or a slice if they are side by side; keys: the same for
    the tokens that they see, None if that is the queries themselves; positions: int64 [B, L_q], of the queries in their
    sequences; real: int64, the padded places that are real ones, None if all are.
    """

    queries: Tensor | slice
    keys: Tensor | slice | None
    positions: Tensor
    real: Tensor | None

    @classmethod
    def of(cls, own: Sequence[Tensor], seen: Sequence[Tensor]) -> _Bucket:
        """Make one from the tokens of each sequence and those that its last token sees, int64 [length] each."""
        positions = [torch.arange(len(keys) - len(queries), len(keys)) for queries, keys in zip(own, seen, strict=True)]
        queries, length = padded(own), max(map(len, own))
        real = torch.cat([torch.arange(len(tokens)) + i * length for i, tokens in enumerate(own)])
        return cls(
            queries=_slice(queries.flatten()),
            keys=None if all(a is b for a, b in zip(own, seen, strict=True)) else _slice(padded(seen).flatten()),
            positions=padded(positions),
            real=None if len(real) == queries.numel() else real,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attend from the tokens of this bucket: [T, H, D] of the whole packed row to [T_bucket, H, D]."""
        places = self.queries if self.keys is None else self.keys
        q = self._taken(query, self.queries)
        k, v = self._taken(key, places), self._taken(value, places)
        if self.keys is None and options.softcap is None and (options.window is None or options.window >= q.shape[2]):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.scale, enable_gqa=True)
        else:
            distance = self.positions[:, None, :, None] - torch.arange(k.shape[2], device=k.device)
            visible = distance >= 0
            if options.window is not None:
                visible &= distance < options.window
            out = masked_attention(q, k, v, visible, options)
        rows = out.transpose(1, 2).flatten(0, 1)
        return rows if self.real is None else rows.index_select(0, self.real)

    def _taken(self, rows: Tensor, places: Tensor | slice) -> Tensor:
        """Take [T, heads, D] to [B, heads, L, D]."""
        taken = rows[places] if isinstance(places, slice) else rows.index_select(0, places)
        return taken.unflatten(0, (len(self.positions), -1)).transpose(1, 2)


def _slice(places: Tensor) -> Tensor | slice:
    """Return places as a slice, which copies nothing, if they are side by side."""
    first = int(places[0])
    return slice(first, first + len(places)) if bool((places.diff() == 1).all()) else places


def _sent(columns: Sequence[Any], device: torch.device) -> list[Any]:
    """Send the tensors among the columns to a device in one copy; leave the rest as it is."""
    arrived = iter(upload([column for column in columns if isinstance(column, Tensor)], device))
    return [next(arrived) if isinstance(column, Tensor) else column for column in columns]


def length_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices of sequences so that each is at least BUCKET_FILL as long as the longest of its bucket."""
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


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention to the keys that bool `visible` (broadcastable to [B, H, L_q, L_k]) allows, with soft-capping.

    query: [B, H, L_q, D]; key, value: [B, H_kv, L_k, D]. Returns [B, H, L_q, D].
    """
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
