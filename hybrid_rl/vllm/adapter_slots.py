"""The adapter in vLLM's own LoRA slot: replaced in place at every handoff, beside base weights that stay as they are.

vLLM puts a wrapper around each layer that may have an adapter. It holds the factors of the slot, padded with zeros to
the largest rank that vLLM was built for, and cut for tensor parallelism by vLLM. There is one slot here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from hybrid_rl.errors import ConfigError, HandoffError
from hybrid_rl.resharding.handoff.base import Delivered, Source, agree
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.vllm.weights import WeightWriter
from hybrid_rl.weights.low_rank import LowRank
from hybrid_rl.weights.views import CheckpointViews

ADAPTER_ID, SLOT = 1, 0
NO_FILE = "/handed over in memory, never read from a file"
MERGED = "set handoff.lora=merged"
RANKS: tuple[int, ...] = get_args(MaxLoRARanks)  # for which vLLM has kernels
_LISTED = 5  # tensors named in an error


def slot_arguments(ranks: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a vLLM with one slot. ranks: of the adapter of each tensor, by its name. dtype: of the
    engine.

    Raises ConfigError for adapters that vLLM does not compute.
    """
    fused = [name for name in ranks if not name.endswith(".weight")]
    if fused:
        raise ConfigError(
            f"vLLM has no slot for adapters of experts that are fused into one parameter, e.g. {fused[0]}; {MERGED}, "
            "or name other layers in lora.target_modules"
        )
    largest = max(ranks.values())
    if largest > RANKS[-1]:
        raise ConfigError(f"vLLM has no slot for an adapter of rank {largest}, but up to {RANKS[-1]}; {MERGED}")
    if device.type == "cuda" and dtype == torch.float32:
        raise ConfigError(
            f"vLLM's kernels for adapters on GPUs compute in bfloat16 and float16, and model.dtype=float32; {MERGED}"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(rank for rank in RANKS if rank >= largest),
        # Other layers get no wrapper, whose zeros would be computed with.
        "lora_target_modules": sorted({name.split(".")[-2] for name in ranks}),
    }


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """Take vLLM's wrappers out of a model inside the block, so that its tensors have the names under which they were
    traced, and vLLM's loader finds them."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, BaseLayerWithLoRA)
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, wrapper in places:
        parent._modules[name] = wrapper.base_layer
    try:
        yield
    finally:
        for parent, name, wrapper in places:
            parent._modules[name] = wrapper


@dataclass(frozen=True)
class _Part:
    """A box of an adapted tensor, and where it lies in a layer of this rank: rows of a piece's B, columns of its A. A
    layer has one piece, or, if it joins several tensors, one for each of them."""

    name: str
    rows: slice
    columns: slice
    piece: int
    at_row: int
    at_column: int


class AdapterSlot:
    """The slot of a live vLLM model.

    trace: where the model takes each tensor of the trainer from, with those that vLLM has rearranged since. ranks: of
    the adapter of each tensor. Raises ConfigError, naming them, if vLLM has no place for an adapter.
    """

    def __init__(self, model: Any, trace: Trace, ranks: Mapping[str, int]) -> None:
        self._manager = model.lora_manager
        self._parts: dict[str, list[_Part]] = {}
        problems = self._place(trace, ranks)
        if problems:
            name, problem = next(iter(problems.items()))
            raise ConfigError(
                f"vLLM's {type(model).__name__} has no place for {len(problems)} of {len(ranks)} adapters, e.g. that "
                f"of {name}: {problem}; {MERGED}"
            )
        self._ranks = dict(ranks)
        self.clear()

    # ---------------------------------------------------------------------------------------------------- places

    def _place(self, trace: Trace, ranks: Mapping[str, int]) -> dict[str, str]:
        """Find the parts of each layer. Returns, by name, why an adapter has no place."""
        problems: dict[str, str] = {}
        numbers = {spec.name: number for number, spec in enumerate(trace.sources)}
        for name in ranks:
            if name not in numbers:
                problems[name] = "the model has no such weight"
                continue
            for row in np.flatnonzero(trace.copies.source == numbers[name]):
                problem = self._add(trace, int(row), name)
                if problem is not None:
                    problems[name] = problem
        for layer, parts in self._parts.items():
            owners: dict[int, set[str]] = {}
            for part in parts:
                owners.setdefault(part.piece, set()).add(part.name)
            if any(len(names) > 1 for names in owners.values()) or len({p.name for p in parts}) < len(owners):
                problems[parts[0].name] = f"{layer} joins tensors otherwise than its slot does"
        return problems

    def _add(self, trace: Trace, row: int, name: str) -> str | None:
        """Add the part that one copy of the trace makes. Returns why it has no place, None if it has one."""
        copies = trace.copies
        target = trace.destinations[int(copies.destination[row])]
        layer = target.name.rpartition(".")[0]
        wrapper = self._manager.modules.get(layer)
        slices = getattr(wrapper, "output_slices", None)
        if wrapper is None or slices is None or len(target.shape) != 2:
            return f"{layer} is no linear layer that vLLM gives a slot"
        if tuple(copies.strides[row, :2].tolist()) != (target.shape[1], 1):
            return f"{layer} stores it in another order"
        (top, left), (bottom, right) = copies.low[row, :2].tolist(), copies.high[row, :2].tolist()
        at_row, at_column = divmod(int(copies.offset[row]), target.shape[1])
        ends = np.cumsum(slices)
        while top < bottom:
            piece = int(np.searchsorted(ends, at_row, side="right"))
            if piece == len(ends):
                return f"{layer} has {target.shape[0]} rows and its slot {ends[-1]}"
            num_rows = min(bottom - top, int(ends[piece]) - at_row)
            start = at_row - int(ends[piece] - slices[piece])
            part = _Part(name, slice(top, top + num_rows), slice(left, right), piece, start, at_column)
            self._parts.setdefault(layer, []).append(part)
            top, at_row = top + num_rows, at_row + num_rows
        return None

    # ---------------------------------------------------------------------------------------------------- handoff

    @property
    def num_bytes(self) -> int:
        """Bytes of the slot, padding included."""
        return sum(tensor.nbytes for layer in self._manager.modules.values() for tensor in _tensors(layer))

    @property
    def written_bytes(self) -> int:
        """Bytes of the adapter on this rank, without padding."""
        return sum(map(self._bytes_of, self._parts))

    def clear(self) -> None:
        """Have vLLM know the adapter, as one of zeros, whatever it held before."""
        of_no_layer = LoRALayerWeights("none", 1, 1, torch.zeros(1, 1), torch.zeros(1, 1), scaling=1.0)
        self._manager.remove_all_adapters()
        self._manager.add_adapter(LoRAModel(ADAPTER_ID, 1, {"none": of_no_layer}))  # vLLM fails on one without layers
        self._manager.activate_adapter(ADAPTER_ID)

    @torch.no_grad()
    def write(self, changes: Mapping[str, LowRank]) -> None:
        """Replace the adapter; vLLM cuts it for this rank.

        changes: of whole tensors. Raises HandoffError if they are not those that the slot was made for.
        """
        self._check_changes(changes)
        if self._manager.lora_index_to_id[SLOT] != ADAPTER_ID:
            self.clear()
        for layer, parts in self._parts.items():
            wrapper = self._manager.modules[layer]
            a: list[Tensor | None] = [None] * wrapper.n_slices
            b: list[Tensor | None] = [None] * wrapper.n_slices
            for piece, name in {part.piece: part.name for part in parts}.items():
                a[piece], b[piece] = _rounded(changes[name], wrapper.lora_a_stacked[piece])
            if wrapper.n_slices == 1:
                wrapper.set_lora(SLOT, a[0], b[0])
            else:
                wrapper.set_lora(SLOT, a, b)

    def _bytes_of(self, layer: str) -> int:
        """Count the bytes of the factors of a layer's pieces on this rank; a piece may have several rows of one A."""
        num = 0
        for piece, factor in enumerate(self._manager.modules[layer].lora_a_stacked):
            parts = [part for part in self._parts[layer] if part.piece == piece]
            columns = {(part.columns.start, part.columns.stop) for part in parts}
            extents = [part.rows.stop - part.rows.start for part in parts] + [stop - start for start, stop in columns]
            num += factor.itemsize * sum(extents) * (self._ranks[parts[0].name] if parts else 0)
        return num

    def _check_changes(self, changes: Mapping[str, LowRank]) -> None:
        ranks = {name: change.b.shape[-1] for name, change in changes.items()}
        if ranks != self._ranks:
            wrong = sorted(name for name in ranks.keys() | self._ranks if ranks.get(name) != self._ranks.get(name))
            raise HandoffError(
                f"vLLM was built for other adapters: {wrong[0]} has rank {ranks.get(wrong[0])} in the trainer and "
                f"{self._ranks.get(wrong[0])} in the engine; start the engine again"
            )
        if any(change.row_factor is not None or change.is_transposed for change in changes.values()):
            raise HandoffError(f"vLLM's slots take no magnitudes (DoRA) and no transposed weights; {MERGED}")

    # ------------------------------------------------------------------------------------------------------ proof

    @torch.no_grad()
    def check(self, changes: Mapping[str, LowRank]) -> None:
        """Read the slot back and compare every number of it, padding too, with the trainer's adapter, cut here by the
        trace. Raises HandoffError, naming the tensors, if it holds anything else, or if vLLM would not use it."""
        self._check_changes(changes)
        used = list(self._manager.lora_index_to_id)
        if used != [ADAPTER_ID]:
            raise HandoffError(f"vLLM has the adapters {used} in its slots, and not {[ADAPTER_ID]}; run again")
        wrong: dict[str, None] = {}
        for layer, wrapper in self._manager.modules.items():
            parts = self._parts.get(layer, [])
            expected = [torch.zeros_like(tensor[SLOT, 0]) for tensor in _tensors(wrapper)]
            for part in parts:
                a, b = _rounded(changes[part.name], expected[0])
                rank, num_rows = a.shape[0], part.rows.stop - part.rows.start
                columns = slice(part.at_column, part.at_column + part.columns.stop - part.columns.start)
                expected[part.piece][:rank, columns] = a[:, part.columns]
                at = slice(part.at_row, part.at_row + num_rows)
                expected[len(expected) // 2 + part.piece][at, :rank] = b[part.rows]
            for number, (tensor, value) in enumerate(zip(_tensors(wrapper), expected, strict=True)):
                if not torch.equal(tensor[SLOT, 0].view(torch.uint8), value.view(torch.uint8)):
                    piece = number % (len(expected) // 2)
                    names = [part.name for part in parts if part.piece == piece] or [f"{layer}, which has no adapter"]
                    wrong[names[0]] = None
        if wrong:
            more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
            raise HandoffError(
                f"vLLM's slot does not hold the trainer's adapter of {', '.join([*wrong][:_LISTED])}{more}: it is old "
                "or corrupted. Nothing may be generated with it; run again, and report it if it happens again"
            )


def _tensors(wrapper: Any) -> list[Tensor]:
    """Return the factors of a layer: A of each piece, then B of each piece; [slots, 1, rank, in], [slots, 1, out,
    rank]."""
    return [*wrapper.lora_a_stacked, *wrapper.lora_b_stacked]


def _rounded(change: LowRank, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and scale * B, each rounded once to the dtype of a slot, on its device."""
    return change.a.to(like.device, like.dtype), (change.b * change.scale).to(like.device, like.dtype)


class SlotWriter(WeightWriter):
    """Writes the base weights into a live vLLM model once, and the adapter into its slot at every handoff.

    ranks: of the adapter of each tensor, by its name. dtype: of the engine. The other arguments are those of
    WeightWriter. Raises ConfigError for adapters that vLLM does not compute.

    slot: of the model that vLLM has built, from `begin` to `close`.
    """

    slot: AdapterSlot
    writes_all = False
    lora_request = LoRARequest("policy", ADAPTER_ID, NO_FILE)

    def __init__(
        self,
        views: CheckpointViews,
        *,
        rank: int,
        quantization: str | None,
        ranks: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(views, rank=rank, quantization=quantization)
        self._ranks, self._arguments = ranks, slot_arguments(ranks, dtype, device)
        self._has_base = False

    def arguments(self) -> Mapping[str, Any]:
        """Return what vLLM has to be built with."""
        return {**super().arguments(), **self._arguments}

    def begin(self) -> None:
        """Find the places of the adapters in the model that vLLM has built. Raises ConfigError if one has none."""
        self.slot = AdapterSlot(self.weights.model, self.weights.whole_trace, self._ranks)

    @property
    def slot_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the slot."""
        return self.slot.num_bytes

    def forget(self) -> None:
        """Write the base weights again at the next handoff."""
        self._has_base = False

    def write(self, source: Source, version: int, model_config: Any) -> Delivered:
        """Write the adapters of a policy version, and before them the base weights if vLLM does not have them yet.
        Collective over the participants of the source.

        Raises HandoffError on all of them if one fails; what has been written by then is undefined.
        """
        delivered = Delivered(0)
        if self._adopted or not self._has_base:
            with bare(self.weights.model):
                delivered = super().write(source, version, model_config)
            self.slot.clear()  # what is in it is trusted as little as the base
            subject = f"the adapters of policy version {version}"
            agree(source.gather, subject, lambda: self.slot.write(source.adapters))
        else:
            with source.opened(version):
                self.slot.write(source.adapters)
        self._has_base = True
        num_bytes = self.slot.written_bytes
        return dataclasses.replace(
            delivered,
            num_bytes=delivered.num_bytes + num_bytes,
            minimum_bytes=delivered.minimum_bytes + num_bytes,
            link_bytes={**delivered.link_bytes, "adapter": num_bytes},
        )

    def check_adapters(self, source: Source) -> None:
        """Read the slot back, and compare it with the adapters of a source. Raises HandoffError if they differ."""
        self.slot.check(source.adapters)

    def close(self) -> None:
        """Let go of every tensor of vLLM's."""
        super().close()
        del self.slot


def make_writer(
    views: CheckpointViews,
    ranks: Mapping[str, int],
    *,
    rank: int,
    quantization: str | None,
    dtype: torch.dtype,
    device: torch.device,
) -> WeightWriter:
    """Return what writes the trainer's weights: all of them, or, if vLLM adds adapters of these ranks itself, the
    adapters alone."""
    if not ranks:
        return WeightWriter(views, rank=rank, quantization=quantization)
    return SlotWriter(views, rank=rank, quantization=quantization, ranks=ranks, dtype=dtype, device=device)
