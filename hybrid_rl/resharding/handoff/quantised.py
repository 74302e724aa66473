"""The trainer's linear weights on the grid of an engine, made at every handoff from what each rank holds.

To plans, transports and proofs these are weights like others: a layout has the parts of a grid in place of a weight, so
codes and scales are copied, sent and hashed by the same code, and an engine that still has old scales is found as one
that has old weights. A rank quantises its own rows. Only the largest values of blocks that several ranks hold, or of
weights that share a scale, are exchanged before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.compat.torch import storage_id
from hybrid_rl.errors import ConfigError, HandoffError
from hybrid_rl.resharding.handoff.base import Gather, Source, agree, local_parts
from hybrid_rl.resharding.handoff.distributed import DistributedSource
from hybrid_rl.resharding.handoff.merged import check_changes, merged_part
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.resharding.layout import PLAIN, ShardedTensor, SourceLayout, TensorSpec
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.weights.grids import GRIDS, Grid, Part, grid_weights, joined_names
from hybrid_rl.weights.low_rank import LowRank
from hybrid_rl.weights.views import CheckpointViews

_WEIGHT = "weight"  # what the name of a linear weight ends with


@dataclass(frozen=True)
class Quantisation:
    """The weights of a model that an engine holds on a grid.

    names: of the weights [out, in]. dtype: that the engine computes in. trained_in: the dtype that weights are rounded
    to before they are quantised, because a trainer on the same grid computes with them so; None: the trainer's own.
    joined: names of weights that the engine has as one, which share the scale if there is only one.
    """

    grid: Grid
    names: frozenset[str]
    dtype: torch.dtype
    trained_in: torch.dtype | None = None
    joined: Sequence[frozenset[str]] = field(default=())

    @classmethod
    def of(
        cls, module: PreTrainedModel, name: str, dtype: torch.dtype, trained_in: torch.dtype | None = None
    ) -> Quantisation:
        """Choose the weights of a model, see `grid_weights`, with its errors. name: of the grid, in GRIDS."""
        names = grid_weights(module, name)
        return cls(GRIDS[name], frozenset(names), dtype, trained_in)

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, Part]:
        """Describe what replaces a weight of the trainer, by name: of several dims, but for what `names` has not."""
        stem = name.removesuffix(_WEIGHT)
        return {stem + suffix: part for suffix, part in self.grid.parts(shape, self.dtype).items()}

    def views(self, views: CheckpointViews) -> CheckpointViews:
        """Return the checkpoint of the quantised model. Raises ConfigError if a checkpoint has a weight in pieces."""
        owners = {storage_id(tensor): name for name, tensor in views.tensors.items()}
        tensors: dict[str, Tensor] = {}
        for name, tensor in views.tensors.items():
            if name in self.names:
                parts = self.parts(name, tuple(tensor.shape))
                tensors |= {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in parts.items()}
            else:
                tensors[name] = tensor
        quantised: list[tuple[str, Tensor]] = []
        for name, view in views.views:
            owner = owners[storage_id(view)]
            if owner not in self.names:
                quantised.append((name, view))
                continue
            if view.shape != views.tensors[owner].shape or not name.endswith(_WEIGHT):
                raise ConfigError(
                    f"rollout.quantization: a checkpoint of this model has {owner} in pieces, e.g. {name} "
                    f"{list(view.shape)}, and a scale is of a whole weight; leave it out"
                )
            stem, own = name.removesuffix(_WEIGHT), owner.removesuffix(_WEIGHT)
            parts = self.parts(owner, tuple(view.shape))
            quantised += [(stem + part.removeprefix(own), tensors[part]) for part in parts]
        return CheckpointViews(tensors, quantised, views.tied, views.without_view)

    def shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the quantised weights and of all others, by name. shapes: of the trainer's weights."""
        result: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            if name in self.names:
                result |= {part_name: part.shape for part_name, part in self.parts(name, shape).items()}
            else:
                result[name] = shape
        return result

    def joined_as(self, trace: Trace) -> Quantisation:
        """Return the same with the weights that an engine has as one, by its trace of the quantised weights.

        Raises ConfigError if a trainer on this grid joins others: its scales would not be the engine's.
        """
        joined = self._joined(trace)
        usual = joined_names(self.names)
        if self.grid.whole_scale and self.trained_in is not None and {*joined} != {*usual}:
            odd = sorted(min({*joined} ^ {*usual}, key=sorted))
            raise ConfigError(
                "rollout.quantization_aware: the engine and the trainer do not give one scale to the same weights, "
                f"e.g. {', '.join(odd)}; use int4 or fp8_block, whose scales are not of whole weights"
            )
        return replace(self, joined=joined)

    def _joined(self, trace: Trace) -> list[frozenset[str]]:
        owners = {stem + suffix: stem + _WEIGHT for stem in self._stems() for suffix in self._suffixes()}
        groups: dict[int, set[str]] = {}
        for source, destination in {*zip(trace.copies.source.tolist(), trace.copies.destination.tolist(), strict=True)}:
            name = trace.sources[source].name
            if name in owners:
                groups.setdefault(destination, set()).add(owners[name])
        return sorted({frozenset(names) for names in groups.values() if len(names) > 1}, key=sorted)

    def _stems(self) -> Iterator[str]:
        return (name.removesuffix(_WEIGHT) for name in self.names)

    def _suffixes(self) -> Iterator[str]:
        return iter(self.grid.parts((self.grid.multiple, self.grid.multiple), self.dtype))

    # ---------------------------------------------------------------------------------------------------- values

    @torch.no_grad()
    def source(
        self,
        layout: SourceLayout,
        tensors: Mapping[str, Tensor],
        changes: Mapping[str, LowRank],
        *,
        rank: int,
        gather: Gather,
    ) -> Source:
        """Quantise the present weights, and return the source of them. Collective.

        layout: of the weights. tensors: this rank's, plain or DTensor, by name. changes: what adapters add to them,
        which is added in float32 before the one rounding; the source has the others. gather: over the layout's ranks.

        Raises HandoffError, on all ranks, for a weight that is not finite, or whose rows are cut.
        """
        check_changes(changes, layout)
        shards = _Shards(layout, local_parts(layout, rank, tensors), rank, changes, self.trained_in)
        maxima = self._maxima(shards, gather)
        specs: list[ShardedTensor] = []
        values: dict[str, Tensor] = {}
        for number, sharded in enumerate(layout.tensors):
            name, shape = sharded.spec.name, sharded.spec.shape
            if name not in self.names:
                specs.append(sharded)
                values[name] = tensors[name]
                continue
            rows = shards.rows(number)
            made = self.grid.quantise(rows, maxima[number].to(rows.device), self.dtype, shards.first_row(number))
            made.setdefault("weight_shape", torch.tensor(shape, device=rows.device))
            for part_name, part in self.parts(name, shape).items():
                specs.append(_placed(part_name, part, sharded, len(layout.hosts)))
                values[part_name] = made[part_name.removeprefix(name.removesuffix(_WEIGHT))]
        source: Source
        if len(layout.hosts) == 1:
            source = TensorSource(values)
        else:
            source = DistributedSource(SourceLayout(tuple(specs), layout.hosts), rank, values, gather=gather)
        source.changes = {name: change for name, change in changes.items() if name not in self.names}
        return source

    def _maxima(self, shards: _Shards, gather: Gather) -> dict[int, Tensor]:
        """Return the largest values of the blocks of every weight, by its number in the layout. Collective."""
        numbers = {each.spec.name: n for n, each in enumerate(shards.layout.tensors) if each.spec.name in self.names}

        def own() -> dict[int, tuple[int, Tensor]]:
            device = next((part.device for part in shards.held if part is not None), torch.device("cpu"))
            height = self.grid.block[0] if self.grid.block else 0
            is_finite: list[Tensor] = []
            largest: dict[int, Tensor] = {}
            for number in numbers.values():
                rows = shards.rows(number)
                is_finite.append(rows.isfinite().all().to(device))
                largest[number] = self.grid.maxima(rows, shards.first_row(number)).to(device)
            # The host waits for the device here, and not for every weight.
            odd = [name for name, is_so in zip(numbers, torch.stack(is_finite).tolist(), strict=True) if not is_so]
            if odd:
                raise HandoffError(f"{odd[0]} has values that are not finite, so it cannot be quantised")
            flat = torch.cat([each.flatten() for each in largest.values()]).cpu()
            parts = flat.split([each.numel() for each in largest.values()])
            return {
                number: (shards.first_row(number) // height if height else 0, part.view_as(largest[number]))
                for number, part in zip(largest, parts, strict=True)
            }

        maxima: dict[int, Tensor] = {}
        for answer in agree(gather, "the largest values of the trainer's weights", own):
            for number, (first, theirs) in answer.items():
                if number not in maxima:
                    maxima[number] = torch.zeros(self.grid.num_blocks(shards.layout.tensors[number].spec.shape))
                part = maxima[number][first : first + len(theirs)]
                torch.maximum(part, theirs, out=part)
        for names in self.joined if self.grid.whole_scale else ():
            largest = torch.stack([maxima[numbers[name]] for name in names]).amax(0)
            maxima |= {numbers[name]: largest for name in names}
        return maxima


@dataclass(frozen=True)
class _Shards:
    """The rows of the trainer's weights that a rank holds, with what adapters add."""

    layout: SourceLayout
    held: Sequence[Tensor | None]
    rank: int
    changes: Mapping[str, LowRank]
    trained_in: torch.dtype | None

    @cached_property
    def _boxes(self) -> list[list[list[int]]]:
        low, high = self.layout.parts(self.rank)
        return np.stack([low, high], axis=1).tolist()  # type: ignore[no-any-return]

    def first_row(self, number: int) -> int:
        """Return the number of the first row of a weight that is held."""
        return self._boxes[number][0][0]

    def rows(self, number: int) -> Tensor:
        """Return the rows of a weight that are held, as they are to be quantised; computed at every call."""
        spec, part = self.layout.tensors[number].spec, self.held[number]
        if part is None:
            return torch.empty((0, spec.shape[1]), dtype=spec.dtype)
        change = self.changes.get(spec.name)
        if change is not None:
            low, high = self._boxes[number]
            part = merged_part(change, part, tuple(map(slice, low[:2], high[:2])), torch.float32)
        return part if self.trained_in is None else part.to(self.trained_in)


def _placed(name: str, part: Part, weight: ShardedTensor, num_ranks: int) -> ShardedTensor:
    """Place a part of a weight: with its rows, or whole on every rank. Raises HandoffError if rows are cut."""
    spec = TensorSpec(name, part.shape, part.dtype)
    if part.per_element is None:
        return ShardedTensor.of(spec, np.arange(num_ranks, dtype=np.int32), PLAIN)
    if len(weight.cuts[1]) > 2:
        raise HandoffError(
            f"the rows of {weight.spec.name} are cut over ranks, and scales are of whole rows or blocks of them; shard "
            "it by its first dim"
        )
    return ShardedTensor(spec, (weight.cuts[0], (0, part.shape[1])), weight.owners)
