"""The kernel of csrc that merges adapters on CUDA: as C++ over a stand-in of the launch model against its oracle, to
the bit; as nvcc compiles it."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.resharding.handoff.merged import carry_out
from tests.unit.resharding.boxes import FLOATS, LAYOUTS, boxes_of, contents

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).parent / "launch_model"
KERNEL = ROOT / "csrc" / "low_rank_kernels.cu"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    target = tmp_path_factory.mktemp("launch_model") / "low_rank.so"
    command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off"]
    command += [f"-I{MODEL}", f"-I{ROOT / 'csrc'}", str(MODEL / "low_rank.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "_Float16" in done.stderr:
        pytest.skip("g++ has no _Float16")
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_kernel_has_the_bits_of_its_oracle(
    library: ctypes.CDLL, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes, wanted = boxes_of(dtype, layout), boxes_of(dtype, layout)

    def run(table: torch.Tensor, marker: torch.Tensor) -> None:
        assert library.run(ctypes.c_void_p(table.data_ptr()), ctypes.c_int64(len(table))) == 0

    monkeypatch.setattr(native, "operator", lambda name, device_type="cpu": run)
    carry_out(boxes)
    monkeypatch.setattr(native, "operator", lambda name, device_type="cpu": None)
    carry_out(wanted)
    assert torch.equal(contents(boxes), contents(wanted))


def test_nothing_is_spilt_and_no_product_is_joined_to_a_sum(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    target = tmp_path / "low_rank.ptx"
    command = [nvcc, "-O3", "-std=c++20", "-arch=sm_90", "-Werror", "all-warnings", str(KERNEL), "-o", str(target)]
    done = subprocess.run([*command, "-ptx"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    code = target.read_text()
    assert "mul.rn.f32" in code and "fma.rn.f32" not in code
    command[-1] = str(tmp_path / "low_rank.cubin")
    done = subprocess.run([*command, "-cubin", "-Xptxas", "-v"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", done.stderr), done.stderr
