"""Attention of a row whose completions share prompts, through PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.interface import (
    AttentionOptions,
    Bucket,
    PackedAttention,
    length_buckets,
    masked_attention,
    restoring_order,
    sent,
)
from hybrid_rl.models.attention.parts import CausalBuckets, Parts, Rectangles, parted_attention
from hybrid_rl.models.row import Layout


def check_num_tokens(layout: Layout, query: Tensor) -> None:
    """Raise ModelError where the row is not the one that was laid out."""
    if query.shape[0] != layout.num_tokens:
        raise ModelError(f"attention was planned for {layout.num_tokens} tokens but got {query.shape[0]}")


def cuts(options: AttentionOptions, layout: Layout) -> bool:
    """Whether a window hides tokens of some sequence of the row from its later ones."""
    return options.window is not None and options.window < layout.longest


class SharedAttention:
    """AttentionContext: completions attend to the prompt of their group and causally to themselves.

    On the CPU prompt and completion are two parts, and no key of a prompt is copied. Where a window or soft-capping
    asks for scores that the parts do not have, or on another device, every completion gets a copy of its prompt's keys
    and values (as without sharing), but everything outside attention is still computed once.
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        self._layout = layout
        self._device = torch.device(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext."""
        layout = self._layout
        check_num_tokens(layout, query)
        plain = options.softcap is None and not cuts(options, layout) and query.shape[-1] == value.shape[-1]
        if plain and self._device.type == "cpu":
            return parted_attention(query, key, value, self._parts, options)
        front = slice(layout.num_root_tokens)
        roots = self._roots.attend(layer, query[front], key[front], value[front], options)
        return torch.cat([roots, self._gathered.attend(query, key, value, options)])

    @cached_property
    def _parts(self) -> Parts:
        layout = self._layout
        keys = layout.roots[: layout.num_shared]
        shared = Rectangles(layout.child_totals(), keys)
        return Parts(CausalBuckets(layout.lengths), shared, layout.num_root_tokens, sum(keys))

    @cached_property
    def _roots(self) -> PackedAttention:
        return PackedAttention(self._layout.roots, self._device)

    @cached_property
    def _gathered(self) -> _GatheredPrompts:
        return _GatheredPrompts(self._layout, self._device)


def child_keys(layout: Layout) -> list[Tensor]:
    """Places of the keys that each child sees: those of its root, then its own; int64 [root + child] each."""
    places = torch.arange(layout.num_tokens).split(layout.lengths)
    own = places[len(layout.roots) :]
    return [torch.cat([places[root], child]) for root, child in zip(layout.parents, own, strict=True)]


class _GatheredPrompts:
    """The children of a row with copies of their prompts' keys, padded per bucket of similar lengths.

    Padding repeats the last query and the last key; causality hides the latter from every real query.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._first = layout.num_root_tokens
        queries: list[Bucket] = []
        seen: list[Bucket] = []
        distances: list[Tensor] = []
        keys = child_keys(layout)
        totals = [len(places) for places in keys]
        starts = torch.tensor([0, *layout.children]).cumsum(0)[:-1]
        key_starts = torch.tensor([0, *totals]).cumsum(0)[:-1]
        before = torch.tensor([layout.roots[root] for root in layout.parents])
        for members in length_buckets(totals):
            queries.append(Bucket.build(starts, layout.children, members))
            seen.append(Bucket.build(key_starts, totals, members))
            # Distance of every key behind every query: 0 is the query's own key, a negative one lies ahead. A padded
            # query stands where the one that it repeats does, so that a window leaves it something to see.
            last = torch.tensor([layout.children[index] - 1 for index in members])
            place = torch.minimum(torch.arange(queries[-1].length), last[:, None])
            position = before[list(members), None] + place
            distances.append(position[:, None, :, None] - torch.arange(seen[-1].length))
        others = [torch.cat(keys), restoring_order(queries), *distances]
        (queries, seen), (self._keys, self._restore, *distances) = sent([queries, seen], others, device)
        self._buckets = list(zip(queries, seen, distances, strict=True))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Rows of the whole packed row in, [T_children, H, D] out."""
        query, key, value = query[self._first :], key.index_select(0, self._keys), value.index_select(0, self._keys)
        results = []
        for queries, seen, distance in self._buckets:
            visible = distance >= 0
            if options.window is not None:
                visible &= distance < options.window
            q, k, v = (b.pad(t).transpose(1, 2) for b, t in ((queries, query), (seen, key), (seen, value)))
            results.append(queries.unpad(masked_attention(q, k, v, visible, options).transpose(1, 2)))
        out = torch.cat(results)
        return out if self._restore is None else out[self._restore]
