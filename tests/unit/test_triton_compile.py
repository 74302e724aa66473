"""Every form of the package's Triton kernels, compiled for two generations of GPUs by the Triton that is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "triton"  # where the Makefile puts it, apart from what every process imports
if not (FOLDER.is_dir() or find_spec("triton")):
    pytest.skip("needs Triton (make install, on Linux on x86-64)", allow_module_level=True)

pytestmark = pytest.mark.slow
# What a block may share, and the registers of a multiprocessor (CUDA C++ programming guide, table of technical
# specifications by compute capability).
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
REGISTERS = 1 << 16
# Of each kernel the form that needs most, in the dtype of rollouts.
REPRESENTATIVE = (
    "_sum_up-bf16-3584",
    "_differentiate-bf16-3584",
    "plan",
    "attend-bf16-8x4x256",
    "join-bf16-8x4x256",
    "store-bf16-8x4x256",
    "summarise-bf16",
    "draw-bf16-151936",
)
# Blocks that run on one multiprocessor: the decode kernels wait for memory, and need others meanwhile.
BLOCKS = {"attend": 2, "join": 4, "store": 8, "plan": 1, "_sum_up": 1, "_differentiate": 1, "_summarise": 4, "_draw": 2}


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the script of the forms prints, in a process that can import Triton."""
    command = [sys.executable, "-m", "tests.unit.triton_forms", *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path]),
        "TRITON_CACHE_DIR": str(folder),
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Names of all forms with their kernels, and the kernels that are launched."""
    return run(tmp_path_factory.mktemp("triton"), "--list")


def most_local_bytes(name: str) -> int:
    """What a thread may keep outside of its registers. Nothing, but for forms of no model in use: float32, which
    multiplies outside of the tensor cores and is for tests; and hidden sizes that are no multiple of a step."""
    if "-fp32-" in name:
        return 512 if name.startswith("attend") else 64
    return 40 if name.startswith("_sum_up") and name.endswith("-1000") else 0


def check(found: dict[str, dict[str, int]], listed: dict[str, Any]) -> None:
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


def test_every_kernel_that_is_launched_has_a_form(listed: dict[str, Any]) -> None:
    names = [name for name, _ in listed["forms"]]
    assert len(names) == len(set(names))
    assert {kernel for _, kernel in listed["forms"]} == set(listed["launched"]) == set(BLOCKS)


def test_representative_forms_fit_the_newer_generation(listed: dict[str, Any], tmp_path: Path) -> None:
    kernels = dict(listed["forms"])
    assert {kernels[name] for name in REPRESENTATIVE} == set(BLOCKS)
    check(run(tmp_path, *REPRESENTATIVE, "--capability", "90"), listed)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_all_forms_fit(listed: dict[str, Any], tmp_path: Path, capability: int) -> None:
    found = run(tmp_path, "--capability", str(capability))
    assert len(found) == len(listed["forms"])
    check(found, listed)
