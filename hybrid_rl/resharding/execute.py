"""Execution of a bucket of a plan: all of its pieces copied and cast in one call, and hashed on the way if asked.

The compiled operator `strided_copy` (csrc) does the work on CPUs and on CUDA; the PyTorch forms here are its oracle,
and replace it if it was not built. Everything is checked before anything is written.

The *content hash* of a tensor is a sum over its elements, modulo 2^64, so that each holder can add up its own part:

    H = sum of (bits XOR 0x9E3779B9) * (key(seed, number) + 1)

bits: the element's bits, as a number of at most 32 bits (an element of 8 bytes counts as two of 4, numbered 2n and
2n + 1). number: the index of the element in the global tensor. key: 32 pseudo-random bits. It is a universal hash
(Carter and Wegman 1979; "multilinear" in Lemire and Kaser, "Strongly universal string hashing is fast", 2014):
different contents agree with a probability of at most 2^-32, and never if one element differs or two within 2^32
neighbours were exchanged. -0.0 and the payload of a NaN count like any other bits. It does not protect against
someone who knows the seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.compat import native
from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import Column, Pieces, Table

_OPERATOR = "strided_copy"
CASTS = {torch.float32: 16, torch.bfloat16: 17, torch.float16: 18}  # csrc's numbers of dtypes that convert
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_WEYL, _MIX_1, _MIX_2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
_ORACLE_ELEMENTS = 1 << 22  # hashed at once by PyTorch, which takes about 50 bytes for each
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclass(frozen=True)
class HashedBoxes(Table):
    """Boxes of global tensors in memory, to be hashed.

    tensor [R]: index of the tensor that holds the box.
    offset [R], strides [R, MAX_DIMS]: of the box in that tensor, from its first element, in elements.
    shape [R, MAX_DIMS]: extents.
    dtype [R]: number of the dtype whose bits are hashed.
    parameter [R]: index of the global tensor.
    global_offset [R], global_strides [R, MAX_DIMS]: element number of the first element in the global tensor, and the
    step along each dim.
    """

    tensor: Column
    offset: Column
    strides: Column
    shape: Column
    dtype: Column
    parameter: Column
    global_offset: Column
    global_strides: Column


def name_seed(name: str) -> int:
    """Return the seed of a parameter's content hash, int64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def copy_pieces(
    pieces: Pieces,
    sources: Sequence[Tensor | None],
    destinations: Sequence[Tensor],
    *,
    hashes: Tensor | None = None,
    seeds: Tensor | None = None,
) -> None:
    """Write each piece to its destination, in the destination's dtype.

    float32, bfloat16 and float16 convert into each other as with Tensor.to, rounded to nearest even; a NaN becomes the
    canonical one. All other dtypes are copied as bytes, only between equal dtypes.

    Args:
        pieces: what to copy; `source_rank` is not read.
        sources: by `pieces.source`, the part that is read, contiguous; None if there is none.
        destinations: by `pieces.destination`, the tensor that is written, of any strides.
        hashes: int64 [tensors]; the content hash of what is written, in its new dtype, is added by `pieces.source`.
        seeds: int64 [tensors]; needed with `hashes`, made by name_seed.

    Raises:
        HandoffError: a piece exceeds its tensors, dtypes do not convert, or tensors are on several devices;
            nothing has been written.
    """
    read = _Tensors.of(sources, pieces.source, "source")
    written = _Tensors.of(destinations, pieces.destination, "destination")
    device = _one_device([*read.used, *written.used])
    read.check_reach(pieces.source, pieces.source_offset, pieces.source_strides, pieces.shape)
    written.check_reach(pieces.destination, pieces.destination_offset, pieces.destination_strides, pieces.shape)
    _check_dtypes(read, pieces.source, [t.dtype for t in destinations], pieces.destination)
    _check_hashes(hashes, seeds, pieces.source, device)
    operator = native.operator(_OPERATOR, device.type)
    if operator is None:
        _copy_torch(pieces, sources, destinations, hashes, seeds)
        return
    source, target = pieces.source, pieces.destination
    columns = (
        read.addresses[source] + pieces.source_offset * read.sizes[source],
        written.addresses[target] + pieces.destination_offset * written.sizes[target],
        read.types[source],
        written.types[target],
    )
    dims = pieces.shape, pieces.source_strides, pieces.destination_strides, pieces.global_strides
    _launch(operator, columns, dims, pieces.global_offset, source, hashes, seeds, device)


def hash_pieces(
    boxes: HashedBoxes,
    tensors: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
    *,
    hashes: Tensor,
    seeds: Tensor,
) -> None:
    """Add the content hash of every box to that of its parameter. Only `hashes` is written.

    Args:
        boxes: the boxes; `boxes.dtype` numbers `dtypes`, into which elements are converted before they are hashed.
        tensors: by `boxes.tensor`.
        hashes, seeds: int64 [parameters], by `boxes.parameter`.

    Raises:
        HandoffError: as in copy_pieces.
    """
    read = _Tensors.of(tensors, boxes.tensor, "tensor")
    device = _one_device(read.used)
    read.check_reach(boxes.tensor, boxes.offset, boxes.strides, boxes.shape)
    _check_dtypes(read, boxes.tensor, dtypes, boxes.dtype)
    _check_hashes(hashes, seeds, boxes.parameter, device)
    operator = native.operator(_OPERATOR, device.type)
    if operator is None:
        _hash_torch(boxes, tensors, dtypes, hashes, seeds)
        return
    address = read.addresses[boxes.tensor] + boxes.offset * read.sizes[boxes.tensor]
    types = np.array([_type_of(dtype) for dtype in dtypes], dtype=np.int64)
    columns = address, np.zeros_like(address), read.types[boxes.tensor], types[boxes.dtype]
    dims = boxes.shape, boxes.strides, np.zeros_like(boxes.strides), boxes.global_strides
    _launch(operator, columns, dims, boxes.global_offset, boxes.parameter, hashes, seeds, device)


# ---------------------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True)
class _Tensors:
    """Tensors as columns. addresses: of the first element; sizes: bytes of an element; reach: elements from the first
    to the last one in memory; types: csrc's numbers of their dtypes; used: whether any piece uses the tensor."""

    what: str
    addresses: Column
    sizes: Column
    reach: Column
    types: Column
    used: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], index: Column, what: str) -> _Tensors:
        """Make the columns, zero for tensors not in `index`. Raises HandoffError if a used one is None."""
        unknown = index[(index < 0) | (index >= len(tensors))]
        if len(unknown):
            raise HandoffError(f"a piece names {what} {unknown[0]} of {len(tensors)}; plan for these tensors")
        columns = np.zeros((4, len(tensors)), dtype=np.int64)
        used = []
        for i in np.unique(index).tolist():
            tensor = tensors[i]
            if tensor is None:
                raise HandoffError(f"{what} {i}, from which a piece is read, is not held here; plan for these tensors")
            span = 0
            if tensor.numel():
                span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            columns[:, i] = tensor.data_ptr(), tensor.element_size(), span, _type_of(tensor.dtype)
            used.append(tensor)
        addresses, sizes, reach, types = columns
        return cls(what, addresses, sizes, reach, types, used)

    def check_reach(self, index: Column, offset: Column, strides: Column, shape: Column) -> None:
        """Raise HandoffError if a piece exceeds its tensor's memory."""
        span = (shape - 1) * strides
        low = offset + np.minimum(span, 0).sum(axis=1)
        high = offset + np.maximum(span, 0).sum(axis=1)
        wrong = ((low < 0) | (high >= self.reach[index])) & (shape.min(axis=1, initial=1) > 0)
        wrong |= shape.min(axis=1, initial=0) < 0
        if wrong.any():
            i = int(wrong.argmax())
            raise HandoffError(
                f"piece {i} of shape {shape[i].tolist()} takes the elements {low[i]} to {high[i]} of {self.what} "
                f"{index[i]}, which has {self.reach[index[i]]}; plan for these tensors"
            )


def _type_of(dtype: torch.dtype) -> int:
    if dtype in CASTS:
        return CASTS[dtype]
    if dtype.itemsize > 8:
        raise HandoffError(f"elements of {dtype} have {dtype.itemsize} bytes; the largest supported size is 8")
    return dtype.itemsize


def _check_dtypes(read: _Tensors, index: Column, dtypes: Sequence[torch.dtype], other: Column) -> None:
    tensors = dict(zip(np.unique(index).tolist(), read.used, strict=True))
    for i, j in np.unique(np.stack([index, other], axis=1), axis=0).tolist():
        mine, theirs = tensors[i].dtype, dtypes[j]
        if mine != theirs and not (mine in CASTS and theirs in CASTS):
            raise HandoffError(
                f"{read.what} {i} is {mine} and cannot be cast to {theirs}; only {', '.join(map(str, CASTS))} convert "
                f"into each other"
            )


def _check_hashes(hashes: Tensor | None, seeds: Tensor | None, index: Column, device: torch.device) -> None:
    if hashes is None:
        return
    if seeds is None:
        raise HandoffError("hashes were requested without seeds; give int64 seeds, one for each tensor (name_seed)")
    for name, tensor in (("hashes", hashes), ("seeds", seeds)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise HandoffError(f"{name} is {tensor.dtype} {list(tensor.shape)}; give contiguous int64 [tensors]")
        if len(index) and len(tensor) <= int(index.max()):
            raise HandoffError(f"{name} has {len(tensor)} elements, but a piece is of tensor {int(index.max())}")
    if len(index) and hashes.device != device:
        raise HandoffError(f"hashes is on {hashes.device} and the tensors on {device}; use one device")


def _one_device(tensors: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise HandoffError(f"pieces are on several devices ({', '.join(sorted(map(str, devices)))}); use one device")
    return devices.pop() if devices else torch.device("cpu")


# ----------------------------------------------------------------------------------------------------------- compiled


def _launch(
    operator: Any,
    columns: Sequence[Column],
    dims: Sequence[Column],
    number: Column,
    slot: Column,
    hashes: Tensor | None,
    seeds: Tensor | None,
    device: torch.device,
) -> None:
    """Call the operator with its table, int64 [P, columns], whose columns csrc/strided_copy.h names.

    columns: address of source and destination, type of source and destination.
    dims: shape, and strides in source, destination and global tensor.
    number, slot: of the first element in the global tensor, and of the tensor in `hashes` and `seeds`.
    """
    hashed = [np.zeros_like(slot)] * 3
    if hashes is None or seeds is None:
        hashes = torch.empty(0, dtype=torch.int64, device=device)
    else:
        hashed = [number, seeds.cpu().numpy()[slot], slot]
    table = np.concatenate([np.stack(columns, axis=1), *dims, np.stack(hashed, axis=1)], axis=1)
    operator(torch.from_numpy(table), hashes)


# ------------------------------------------------------------------------------------------------------------ PyTorch


@torch.no_grad()
def _copy_torch(
    pieces: Pieces,
    sources: Sequence[Tensor | None],
    destinations: Sequence[Tensor],
    hashes: Tensor | None,
    seeds: Tensor | None,
) -> None:
    for i in range(len(pieces)):
        number = int(pieces.source[i])
        source, target = sources[number], destinations[int(pieces.destination[i])]
        assert source is not None
        shape = pieces.shape[i].tolist()
        values = cast(view_of(source, shape, pieces.source_strides[i], pieces.source_offset[i]), target.dtype)
        view_of(target, shape, pieces.destination_strides[i], pieces.destination_offset[i]).copy_(values)
        if hashes is not None and seeds is not None:
            offset, strides = int(pieces.global_offset[i]), pieces.global_strides[i].tolist()
            hashes[number] += _sum_of_terms(values, int(seeds[number]), offset, strides)


@torch.no_grad()
def _hash_torch(
    boxes: HashedBoxes, tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype], hashes: Tensor, seeds: Tensor
) -> None:
    for i in range(len(boxes)):
        tensor, number = tensors[int(boxes.tensor[i])], int(boxes.parameter[i])
        assert tensor is not None
        view = view_of(tensor, boxes.shape[i].tolist(), boxes.strides[i], boxes.offset[i])
        values = cast(view, dtypes[int(boxes.dtype[i])])
        offset, strides = int(boxes.global_offset[i]), boxes.global_strides[i].tolist()
        hashes[number] += _sum_of_terms(values, int(seeds[number]), offset, strides)


def view_of(tensor: Tensor, shape: list[int], strides: Column, offset: Any) -> Tensor:
    """Return a view by strides and an offset from a tensor's first element."""
    return tensor.as_strided(shape, strides.tolist(), tensor.storage_offset() + int(offset))


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert elements as the compiled operators do; the tensor itself if it has the dtype."""
    if values.dtype == dtype:
        return values
    # Sign and payload of a converted NaN depend on the machine; those of a constant do not.
    return values.to(dtype).masked_fill(values.isnan(), math.nan)


def _sum_of_terms(values: Tensor, seed: int, offset: int, strides: list[int]) -> Tensor:
    """Return the content hash of elements, int64 []; arithmetic modulo 2^64 in int64."""
    if values.numel() > _ORACLE_ELEMENTS:
        dim = max(range(values.dim()), key=lambda d: values.shape[d])
        half = values.shape[dim] // 2
        first, second = values.narrow(dim, 0, half), values.narrow(dim, half, values.shape[dim] - half)
        return _sum_of_terms(first, seed, offset, strides) + _sum_of_terms(
            second, seed, offset + half * strides[dim], strides
        )
    number = torch.full((), offset, dtype=torch.int64, device=values.device)
    for extent, stride in zip(values.shape, strides, strict=True):
        number = number[..., None] + stride * torch.arange(extent, device=values.device)
    words = values.clone(memory_format=torch.contiguous_format).view(_BITS[values.itemsize])
    bits = words.to(torch.int64) & ((1 << min(8 * values.itemsize, 32)) - 1)
    if values.itemsize == 8:
        number = (2 * number[..., None] + torch.arange(2, device=values.device)).flatten(-2)
    flipped = bits ^ _WEYL
    return (flipped * _keys(seed, number) + flipped).sum()


def _keys(seed: int, number: Tensor) -> Tensor:
    """Return the keys of elements from their numbers: 32 bits each, in int64."""
    upper = number >> 32
    first, second = torch.zeros_like(number), torch.zeros_like(number)
    for value in upper.unique().tolist():
        mixed = _splitmix(seed + (value + 1) * 0x9E3779B97F4A7C15)
        first[upper == value], second[upper == value] = mixed & _MASK_32, mixed >> 32
    key = ((number & _MASK_32) * _WEYL + first) & _MASK_32
    key ^= key >> 16
    key = (key * _MIX_1 + second) & _MASK_32
    key ^= key >> 15
    key = key * _MIX_2 & _MASK_32
    return key ^ key >> 16


def _splitmix(z: int) -> int:
    """Apply the finalizer of splitmix64 (Steele et al. 2014)."""
    z &= _MASK_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK_64
    return z ^ z >> 31
