"""The batched copy-and-cast on the device: against the CPU's bits, against fp64, its hash against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_rl.compat import native
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Pieces
from hybrid_rl.resharding.execute import copy_pieces
from tests.gpu.device import DEVICE, cuda_only
from tests.support.content_hash import content_hash

CASTS = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(a, b) for a in CASTS for b in CASTS] + [(d, d) for d in (torch.float64, torch.int32, torch.int8, torch.bool)]
# Rows of 16 bytes on both sides; odd rows; a single odd row; few and long rows; three dims; two dims turned, of odd
# extents and of whole tiles; the same in each of three experts.
SHAPES = {
    "aligned": ((300, 1024), (1040, 1), (1024, 1)),
    "odd": ((77, 301), (301, 1), (303, 1)),
    "run": ((123457,), (1,), (1,)),
    "long": ((2, 100_000), (100_016, 1), (100_000, 1)),
    "three": ((9, 17, 64), (4096, 64, 1), (64, 640, 1)),
    "turned": ((130, 190), (190, 1), (1, 130)),
    "tiles": ((192, 256), (256, 1), (1, 192)),
    "experts": ((3, 130, 96), (12_480, 96, 1), (12_480, 1, 130)),
    "gaps": ((50, 60), (120, 2), (180, 3)),
}


def padded(values: tuple[int, ...], fill: int) -> list[int]:
    return [*values, *[fill] * (MAX_DIMS - len(values))]


def pieces_of(name: str, offset: int, number: int) -> Pieces:
    """One piece of a shape, `offset` elements into both tensors."""
    shape, strides, target_strides = SHAPES[name]
    return Pieces(
        source=np.array([0]),
        source_rank=np.array([0]),
        source_offset=np.array([offset]),
        source_strides=np.array([padded(strides, 0)]),
        destination=np.array([0]),
        destination_offset=np.array([offset]),
        destination_strides=np.array([padded(target_strides, 0)]),
        shape=np.array([padded(shape, 1)]),
        global_offset=np.array([number]),
        global_strides=np.array([padded(strides, 0)]),
    )


def room(name: str, which: int) -> int:
    shape, *strides = SHAPES[name]
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides[which], strict=True))


def values(count: int, dtype: torch.dtype) -> Tensor:
    """Any bits, those of a NaN left out where they convert."""
    generator = torch.Generator().manual_seed(count)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    return raw.masked_fill(raw.isnan(), 1.0) if dtype in CASTS else raw


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@cuda_only
def test_the_kernel_was_built() -> None:
    """Without it all else here would show PyTorch's form."""
    assert native.why_missing(DEVICE) is None
    assert native.operator("strided_copy", DEVICE) is not None


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: "-".join(str(d).removeprefix("torch.") for d in pair))
def test_as_on_the_cpu_to_the_bit(dtypes: tuple[torch.dtype, torch.dtype], name: str, offset: int) -> None:
    pieces = pieces_of(name, offset, 2**32 - 1000)
    source = values(room(name, 0) + offset + 3, dtypes[0])
    before = values(room(name, 1) + offset + 3, dtypes[1])
    seeds = torch.tensor([-77])
    written, hashes = {}, {}
    for device in ("cpu", DEVICE):
        written[device], hashes[device] = before.clone().to(device), torch.tensor([4], device=device)
        copy_pieces(pieces, [source.to(device)], [written[device]], hashes=hashes[device], seeds=seeds)
    assert same(written[DEVICE], written["cpu"])
    assert int(hashes[DEVICE]) == int(hashes["cpu"])
    again = before.clone().to(DEVICE)
    copy_pieces(pieces, [source.to(DEVICE)], [again])
    assert same(again, written["cpu"])


@pytest.mark.parametrize(("target", "digits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_rounds_to_nearest_against_fp64(target: torch.dtype, digits: int) -> None:
    """Half a unit in the last place, and to even where two are as near."""
    source = torch.rand(1 << 20, generator=torch.Generator().manual_seed(1)) + 1  # one exponent
    ties = 1 + (torch.arange(0, 2 ** (digits - 1)).double() + 0.5) * 2.0 ** (1 - digits)
    source = torch.cat([source, ties.float(), torch.ones(-len(ties) % 16)]).to(DEVICE)
    out = torch.empty(len(source), dtype=target, device=DEVICE)
    SHAPES["all"] = ((len(source),), (1,), (1,))
    copy_pieces(pieces_of("all", 0, 0), [source], [out])
    unit = 2.0 ** (1 - digits)
    error = (out.double() - source.double()).abs()
    assert float(error.max()) <= unit / 2
    tied = out[error == unit / 2].double()
    assert len(tied) >= len(ties) and bool((torch.remainder(tied / unit, 2) == 0).all())


def test_nan_is_kept_in_canonical_form() -> None:
    payloads = torch.tensor([0x7F800001, -1, 0x7FFFFFFF, -8388607] * 4, dtype=torch.int32).view(torch.float32)
    SHAPES["nan"] = ((16,), (1,), (1,))
    for target, canonical in ((torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)):
        out = torch.zeros(16, dtype=target, device=DEVICE)
        copy_pieces(pieces_of("nan", 0, 0), [payloads.to(DEVICE)], [out])
        assert out.cpu().view(torch.int16).tolist() == [canonical] * 16


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_hash_of_what_is_only_read(dtype: torch.dtype | None) -> None:
    data = torch.randn(513, 1030, generator=torch.Generator().manual_seed(2))
    for view in (data, data[:, 3:], data.T):
        expected = content_hash(view, 5, 2**40 + 7, view.stride(), dtype)
        there = data.to(DEVICE).as_strided(view.shape, view.stride(), view.storage_offset())
        assert content_hash(there, 5, 2**40 + 7, view.stride(), dtype) == expected


def test_thousands_of_pieces_in_one_call() -> None:
    """Rows of a matrix to places in another order, each hashed to the one tensor."""
    data = torch.randn(3000, 200, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(4))
    row, zero = np.arange(3000, dtype=np.int64), np.zeros(3000, dtype=np.int64)
    unit = np.tile(np.array(padded((1,), 0)), (3000, 1))
    pieces = Pieces(
        source=zero,
        source_rank=zero,
        source_offset=row * 200,
        source_strides=unit,
        destination=zero,
        destination_offset=order.numpy() * 200,
        destination_strides=unit,
        shape=np.tile(np.array(padded((200,), 1)), (3000, 1)),
        global_offset=row * 200,
        global_strides=unit,
    )
    out, hashes = torch.zeros(3000, 200, dtype=torch.bfloat16, device=DEVICE), torch.zeros(1, dtype=torch.int64)
    hashes = hashes.to(DEVICE)
    copy_pieces(pieces, [data.flatten().to(DEVICE)], [out], hashes=hashes, seeds=torch.tensor([8]))
    assert torch.equal(out.cpu()[order], data.bfloat16())
    assert int(hashes) == content_hash(data, 8, 0, (200, 1), torch.bfloat16)
