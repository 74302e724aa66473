"""Messages between memories that cannot read each other: pieces packed in the engine's dtypes, and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import Column, Pieces
from hybrid_rl.resharding.execute import copy_pieces
from hybrid_rl.resharding.pieces import contiguous_strides

# The dtypes of weights; tables refer to a dtype by its index here.
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_SIZES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)
_ALIGNMENT_BYTES = 16  # of each piece in a message: the widest access of a GPU


def dtype_code(dtype: torch.dtype) -> int:
    """Return the index of a dtype in DTYPES. Raises HandoffError if it is not one of them."""
    if dtype not in DTYPES:
        raise HandoffError(f"weights of {dtype} cannot be handed over; use one of {', '.join(map(str, DTYPES))}")
    return DTYPES.index(dtype)


@dataclass(frozen=True)
class Message:
    """A bucket in transit: its pieces one after the other, contiguous.

    dtype [P]: index in DTYPES; at [P]: start of each piece, in elements of its dtype; strides [P, MAX_DIMS]: in the
    message."""

    pieces: Pieces
    dtype: Column
    at: Column
    strides: Column
    num_bytes: int

    @classmethod
    def of(cls, pieces: Pieces, dtype: Column) -> Message:
        """Lay out the message of a bucket's pieces, each in the dtype of that index."""
        sizes = pieces.num_elements * _SIZES[dtype]
        taken = -(-sizes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        begin = np.cumsum(taken) - taken
        return cls(pieces, dtype, begin // _SIZES[dtype], contiguous_strides(pieces.shape), int(taken.sum()))

    def pack(self, parts: Sequence[Tensor | None], staging: Tensor) -> None:
        """Write the pieces of this rank's parts into `staging`, uint8, cast to their dtypes."""
        packing = replace(
            self.pieces, destination=self.dtype, destination_offset=self.at, destination_strides=self.strides
        )
        copy_pieces(packing, parts, _as_dtypes(staging))

    def unpack(self, staging: Tensor, destinations: Sequence[Tensor]) -> None:
        """Write the pieces to their destinations."""
        if len(self.pieces):
            staging = staging.to(destinations[self.pieces.destination[0]].device)
        unpacking = replace(self.pieces, source=self.dtype, source_offset=self.at, source_strides=self.strides)
        copy_pieces(unpacking, _as_dtypes(staging), destinations)


def _as_dtypes(staging: Tensor) -> list[Tensor]:
    """View a message of bytes as each of DTYPES; its length is a multiple of every element size."""
    return [staging.view(dtype) for dtype in DTYPES]
