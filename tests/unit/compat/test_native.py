"""The noise of hybrid_rl.compat.native: known answers, the two forms against each other, and its invariances."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.errors import ConfigError, DataError

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, answer
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
EXTREMES = [0, 1, -1, 2**31, 2**32 - 1, -(2**32), 2**63 - 1, -(2**63), 0x123456789ABCDEF, -0x123456789ABCDEF]


@pytest.fixture(autouse=True)
def fresh_choice() -> Iterator[None]:
    """The choice of a form is made once per process; each test here makes it again."""
    forget()
    yield
    forget()


needs_extension = pytest.mark.skipif(
    not native.is_available(), reason="the compiled extension was not built, or is switched off"
)


def forget() -> None:
    native.why_missing.cache_clear()
    native.operator.cache_clear()


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def philox_in_python(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox-4x32-10 in Python's unbounded integers: an independent reference."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k0, q % 2**32, (p >> 32) ^ d ^ k1, p % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def uniform_in_python(seed: int, position: int, column: int) -> float:
    seed, position = seed % 2**64, position % 2**64
    counter = (position % 2**32, position >> 32, column // 4, 0x48524C)
    word = philox_in_python(counter, (seed % 2**32, seed >> 32))[column % 4]
    return ((word >> 9) + 0.5) / 2**23


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3, k0, k1 = (int64([word]) for word in (*counter, *key))
    assert [int(word) for word in native.philox4x32((c0, c1, c2, c3), (k0, k1))] == list(answer)
    assert philox_in_python(counter, key) == list(answer)


def test_layout_of_key_counter_and_column_against_unbounded_integers() -> None:
    draw = random.Random(1)
    seeds = [draw.choice(EXTREMES) for _ in range(12)]
    positions = [draw.choice(EXTREMES) for _ in range(12)]
    noise = native.keyed_uniform_torch(int64(seeds), int64(positions), 11)
    expected = [[uniform_in_python(s, p, c) for c in range(11)] for s, p in zip(seeds, positions, strict=True)]
    assert noise.dtype == torch.float32
    assert noise.tolist() == expected  # doubles on the right: the float32 values are exact


@needs_extension
@pytest.mark.parametrize("num_columns", [1, 3, 4, 63, 64, 65, 4096, 4099, 70001])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_extension_equals_oracle_bitwise(num_rows: int, num_columns: int) -> None:
    seeds, positions = int64((EXTREMES * 2)[3 : 3 + num_rows]), int64((EXTREMES * 2)[5 : 5 + num_rows])
    strided = seeds.repeat_interleave(4)[::4]
    noise = native.keyed_uniform(strided, positions, num_columns)
    oracle = native.keyed_uniform_torch(seeds, positions, num_columns)
    assert noise.shape == (num_rows, num_columns)
    assert torch.equal(noise.view(torch.int32), oracle.view(torch.int32))


def test_noise_of_a_row_depends_on_its_key_and_column_alone() -> None:
    seeds, positions = torch.arange(50) * 7919 - 99, torch.arange(50) % 11
    whole = native.keyed_uniform(seeds, positions, 130)
    order = torch.randperm(50)
    assert torch.equal(native.keyed_uniform(seeds[order], positions[order], 130), whole[order])
    assert torch.equal(native.keyed_uniform(seeds[17:18], positions[17:18], 130), whole[17:18])
    assert torch.equal(native.keyed_uniform(seeds, positions, 77), whole[:, :77])


def test_uniform_within_the_open_interval() -> None:
    noise = native.keyed_uniform(torch.arange(64), torch.arange(64) * 3, 16384).flatten().double()
    counts = torch.histc(noise, bins=256, min=0, max=1)
    expected = noise.numel() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 255 degrees of freedom: mean 255, standard deviation 22.6; the noise is fixed, so this cannot flicker.
    assert 140 < chi_square < 370
    # x + 0.5 is exact in float32 for 23-bit x; with 24 bits the largest would round to 1.
    assert float(noise.min()) > 0 and float(noise.max()) < 1
    assert abs(float(noise.mean()) - 0.5) < 5 * (1 / 12 / noise.numel()) ** 0.5


@pytest.mark.parametrize(
    ("seeds", "positions", "num_columns", "message"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), 4, r"seeds is torch.float32 \[2\]; give int64"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), 4, r"positions is .*\[2, 1\]"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 4, "seeds has 2 elements and pos"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 0, "num_columns=0"),
    ],
)
def test_bad_arguments_are_named(seeds: torch.Tensor, positions: torch.Tensor, num_columns: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        native.keyed_uniform(seeds, positions, num_columns)


def test_switched_off_says_so_once_and_gives_the_same_noise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = native.keyed_uniform(int64([5]), int64([6]), 10)
    forget()
    monkeypatch.setenv("HYBRID_RL_NATIVE", "0")
    with caplog.at_level(logging.INFO, logger="hybrid_rl"):
        assert not native.is_available()
        assert torch.equal(native.keyed_uniform(int64([5]), int64([6]), 10), expected)
    assert [record.getMessage() for record in caplog.records] == [
        "HYBRID_RL_NATIVE=0: slower PyTorch forms replace the compiled operators"
    ]


def test_missing_and_broken_libraries_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    monkeypatch.setenv("HYBRID_RL_NATIVE", "1")
    monkeypatch.setattr(native, "_LIBRARY_PATH", tmp_path / "_native.so")
    with caplog.at_level(logging.INFO, logger="hybrid_rl"):
        assert not native.is_available()
        forget()
        (tmp_path / "_native.so").write_bytes(b"not a library")
        assert not native.is_available()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "was not built" in caplog.records[0].getMessage()
    assert "cannot be loaded" in caplog.records[1].getMessage()
    assert "cannot be loaded" in (native.why_missing("cpu") or "")


@needs_extension
def test_what_is_missing_for_a_gpu_is_the_extension_or_its_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    monkeypatch.setenv("HYBRID_RL_NATIVE", "0")
    with caplog.at_level(logging.INFO, logger="hybrid_rl"):
        assert native.why_missing("cuda") == native.why_missing("cpu") == "HYBRID_RL_NATIVE=0"
    assert len(caplog.records) == 1
    forget()
    monkeypatch.setenv("HYBRID_RL_NATIVE", "1")
    assert native.why_missing("cpu") is None
    monkeypatch.setattr(native, "_CUDA_LIBRARY_PATH", tmp_path / "_native_cuda.so")
    assert "no kernels for cuda (to have those for cuda, install nvcc" in (native.why_missing("cuda") or "")
    forget()
    (tmp_path / "_native_cuda.so").write_bytes(b"not a library")
    assert "_native_cuda.so of the compiled extension cannot be loaded" in (native.why_missing("cuda") or "")
    assert native.operator("strided_copy", "cuda") is None


@needs_extension
def test_an_operator_of_newer_sources_is_said_to_be_missing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        assert native.operator("of_tomorrow") is None
        assert native.operator("of_tomorrow") is None
        assert native.operator("keyed_uniform") is not None
    assert ["no operator of_tomorrow" in record.getMessage() for record in caplog.records] == [True]


def test_unknown_value_of_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_RL_NATIVE", "off")
    with pytest.raises(ConfigError, match="HYBRID_RL_NATIVE='off'; set 0"):
        native.is_available()
