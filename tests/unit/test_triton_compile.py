"""Every form of the package's Triton kernels, compiled for two generations of GPUs by the Triton that is here."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.kills.forked import Forked

FOLDER = Path(sys.prefix) / "triton"  # where the Makefile puts it, apart from what every process imports
if not (FOLDER.is_dir() or find_spec("triton")):
    pytest.skip("needs Triton (make install, on Linux on x86-64)", allow_module_level=True)

pytestmark = pytest.mark.slow
# What a block may share, and the registers of a multiprocessor (CUDA C++ programming guide, table of technical
# specifications by compute capability).
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
REGISTERS = 1 << 16
# What a block may share on the smallest GPUs that the kernels of the head run on (8.6, 8.9).
HEAD, HEAD_SHARED_BYTES = ("_sum_up", "_differentiate"), 99 << 10
# Of each kernel the form that needs most, in the dtype of rollouts; of the head also one that multiplies exactly.
REPRESENTATIVE = (
    "_sum_up-bf16-3584",
    "_differentiate-bf16-3584",
    "_differentiate-bf16-3584-wide",
    "plan",
    "attend-bf16-8x4x256",
    "join-bf16-8x4x256",
    "store-bf16-8x4x256",
    "summarise-bf16",
    "draw-bf16-151936",
    "_sum_up-fp32-1000-ones",
    "_differentiate-fp32-1000-ones",
)
REPRESENTATIVE_OLDER = ("_sum_up-fp16-896", "_differentiate-fp16-896")
# Blocks that run on one multiprocessor: the decode kernels wait for memory, and need others meanwhile.
BLOCKS = {"attend": 2, "join": 4, "store": 8, "plan": 1, "_sum_up": 1, "_differentiate": 1, "_summarise": 4, "_draw": 2}


def run(forked: Forked, folder: Path, *arguments: str) -> dict[str, Any]:
    """What the script of the forms prints, in a process that can import Triton."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    done = forked.run("-m", "tests.unit.triton_forms", *arguments, environment=environment, limit_seconds=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def listed(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Names of all forms with their kernels, and the kernels that are launched."""
    return run(forked, tmp_path_factory.mktemp("triton"), "--list")


def most_local_bytes(name: str) -> int:
    """What a thread may keep outside of its registers. Nothing, but for forms of no model in use: float32, which
    multiplies outside of the tensor cores and is for tests; and hidden sizes that are no multiple of a step."""
    if "-fp32-" in name:
        return 512 if name.startswith("attend") else 64
    return 40 if name.startswith("_sum_up") and name.removesuffix("-wide").endswith("-1000") else 0


def check(found: dict[str, dict[str, Any]], listed: dict[str, Any]) -> None:
    """Bars for what was compiled, by name of the form and capability."""
    kernels = dict(listed["forms"])
    for what, used in found.items():
        name, capability = what.rsplit(" ", 1)
        kernel = kernels[name]
        assert used["local_bytes"] <= most_local_bytes(name), f"{what} spills: {used}"
        blocks = BLOCKS[kernel]
        assert used["shared_bytes"] * blocks <= SHARED_BYTES[int(capability)], (what, used)
        # Registers are given out to warps in units of 8 per thread.
        assert -(-used["registers"] // 8) * 8 * used["threads"] * blocks <= REGISTERS, (what, used)
        if kernel in HEAD:
            # By the tensor cores, but for exact products of float32, whatever TF32 could do.
            tensor_cores = "wgmma" if capability == "90" else "mma.sync"
            assert used["multiplies"] == ("" if "-fp32-" in name else tensor_cores), (what, used)
            assert used["shared_bytes"] <= HEAD_SHARED_BYTES, (what, used)


def test_every_kernel_that_is_launched_has_a_form(listed: dict[str, Any]) -> None:
    names = [name for name, _ in listed["forms"]]
    assert len(names) == len(set(names))
    assert {kernel for _, kernel in listed["forms"]} == set(listed["launched"]) == set(BLOCKS)


def test_representative_forms_fit_and_the_head_uses_tensor_cores(
    forked: Forked, listed: dict[str, Any], tmp_path: Path
) -> None:
    kernels = dict(listed["forms"])
    assert {kernels[name] for name in REPRESENTATIVE} == set(BLOCKS)
    for capability, names in ((90, REPRESENTATIVE), (80, REPRESENTATIVE_OLDER)):
        found = run(forked, tmp_path, *names, "--capability", str(capability))
        assert len(found) == len(names)
        check(found, listed)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_all_forms_fit(forked: Forked, listed: dict[str, Any], tmp_path: Path, capability: int) -> None:
    found = run(forked, tmp_path, "--capability", str(capability))
    assert len(found) == len(listed["forms"])
    check(found, listed)
