"""Tensors that are read box by box when they are needed.

transformers converts checkpoints with ordinary PyTorch operations (stack the experts, concatenate gate and up ...). Run
on lazy tensors they give a lazy tensor, of which a rank then reads its own box, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.errors import ModelError
from hybrid_rl.weights.boxes import Box
from hybrid_rl.weights.sources import WeightSource


class NotLazyError(TypeError):
    """An operation that has no lazy form."""


class LazyTensor:
    """A tensor given by how a box of it is read. Follows torch.stack, cat, chunk and transpose."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[Box], Tensor]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.read = read

    @classmethod
    def of(cls, source: WeightSource, name: str) -> LazyTensor:
        """Make the lazy tensor of a name in a source."""
        shape, dtype = source.spec(name)
        return cls(shape, dtype, lambda box: source.read(name, box))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _OPERATIONS:
            raise NotLazyError(f"{getattr(func, '__name__', func)} has no lazy form")
        return _OPERATIONS[func](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise NotLazyError(f"Tensor.{name} has no lazy form")

    def contiguous(self) -> LazyTensor:
        """Return itself: boxes are laid out when they are written."""
        return self

    def size(self, dim: int) -> int:
        """Return the extent of a dim."""
        return self.shape[dim]


def _put(box: Box, dim: int, part: slice) -> Box:
    return (*box[:dim], part, *box[dim + 1 :])


def _check_shapes(shapes: Sequence[Sequence[int]]) -> None:
    if len({tuple(shape) for shape in shapes}) > 1:
        raise ModelError(f"parts of one parameter have different shapes: {sorted(set(map(tuple, shapes)))}")


def _stack(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= len(parts[0].shape) + 1
    _check_shapes([part.shape for part in parts])
    shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])

    def read(box: Box) -> Tensor:
        inner = (*box[:dim], *box[dim + 1 :])
        return torch.stack([part.read(inner) for part in parts[box[dim]]], dim)

    return LazyTensor(shape, parts[0].dtype, read)


def _cat(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= len(parts[0].shape)
    _check_shapes([(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts])
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)

    def read(box: Box) -> Tensor:
        pieces, begin = [], 0
        for part in parts:
            start = max(box[dim].start - begin, 0)
            stop = min(box[dim].stop - begin, part.shape[dim])
            if start < stop:
                pieces.append(part.read(_put(box, dim, slice(start, stop))))
            begin += part.shape[dim]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    return LazyTensor(shape, parts[0].dtype, read)


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    dim %= len(tensor.shape)
    size = -(-tensor.shape[dim] // chunks)

    def piece(begin: int) -> LazyTensor:
        shape = list(tensor.shape)
        shape[dim] = min(size, tensor.shape[dim] - begin)
        return LazyTensor(
            shape,
            tensor.dtype,
            lambda box: tensor.read(_put(box, dim, slice(begin + box[dim].start, begin + box[dim].stop))),
        )

    return tuple(piece(begin) for begin in range(0, tensor.shape[dim], size))


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    def swap(values: Sequence[Any]) -> list[Any]:
        swapped = list(values)
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return swapped

    return LazyTensor(swap(tensor.shape), tensor.dtype, lambda box: tensor.read(tuple(swap(box))).transpose(dim0, dim1))


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}
