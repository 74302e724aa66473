"""Tracing of an engine's loader: it runs without executing, and its writes to the engine's tensors are recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.compat.torch import TorchDispatchMode, schema_of, storage_id, tree_leaves
from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Copies
from hybrid_rl.resharding.layout import TensorSpec
from hybrid_rl.resharding.strided import Axis, boxes, without_overlaps
from hybrid_rl.resharding.trace import DestinationSpec, Fills, Trace

aten = torch.ops.aten
UNWRITTEN = "the loader writes nothing into it"


def trace_loader(
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    offered: Iterable[tuple[str, Tensor]],
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
    optional: Collection[str] = (),
) -> Trace:
    """Run a loader on views of the sources without executing it, and return its copies.

    load: takes (name, tensor) pairs, such as a model's `load_weights`.
    offered: views of `sources` under checkpoint names.
    sources: contiguous meta tensors, each with a storage of its own.
    destinations: the engine's tensors, live or meta, under unique names.
    optional: names of destinations left out of the trace if the loader does not touch them, such as buffers that the
    engine computes itself.

    Raises HandoffError if the loader reads values.
    """
    recorder = _Recorder(sources, destinations)
    with torch.no_grad(), recorder:
        load(iter(offered))
    return recorder.trace(optional)


@dataclass
class _Write:
    """One write of the loader: the origin of a destination's elements. source: None for a constant."""

    offset: int
    axes: list[Axis]  # (extent, stride in the source, stride in the destination)
    source: int | None = None
    source_offset: int = 0
    value: float = 0.0

    @property
    def num_elements(self) -> int:
        return int(np.prod([axis[0] for axis in self.axes], dtype=np.int64))


class _Recorder(TorchDispatchMode):
    """Recorder of writes from sources to destinations. All tensors are identified by their storage."""

    def __init__(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._sources = tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in sources.items())
        self._names = tuple(destinations)
        self._tensors = list(destinations.values())
        # A storage of a source holds its elements at their global numbers; so does the storage of a cast of it.
        self._source_of: dict[int, tuple[int, torch.dtype]] = {}
        self._casts: dict[tuple[int, torch.dtype], Tensor] = {}
        self._destinations_of: dict[int, list[int]] = {}
        self._lost: dict[int, str] = {}
        self._alive: list[Tensor] = list(sources.values())  # or a new tensor could reuse the identity of a storage
        self._writes: list[list[_Write]] = [[] for _ in self._tensors]
        self._untraced: dict[str, str] = {}
        self._kinds: dict[Any, tuple[list[tuple[int, str]], bool]] = {}
        for index, (name, tensor) in enumerate(sources.items()):
            if not tensor.is_meta or not tensor.is_contiguous() or tensor.storage_offset() != 0:
                raise HandoffError(f"source {name} must be a contiguous meta tensor with a storage of its own")
            self._source_of[storage_id(tensor)] = (index, tensor.dtype)
        if len(self._source_of) < len(sources):
            raise HandoffError("two sources share one storage; offer a tied tensor once, with a view for each name")
        for index, tensor in enumerate(self._tensors):
            self._destinations_of.setdefault(storage_id(tensor), []).append(index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracked = [tensor for tensor in _tensors(args, kwargs) if self._is_tracked(tensor)]
        if not tracked:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func in _FILLS:
            self._fill(args[0], _FILLS[func](args), func)
            return args[0]
        if func not in self._kinds:
            is_view = any(result.alias_info is not None for result in schema_of(func).returns)
            self._kinds[func] = _written_arguments(func), is_view
        written, is_view = self._kinds[func]
        if written:
            for tensor in tree_leaves([args[at] if at < len(args) else kwargs[name] for at, name in written]):
                if isinstance(tensor, Tensor):
                    self._spoil(tensor, f"the loader changes it in place ({func})")
            return args[0]
        if func in (aten.clone.default, aten._to_copy.default) and self._is_source(args[0]):
            return self._cast(args[0], kwargs.get("dtype") or args[0].dtype)
        if func is aten._unsafe_view.default and self._is_source(args[0]):
            return self._reshaped(*args)
        if is_view:
            return func(*args, **kwargs)
        return self._computed(func, args, kwargs, tracked)

    def trace(self, optional: Collection[str]) -> Trace:
        """Return the recorded writes as a trace."""
        numbers = [i for i, name in enumerate(self._names) if self._touched(i) or name not in optional]
        tensors = [(self._names[i], self._tensors[i]) for i in numbers]
        specs = tuple(DestinationSpec(name, tuple(t.shape), tuple(t.stride()), t.dtype) for name, t in tensors)
        copies: list[list[int]] = []
        fills: list[tuple[list[int], float]] = []
        for index, (number, spec) in enumerate(zip(numbers, specs, strict=True)):
            if spec.name not in self._untraced:
                # Kept only if all writes of the destination are made of boxes.
                rows: tuple[list[Any], list[Any]] = [], []
                reason = self._rows(index, self._writes[number], spec, *rows)
                if reason:
                    self._untraced[spec.name] = reason
                else:
                    copies += rows[0]
                    fills += rows[1]
        d = MAX_DIMS
        columns = np.array(copies, dtype=np.int64).reshape(-1, 3 + 3 * d)
        lows, highs, strides = (columns[:, 3 + i * d : 3 + (i + 1) * d] for i in range(3))
        filled = np.array([row for row, _ in fills], dtype=np.int64).reshape(-1, 2 + 2 * d)
        values = np.array([value for _, value in fills], dtype=np.float64)
        used = set(columns[:, 0].tolist())
        return Trace(
            self._sources,
            specs,
            Copies(columns[:, 0], lows, highs, columns[:, 1], columns[:, 2], strides),
            Fills(filled[:, 0], filled[:, 1], filled[:, 2 : 2 + d], filled[:, 2 + d :], values),
            dict(self._untraced),
            tuple(spec.name for index, spec in enumerate(self._sources) if index not in used),
        )

    def _touched(self, index: int) -> bool:
        return bool(self._writes[index]) or self._names[index] in self._untraced

    def _rows(
        self, index: int, writes: list[_Write], spec: DestinationSpec, copies: list[list[int]], fills: list[Any]
    ) -> str | None:
        """Append a destination's writes as boxes; return the reason if it cannot be traced."""
        if not writes:
            return UNWRITTEN
        num_elements = sum(write.num_elements for write in writes)
        if num_elements > spec.num_elements:
            kept = without_overlaps([(write.offset, write.axes) for write in writes], spec.shape, spec.strides)
            if kept is None:
                return "the loader overwrites parts of it in a way that cannot be described by boxes"
            writes = [
                replace(writes[i], offset=at, axes=axes, source_offset=writes[i].source_offset + moved)
                for i, at, moved, axes in kept
            ]
            num_elements = sum(write.num_elements for write in writes)
        if num_elements != spec.num_elements:
            return f"the loader writes {num_elements} of its {spec.num_elements} elements"
        for write in writes:
            if write.source is None:
                axes = [axis for axis in write.axes if axis[0] != 1]
                if len(axes) > MAX_DIMS:
                    return f"it has more than {MAX_DIMS} dims"
                filler = MAX_DIMS - len(axes)
                shape, strides = [a[0] for a in axes] + [1] * filler, [a[2] for a in axes] + [0] * filler
                fills.append(([index, write.offset, *shape, *strides], write.value))
                continue
            extents = self._sources[write.source].shape
            if len(extents) > MAX_DIMS:
                return f"its source {self._sources[write.source].name} has more than {MAX_DIMS} dims"
            source_boxes = boxes(write.source_offset, write.offset, write.axes, extents)
            if source_boxes is None:
                return f"it takes {self._sources[write.source].name} in a way that needs too many boxes"
            filled = [0] * (MAX_DIMS - len(extents))
            ones = [1] * len(filled)
            for low, high, at, strides in source_boxes:
                copies.append([write.source, index, at, *low, *filled, *high, *ones, *strides, *filled])
        return None

    def _is_tracked(self, tensor: Tensor) -> bool:
        storage = storage_id(tensor)
        return storage in self._source_of or storage in self._destinations_of or storage in self._lost

    def _is_source(self, tensor: Any) -> bool:
        entry = self._source_of.get(storage_id(tensor))
        return entry is not None and entry[1] == tensor.dtype and storage_id(tensor) not in self._lost

    def _destination(self, view: Tensor) -> int | None:
        """Return the destination that a view belongs to."""
        for index in self._destinations_of.get(storage_id(view), ()):
            tensor = self._tensors[index]
            begin, end = _span(tensor)
            low, high = _span(view)
            if begin <= low and high <= end and view.dtype == tensor.dtype:
                return index
        return None

    def _copy(self, target: Tensor, value: Tensor) -> None:
        if target.numel() == 0:
            return
        index = self._destination(target)
        if index is None:
            self._spoil(target, "its source passes through a temporary tensor")
            return
        name = self._names[index]
        offset = int(target.storage_offset() - self._tensors[index].storage_offset())
        if self._is_source(value):
            source, dtype = self._source_of[storage_id(value)]
            wanted, source_dtype = target.dtype, self._sources[source].dtype
            if dtype != wanted and torch.promote_types(dtype, source_dtype) != dtype:
                self._untraced[name] = f"its source is rounded to {dtype} on the way to {wanted}"
                return
            value = value.expand(target.shape)
            axes = list(zip(target.shape, value.stride(), target.stride(), strict=True))
            self._writes[index].append(_Write(offset, axes, source, int(value.storage_offset())))
        elif self._is_tracked(value):
            self._untraced[name] = self._lost.get(storage_id(value), "it is copied from another tensor of the engine")
        elif value.numel() == 1 and not value.is_meta:
            self._fill(target, float(value), aten.copy_.default)
        else:
            self._untraced[name] = "the loader copies a tensor into it that is not part of the checkpoint"

    def _fill(self, target: Tensor, value: float | None, func: Any) -> None:
        if target.numel() == 0:
            return
        index = self._destination(target)
        if index is None or value is None:
            self._spoil(target, f"it is filled with a computed value ({func})")
            return
        offset = int(target.storage_offset() - self._tensors[index].storage_offset())
        axes = [(extent, 0, stride) for extent, stride in zip(target.shape, target.stride(), strict=True)]
        self._writes[index].append(_Write(offset, axes, value=value))

    def _spoil(self, tensor: Tensor, reason: str) -> None:
        """Mark the content of a tensor's storage as unknown."""
        destinations = self._destinations_of.get(storage_id(tensor), ())
        for index in destinations:
            self._untraced[self._names[index]] = reason
        if not destinations:
            self._lost[storage_id(tensor)] = reason
            self._alive.append(tensor)

    def _cast(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        """Trace a copy of a source's view: the same view, of the source in another dtype; it need not be contiguous."""
        index, _ = self._source_of[storage_id(view)]
        if dtype != view.dtype:
            key = (index, dtype)
            if key not in self._casts:
                self._casts[key] = torch.empty(self._sources[index].shape, dtype=dtype, device="meta")
                self._source_of[storage_id(self._casts[key])] = key
            return self._casts[key].as_strided(view.shape, view.stride(), view.storage_offset())
        return view.detach()

    def _reshaped(self, view: Tensor, shape: Sequence[int]) -> Tensor:
        """Trace the second half of `reshape` on a tensor without such a view: PyTorch has copied, the trace has not."""
        try:
            return aten.view.default(view, shape)  # type: ignore[no-any-return]
        except (RuntimeError, ValueError):
            lost = torch.empty(shape, dtype=view.dtype, device="meta")
            self._spoil(lost, "its source is reshaped across its dims")
            return lost

    def _computed(self, func: Any, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        if not any(isinstance(result.type, torch.TensorType | torch.ListType) for result in schema_of(func).returns):
            raise HandoffError(
                f"the engine's loader reads the values of weights ({func} on {self._name(tracked[0])}), so it cannot "
                f"be traced; load this model through the engine's reload"
            )
        results = func(*args, **kwargs)
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._spoil(result, self._lost.get(storage_id(tracked[0]), f"it is computed, not copied ({func})"))
        return results

    def _name(self, tensor: Tensor) -> str:
        storage = storage_id(tensor)
        if storage in self._source_of:
            return self._sources[self._source_of[storage][0]].name
        destinations = self._destinations_of.get(storage)
        return self._names[destinations[0]] if destinations else "a computed tensor"


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the range of elements in the storage: first, and last + 1."""
    first = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return first, first
    return first, first + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments, alone or in lists; faster than a general tree traversal."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors.extend(item for item in value if isinstance(item, Tensor))
    return tensors


def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return position and name of the arguments that an operation writes."""
    arguments = enumerate(schema_of(func).arguments)
    return [(at, item.name) for at, item in arguments if item.alias_info is not None and item.alias_info.is_write]


_FILLS: dict[Any, Callable[[Any], float | None]] = {
    aten.fill_.Scalar: lambda args: float(args[1]),
    aten.fill_.Tensor: lambda args: None if args[1].is_meta else float(args[1]),
    aten.zero_.default: lambda args: 0.0,
}
