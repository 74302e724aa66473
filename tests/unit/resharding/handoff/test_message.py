"""What is packed comes out as it would have been copied, in few bytes, and hashed alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import Pieces
from hybrid_rl.resharding.execute import copy_pieces
from hybrid_rl.resharding.handoff.base import by_device
from hybrid_rl.resharding.handoff.message import DTYPES, Message, dtype_code
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.unit.resharding.handoff.parts import empty_engine, engine_trace, globals_of, is_equal, plan_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packing_and_unpacking_is_copying(dtype):
    tensors = globals_of()
    source = TensorSource(tensors)
    trace = engine_trace(tensors, 0, 1, dtype)
    pieces = Pieces.join([bucket.pieces for bucket in plan_of(trace, source.layout(), 0).buckets])
    pieces = pieces.select(pieces.source > 1)  # a bucket does not hold something of everything
    parts = source.held()[0]
    direct, by_message = empty_engine(trace), empty_engine(trace)
    copy_pieces(pieces, parts, direct)
    message = Message.of(pieces, np.full(len(pieces), dtype_code(dtype)))
    # Each piece takes its bytes in the engine's dtype, rounded up to 16.
    assert message.num_bytes == sum(-(-n * dtype.itemsize // 16) * 16 for n in pieces.num_elements.tolist())
    staging = torch.empty(message.num_bytes, dtype=torch.uint8)
    message.pack(parts, staging)
    message.unpack(staging, by_message)
    assert is_equal(by_message, direct)


def test_pieces_are_told_apart_by_the_devices_that_they_lead_from_and_to():
    tensors = globals_of()
    source = TensorSource(tensors)
    trace = engine_trace(tensors, 0, 1, torch.float32)
    pieces = Pieces.join([bucket.pieces for bucket in plan_of(trace, source.layout(), 0).buckets])
    engine = empty_engine(trace)
    assert by_device(pieces, source.held()[0], engine) == [pieces]
    elsewhere = [t.to("meta") if name in ("q", "norm") else t for name, t in sorted(tensors.items())]
    engine[3] = engine[3].to("meta")  # the destination of norm
    found = by_device(pieces, elsewhere, engine)
    names = [sorted({sorted(tensors)[i] for i in part.source.tolist()}) for part in found]
    assert sorted(names) == [["embedding", "k", "out", "scale"], ["norm"], ["q"]]
    assert sum(map(len, found)) == len(pieces)
    assert by_device(replace(pieces).select(slice(0)), elsewhere, engine) == []


def test_a_dtype_that_tables_have_no_number_for_is_refused():
    assert [dtype_code(dtype) for dtype in DTYPES] == list(range(len(DTYPES)))
    with pytest.raises(HandoffError, match="weights of torch.complex64 cannot be handed over; use one of torch.float"):
        dtype_code(torch.complex64)
