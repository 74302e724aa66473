from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent


@pytest.fixture
def build() -> ModuleType:
    """setup.py as a module."""
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("hybrid_rl_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)  # nvcc takes half a minute, on a busy machine many times longer
def test_cuda_sources_compile(build: ModuleType, tmp_path: Path) -> None:
    """To an object for one generation, against the headers of this torch: that needs no GPU and no CUDA build."""
    nvcc = build.find_nvcc(TORCH)
    if nvcc is None:
        pytest.skip("no nvcc (set CUDA_HOME, or pip install nvidia-cuda-nvcc and nvidia-cuda-runtime of version 13.0)")
    for source in sorted((ROOT / "csrc").glob("*.cu")):
        target = tmp_path / f"{source.stem}.o"
        command = build.cuda_command(nvcc, TORCH, [str(source)], target, ["-arch=sm_90"])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert b"strided_copy_kernel" in target.read_bytes()


def test_nvcc_is_found_where_it_was_named_first(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(*parts: str) -> Path:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True)
        path.touch()
        path.chmod(0o755)
        return path

    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    torch_root = tmp_path / "site-packages" / "torch"
    assert build.find_nvcc(torch_root) is None
    beside_torch = place("site-packages", "nvidia", "cu13", "bin", "nvcc")
    assert build.find_nvcc(torch_root) == beside_torch
    on_path = place("bin", "nvcc")
    assert build.find_nvcc(torch_root) == on_path
    named = place("toolkit", "bin", "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert build.find_nvcc(torch_root) == named


def test_a_library_is_linked_and_an_object_is_not(build: ModuleType) -> None:
    library = build.cuda_command(Path("/cuda/bin/nvcc"), TORCH, ["a.cu"], Path("x.so"), ["-arch=sm_90"])
    assert {"-shared", "-ltorch_cuda", "a.cu"} <= set(library) and "-c" not in library
    single = build.cuda_command(Path("/cuda/bin/nvcc"), TORCH, ["a.cu"], Path("x.o"), ["-arch=sm_90"])
    assert "-c" in single and "-shared" not in single
