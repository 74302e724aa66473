from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.compat import native
from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Pieces
from hybrid_rl.resharding.execute import HashedBoxes, copy_pieces, hash_pieces, name_seed
from tests.support.content_hash import content_hash

CASTS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn)
M32 = 0xFFFFFFFF


@pytest.fixture(params=["compiled", "pytorch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of the operator."""
    if request.param == "pytorch":
        monkeypatch.setattr(native, "operator", lambda name, device_type="cpu": None)
    elif native.operator("strided_copy") is None:
        pytest.skip("the compiled extension was not built (no C++ compiler when installing, or HYBRID_RL_NATIVE=0)")
    return request.param


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def dims(values: tuple[int, ...], fill: int) -> np.ndarray:
    return np.array([[*values, *[fill] * (MAX_DIMS - len(values))]], dtype=np.int64)


def piece(
    shape: tuple[int, ...],
    source: tuple[int, tuple[int, ...]],
    destination: tuple[int, tuple[int, ...]],
    number: tuple[int, tuple[int, ...]] | None = None,
    tensor: int = 0,
) -> Pieces:
    """One piece; source, destination and number: offset and strides. number: as in the source if None."""
    number = source if number is None else number
    return Pieces(
        source=column(tensor),
        source_rank=column(0),
        source_offset=column(source[0]),
        source_strides=dims(source[1], 0),
        destination=column(tensor),
        destination_offset=column(destination[0]),
        destination_strides=dims(destination[1], 0),
        shape=dims(shape, 1),
        global_offset=column(number[0]),
        global_strides=dims(number[1], 0),
    )


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, to compare bit for bit."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def values(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits of a dtype but those of a NaN; infinities, zeros of both signs and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    if dtype not in CASTS:
        return raw
    ordinary = (torch.randn(count, generator=generator) * 3).to(dtype)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-7, -3e-8, 65519.9, 65520.0, 1e-40, 3.4e38])
    mixed = torch.where(torch.rand(count, generator=generator) < 0.5, ordinary, raw)
    mixed[: min(count, 10)] = special.to(dtype)[: min(count, 10)]
    return torch.where(mixed.isnan(), torch.ones((), dtype=dtype), mixed)


def reference_hash(words: Sequence[int], numbers: Sequence[int], seed: int) -> int:
    """The content hash in NumPy's uint64, as csrc/strided_copy.h defines it."""
    word, number = np.array(words, dtype=np.uint64), np.array(numbers, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.uint64(seed % 2**64) + ((number >> np.uint64(32)) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        key = (number.astype(np.uint32) * np.uint32(0x9E3779B9)) + z.astype(np.uint32)
        key ^= key >> np.uint32(16)
        key = key * np.uint32(0x7FEB352D) + (z >> np.uint64(32)).astype(np.uint32)
        key ^= key >> np.uint32(15)
        key *= np.uint32(0x846CA68B)
        key ^= key >> np.uint32(16)
        terms = (word ^ np.uint64(0x9E3779B9)) * (key.astype(np.uint64) + np.uint64(1))
        return int(terms.sum(dtype=np.uint64).astype(np.int64))


# ------------------------------------------------------------------------------------------------------------ copying


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, tuple[int, ...], int]]]:
    """A shape, and twice an offset, strides of any order with gaps, and the number of elements in memory."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 17, 40, 65]), min_size=1, max_size=MAX_DIMS)))
    while np.prod(shape) > 20_000:
        shape = shape[1:]
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape))))
        strides, step = [0] * len(shape), draw(st.sampled_from([1, 1, 1, 2]))
        for dim in reversed(order):
            strides[dim] = step
            step = step * shape[dim] + draw(st.sampled_from([0, 0, 0, 1, 8]))
        offset = draw(st.integers(0, 9))
        reach = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        sides.append((offset, tuple(strides), reach + draw(st.integers(0, 5))))
    return shape, sides


dtype_pairs = st.one_of(
    st.tuples(st.sampled_from(CASTS), st.sampled_from(CASTS)), st.sampled_from(PLAIN).map(lambda d: (d, d))
)


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=100, deadline=None)
@given(layout=layouts(), dtypes=dtype_pairs, seed=st.integers(-(2**63), 2**63 - 1), start=st.integers(0, 2**41))
def test_any_strides_and_dtypes_as_pytorch_copies_them(layout, dtypes, seed, start, threads):
    shape, ((at, strides, extent), (to, target_strides, room)) = layout
    source, target = values(extent, dtypes[0]), values(room, dtypes[1], seed=1)
    expected = target.clone()
    view = source.as_strided(shape, strides, at)
    expected.as_strided(shape, target_strides, to).copy_(view)
    one = piece(shape, (at, strides), (to, target_strides), (start, strides))
    hashes, before = torch.tensor([5]), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy_pieces(one, [source], [target], hashes=hashes, seeds=torch.tensor([seed]))
        again = target.clone().fill_(0)
        copy_pieces(one, [source], [again])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(target), bits(expected))
    assert torch.equal(bits(again.as_strided(shape, target_strides, to)), bits(view.to(dtypes[1])))
    width = min(4, dtypes[1].itemsize)
    words = bits(view.to(dtypes[1])).numpy().view(f"<u{width}")
    parts = dtypes[1].itemsize // width  # an element of 8 bytes is two words
    number = start + np.indices(shape).reshape(len(shape), -1).T @ np.array(strides)
    numbers = (parts * number[:, None] + np.arange(parts)).ravel()
    expected_hash = reference_hash(words, numbers, seed)
    assert (int(hashes) - 5 - expected_hash) % 2**64 == 0


@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_number_of_sixteen_bits(source: torch.dtype, target: torch.dtype, form: str) -> None:
    """All bit patterns, against PyTorch; a NaN that is converted becomes the canonical one."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source)
    out = torch.zeros(65536, dtype=target)
    copy_pieces(piece((65536,), (0, (1,)), (0, (1,))), [every], [out])
    expected = every.to(target)
    if source != target:
        expected[every.isnan()] = torch.tensor(float("nan"), dtype=target)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_ties_and_limits_of_rounding(target: torch.dtype, form: str) -> None:
    """Every value of the target, the middle to its neighbour and the floats beside that, of both signs."""
    exact = torch.arange(0, 0x7F80 if target == torch.bfloat16 else 0x7C00, dtype=torch.int32).to(torch.int16)
    floats = exact.view(target).float()
    middles = (floats[:-1] + floats[1:]) / 2
    infinity = torch.tensor(float("inf"))
    source = torch.cat([floats, middles, middles.nextafter(infinity), middles.nextafter(-infinity)])
    source = torch.cat([source, -source, torch.tensor([infinity, -infinity, 3.4028235e38, 65519.996, 65520.0])])
    out = torch.zeros(len(source), dtype=target)
    copy_pieces(piece((len(source),), (0, (1,)), (0, (1,))), [source], [out])
    assert torch.equal(bits(out), bits(source.to(target)))


def test_nan_is_kept_in_canonical_form(form: str) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -8388607], dtype=torch.int32).view(torch.float32)
    for target, canonical in ((torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)):
        out = torch.zeros(5, dtype=target)
        copy_pieces(piece((5,), (0, (1,)), (0, (1,))), [payloads], [out])
        assert out.view(torch.int16).tolist() == [canonical] * 5
    same = torch.zeros(5)
    copy_pieces(piece((5,), (0, (1,)), (0, (1,))), [payloads], [same])
    assert torch.equal(bits(same), bits(payloads))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_pieces_large_and_small_share_the_threads(threads: int) -> None:
    """A column-parallel shard of 300 rows, a transposed matrix, 200 single rows; what is between stays as it was."""
    generator = torch.Generator().manual_seed(3)
    sources = [torch.randn(300, 2048, generator=generator), torch.randn(130, 190, generator=generator)]
    sources.append(torch.randn(200, 96, generator=generator))
    targets = [torch.full((n,), 7.0).bfloat16() for n in (300 * 1024, 190 * 130, 200 * 100)]
    columns = piece((300, 1024), (1024, (2048, 1)), (0, (1024, 1)))
    turned = piece((130, 190), (0, (190, 1)), (0, (1, 130)), tensor=1)
    rows = [piece((96,), (96 * i, (1,)), (100 * i, (1,)), tensor=2) for i in range(200)]
    hashes, seeds = torch.zeros(3, dtype=torch.int64), torch.tensor([name_seed(n) for n in "abc"])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy_pieces(Pieces.join([columns, turned, *rows]), sources, targets, hashes=hashes, seeds=seeds)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(targets[0].view(300, 1024), sources[0][:, 1024:].bfloat16())
    assert torch.equal(targets[1].view(190, 130), sources[1].T.bfloat16())
    assert torch.equal(targets[2].view(200, 100)[:, :96], sources[2].bfloat16())
    assert bool((targets[2].view(200, 100)[:, 96:] == 7).all())
    whole = [content_hash(sources[0][:, 1024:].bfloat16(), name_seed("a"), 1024, (2048, 1))]
    whole += [content_hash(s.bfloat16(), name_seed(n), 0, s.stride()) for s, n in zip(sources[1:], "bc", strict=True)]
    assert hashes.tolist() == whole


def test_both_forms_agree_on_numbers_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose numbers cross a multiple of 2^32, with and without a stride."""
    data = torch.randn(9000, generator=torch.Generator().manual_seed(1))
    cases = [(2**32 - 4100, 1), (2**32 - 70_000, 13), (2**40 - 1, 1), (3 * 2**32, 7)]
    compiled = [content_hash(data, 11, start, (stride,), torch.bfloat16) for start, stride in cases]
    monkeypatch.setattr(native, "operator", lambda name, device_type="cpu": None)
    assert compiled == [content_hash(data, 11, start, (stride,), torch.bfloat16) for start, stride in cases]


# --------------------------------------------------------------------------------------------------------- the hash


def test_hash_of_three_elements_by_hand(form: str) -> None:
    """1.0 and -0.0 in bfloat16 are 0x3F80 and 0x8000; an int64 is two words."""
    seed = name_seed("model.embed_tokens.weight")
    elements = torch.tensor([1.0, -0.0, 0.0]).bfloat16()
    assert content_hash(elements, seed, 10, (4,)) == reference_hash([0x3F80, 0x8000, 0], [10, 14, 18], seed)
    words = torch.tensor([(5 << 32) | 9])
    assert content_hash(words, seed, 6, (1,)) == reference_hash([9, 5], [12, 13], seed)
    assert content_hash(torch.empty(0), seed, 0, (1,)) == 0


def test_seed_of_a_name_is_fixed() -> None:
    """Stored hashes stay comparable: blake2b of the name, 8 bytes, little-endian."""
    digest = hashlib.blake2b(b"lm_head.weight", digest_size=8).digest()
    assert name_seed("lm_head.weight") == int.from_bytes(digest, "little", signed=True)
    assert len({name_seed(f"layer.{i}") for i in range(1000)}) == 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_any_flipped_bit_shows(dtype: torch.dtype, form: str) -> None:
    tensor = values(37, dtype)
    raw = tensor.view(torch.uint8)
    seen = {content_hash(tensor, 3, 0, (1,))}
    count = min(len(raw) * 8, 400)
    for bit in range(count):
        raw[bit // 8] ^= 1 << bit % 8
        seen.add(content_hash(tensor, 3, 0, (1,)))
        raw[bit // 8] ^= 1 << bit % 8
    assert len(seen) == count + 1


def test_elements_in_other_places_show(form: str) -> None:
    tensor = torch.randn(24, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    numbers = (24, 1)
    others = [tensor, tensor.T, tensor.flip(0), tensor.roll(1, 0), tensor.roll(1, 1), tensor.roll(1)]
    for i, j in ((0, 1), (5, 500), (300, 301)):
        swapped = tensor.flatten().clone()
        swapped[[i, j]] = swapped[[j, i]]
        others.append(swapped.view(24, 24))
    assert len({content_hash(t, 1, 0, numbers) for t in others}) == len(others)
    assert content_hash(tensor, 1, 0, numbers) != content_hash(tensor, 2, 0, numbers)
    assert content_hash(torch.zeros(4), 1, 0, (1,)) != content_hash(torch.zeros(5), 1, 0, (1,))
    # The same elements in another order of memory are the same content.
    assert content_hash(tensor.T, 1, 0, (1, 24)) == content_hash(tensor, 1, 0, numbers)


def test_hashes_add_up_over_any_partition(form: str) -> None:
    tensor = torch.randn(30, 50, generator=torch.Generator().manual_seed(4))
    whole = content_hash(tensor, 9, 0, (50, 1), torch.float16)
    cells = [(0, 7, 0, 50), (7, 30, 0, 13), (7, 20, 13, 50), (20, 30, 13, 50)]
    boxes = HashedBoxes(
        tensor=np.zeros(4, np.int64),
        offset=column(*(50 * b[0] + b[2] for b in cells)),
        strides=np.repeat(dims((50, 1), 0), 4, axis=0),
        shape=np.concatenate([dims((b[1] - b[0], b[3] - b[2]), 1) for b in cells]),
        dtype=np.zeros(4, np.int64),
        parameter=column(0, 1, 0, 1),
        global_offset=column(*(50 * b[0] + b[2] for b in cells)),
        global_strides=np.repeat(dims((50, 1), 0), 4, axis=0),
    )
    hashes = torch.zeros(2, dtype=torch.int64)
    hash_pieces(boxes, [tensor], [torch.float16], hashes=hashes, seeds=torch.tensor([9, 9]))
    assert int(hashes.sum()) == whole


def test_keys_have_nothing_in_common() -> None:
    """Lower, middle and upper bits of 4,096 keys fill 256 cells evenly. Bits of 1 after the flip show the key."""
    one = torch.tensor([0x9E3779B9 ^ 1], dtype=torch.int64).to(torch.int32)
    keys = np.array([content_hash(one, 17, n, (1,)) - 1 for n in range(4096)])
    assert len(np.unique(keys)) == 4096 and keys.min() >= 0 and keys.max() <= M32
    for shift in (0, 12, 24):
        counts = np.bincount((keys >> shift) & 255, minlength=256)
        chi_square = float(((counts - 16) ** 2 / 16).sum())
        assert 140 < chi_square < 370  # 255 degrees of freedom; the keys are fixed, so this cannot flicker


# ----------------------------------------------------------------------------------------------------------- refused


GOOD = piece((3, 4), (0, (4, 1)), (0, (4, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_offset": column(1)}, r"takes the elements 1 to 12 of source 0, which has 12"),
        ({"source_offset": column(-1)}, r"takes the elements -1 to 10 of source 0"),
        ({"destination_strides": dims((5, 1), 0)}, r"shape \[3, 4, 1, 1\].* 0 to 13 of destination 0, which has 12"),
        ({"destination_strides": dims((-4, 1), 0)}, r"-8 to 3 of destination 0"),
        ({"shape": dims((3, -1), 1)}, r"shape \[3, -1, 1, 1\]"),
        ({"source": column(1)}, "source 1, from which a piece is read, is not held"),
        ({"source": column(2)}, "names source 2 of 2"),
        ({"destination": column(-1)}, "names destination -1 of 1"),
    ],
)
def test_a_piece_outside_of_its_tensors_is_refused_before_anything_is_written(change, message, form: str) -> None:
    target = torch.zeros(12)
    pieces = Pieces.join([GOOD, replace(GOOD, **change)])
    with pytest.raises(HandoffError, match=message):
        copy_pieces(pieces, [torch.ones(12), None], [target])
    assert not bool(target.any())


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.float32, torch.float64, "source 0 is torch.float32 and cannot be cast to torch.float64"),
        (torch.int32, torch.float32, "source 0 is torch.int32"),
        (torch.bfloat16, torch.int16, "be cast to torch.int16"),
        (torch.complex128, torch.complex128, "have 16 bytes"),
    ],
)
def test_dtypes_that_do_not_convert(source: torch.dtype, target: torch.dtype, message: str) -> None:
    with pytest.raises(HandoffError, match=message):
        copy_pieces(GOOD, [torch.ones(12, dtype=source)], [torch.zeros(12, dtype=target)])


def test_hashes_need_seeds_and_room() -> None:
    tensors = [torch.ones(12)], [torch.zeros(12)]
    with pytest.raises(HandoffError, match="without seeds"):
        copy_pieces(GOOD, *tensors, hashes=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(HandoffError, match="seeds has 0 elements"):
        copy_pieces(GOOD, *tensors, hashes=torch.zeros(1, dtype=torch.int64), seeds=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(HandoffError, match="hashes is torch.float32"):
        copy_pieces(GOOD, *tensors, hashes=torch.zeros(1), seeds=torch.zeros(1, dtype=torch.int64))


def test_devices_must_agree() -> None:
    with pytest.raises(HandoffError, match="several devices"):
        copy_pieces(GOOD, [torch.ones(12)], [torch.zeros(12, device="meta")])


def test_a_destination_of_any_strides_and_one_that_learns(form: str) -> None:
    """A view into a larger tensor, and a parameter that requires a gradient."""
    memory = torch.zeros(6, 10)
    copy_pieces(piece((3, 4), (0, (4, 1)), (0, (10, 2))), [torch.arange(12.0)], [memory[2:, 1:8]])
    assert torch.equal(memory[2:5, 1:9:2], torch.arange(12.0).view(3, 4)) and float(memory.sum()) == 66
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    copy_pieces(GOOD, [torch.arange(12.0)], [weight])
    assert torch.equal(weight.detach().flatten(), torch.arange(12.0))


def test_nothing_to_do(form: str) -> None:
    none = GOOD.select(slice(0, 0))
    copy_pieces(none, [], [])
    copy_pieces(replace(GOOD, shape=dims((0, 4), 1)), [torch.ones(12)], [target := torch.zeros(12)])
    assert not bool(target.any())


def test_without_kernels_for_a_device_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    if not native.is_available():
        pytest.skip("the compiled extension was not built (no C++ compiler when installing, or HYBRID_RL_NATIVE=0)")
    native.operator.cache_clear()
    native.why_missing.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        assert native.operator("strided_copy", "xpu") is None
        assert native.operator("strided_copy", "xpu") is None
    assert ["has no kernels for xpu" in record.getMessage() for record in caplog.records] == [True]
