"""The compiled extension (csrc/): loading it, its operators by name, and the keyed noise of sampling.

No other file touches the extension; the caller of each operator holds its PyTorch form, which is the oracle. If the
extension is not built, the PyTorch forms run and a log line says so once; `HYBRID_RL_NATIVE=0` selects them on purpose.
`HYBRID_RL_NATIVE_FOLDER` names a folder of libraries other than the package, e.g. those built for another torch.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.errors import ConfigError, DataError

_FOLDER = Path(os.environ.get("HYBRID_RL_NATIVE_FOLDER") or Path(__file__).parents[1])
_LIBRARY_PATH = _FOLDER / "_native.so"
_CUDA_LIBRARY_PATH = _FOLDER / "_native_cuda.so"
_SWITCH = "HYBRID_RL_NATIVE"
_STAND_IN = "slower PyTorch forms replace the compiled operators"
_MASK_32 = 0xFFFFFFFF
_DOMAIN = 0x48524C
_logger = logging.getLogger("hybrid_rl")


def is_available() -> bool:
    """Whether the compiled extension is loaded (the first call loads it).

    Raises ConfigError if the environment variable HYBRID_RL_NATIVE is neither 0 nor 1.
    """
    return why_missing("cpu") is None


@functools.cache
def why_missing(device_type: str) -> str | None:
    """Return why the compiled operators for a device are missing; None if they are loaded (by the first call).

    The reason is logged once, with what replaces them.

    Raises:
        ConfigError: the environment variable HYBRID_RL_NATIVE is neither 0 nor 1.
    """
    if device_type != "cpu" and (reason := why_missing("cpu")) is not None:
        return reason  # already logged
    level, reason = _load_extension() if device_type == "cpu" else _load_kernels(device_type)
    if reason is not None:
        _logger.log(level, "%s: %s", reason, _STAND_IN)
    return reason


@functools.cache
def operator(name: str, device_type: str = "cpu") -> Callable[..., Any] | None:
    """Return the compiled operator of this name; None if the caller must use its PyTorch form.

    None means that the extension is missing or switched off, was built from older sources without this operator, or
    was built without kernels for this device; each is logged once.

    Raises:
        ConfigError: the environment variable HYBRID_RL_NATIVE is neither 0 nor 1.
    """
    if why_missing(device_type) is not None:
        return None
    packet = getattr(torch.ops.hybrid_rl, name, None)
    if packet is None:
        _logger.warning("the compiled extension has no operator %s: %s; reinstall to rebuild it", name, _STAND_IN)
        return None
    return packet.default


def built_operator(name: str) -> Callable[..., Any]:
    """Return the compiled operator for the CPU of this name; `operator` has shown that it is there."""
    compiled_operator = operator(name)
    assert compiled_operator is not None
    return compiled_operator


def keyed_uniform(seeds: Tensor, positions: Tensor, num_columns: int) -> Tensor:
    """Return noise in (0, 1) in which every element is a pure function of (seed, position, column).

    A token that is sampled with it does not depend on the composition of its batch. The generator is
    Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the key is the 64-bit
    seed, the counter is (low and high word of the position, column // 4, a constant), the word is column % 4.
    The value is (x + 0.5) / 2^23 for the top 23 bits x of the word: exact in float32, never 0 and never 1.

    Args:
        seeds: int64 [N]; all 64 bits count, and negative seeds are allowed.
        positions: int64 [N], of any value.
        num_columns: C, at least 1; usually the size of the vocabulary.

    Returns:
        float32 [N, C] on the device of the seeds.

    Raises:
        DataError: a wrong dtype, rank or length, or `num_columns` below 1.
    """
    _check(seeds, positions, num_columns)
    compiled = operator("keyed_uniform") if seeds.device.type == "cpu" else None
    return (compiled or keyed_uniform_torch)(seeds.contiguous(), positions.contiguous(), num_columns)


def keyed_uniform_torch(seeds: Tensor, positions: Tensor, num_columns: int) -> Tensor:
    """Compute `keyed_uniform` in PyTorch int64 arithmetic on the device of its arguments; the extension's oracle."""
    blocks = torch.arange((num_columns + 3) // 4, dtype=torch.int64, device=seeds.device)
    # The words broadcast: position and seed are [N, 1], the block is [1, B], so the first rounds cost only N or B.
    counter = (_low(positions)[:, None], _high(positions)[:, None], blocks[None, :], torch.full_like(blocks, _DOMAIN))
    words = philox4x32(counter, (_low(seeds)[:, None], _high(seeds)[:, None]))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :num_columns] >> 9
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Apply ten rounds of Philox-4x32 (Salmon et al. 2011, figure and constants of section 4.3).

    All words are int64 tensors that hold values in [0, 2^32) and broadcast against each other; so are the four
    returned words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product of two 32-bit words fills 64 bits: int64 wraps around to the same bits as unsigned arithmetic.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = _high(product1) ^ c1 ^ k0, _low(product1), _high(product0) ^ c3 ^ k1, _low(product0)
        k0, k1 = _low(k0 + 0x9E3779B9), _low(k1 + 0xBB67AE85)
    return tuple(torch.broadcast_tensors(c0, c1, c2, c3))


def _low(words: Tensor) -> Tensor:
    return words & _MASK_32


def _high(words: Tensor) -> Tensor:
    # The shift of a negative int64 extends its sign; the mask removes it.
    return (words >> 32) & _MASK_32


def _check(seeds: Tensor, positions: Tensor, num_columns: int) -> None:
    for name, tensor in (("seeds", seeds), ("positions", positions)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise DataError(f"{name} is {tensor.dtype} {list(tensor.shape)}; give int64 [N]")
    if len(seeds) != len(positions):
        raise DataError(f"seeds has {len(seeds)} elements and positions {len(positions)}; give one position per seed")
    if num_columns < 1:
        raise DataError(f"num_columns={num_columns}; give at least 1")


def _load_extension() -> tuple[int, str | None]:
    """Load the extension. Returns a log level, and the reason if it is not there."""
    switch = os.environ.get(_SWITCH, "1")
    if switch not in ("0", "1"):
        raise ConfigError(f"{_SWITCH}={switch!r}; set 0 (PyTorch only) or 1 (the extension, if it was built)")
    if switch == "0":
        return logging.INFO, f"{_SWITCH}=0"
    if not _LIBRARY_PATH.exists():
        return logging.INFO, (
            f"the compiled extension was not built (no {_LIBRARY_PATH.name}; to have it, install a C++ compiler and "
            f"reinstall with --no-build-isolation)"
        )
    return logging.WARNING, _load(_LIBRARY_PATH)


def _load_kernels(device_type: str) -> tuple[int, str | None]:
    """Load the kernels of a device other than the CPU. Returns a log level, and the reason if they are not there."""
    if device_type != "cuda" or not _CUDA_LIBRARY_PATH.exists():
        return logging.WARNING, (
            f"the compiled extension has no kernels for {device_type} (to have those for cuda, install nvcc, set "
            f"CUDA_HOME and reinstall with --no-build-isolation)"
        )
    return logging.WARNING, _load(_CUDA_LIBRARY_PATH)


def _load(path: Path) -> str | None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return (
            f"{path.name} of the compiled extension cannot be loaded ({error}; reinstall with --no-build-isolation to "
            f"build it against torch {torch.__version__})"
        )
    return None
