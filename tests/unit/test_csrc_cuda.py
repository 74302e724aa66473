"""The CUDA sources of csrc as nvcc sees them, and what an installation says of them. Nothing here needs a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent
# The kernels know no torch, and the file that does has no kernels.
KERNELS, GLUE = ROOT / "csrc" / "strided_copy_kernels.cu", ROOT / "csrc" / "strided_copy.cu"
GLUES = [GLUE, ROOT / "csrc" / "low_rank.cu"]
MOST_REGISTERS = 64  # so that 4 blocks of 256 threads share the 65536 registers of a multiprocessor
MOST_SHARED_BYTES = 40 * 1024  # of which 4 blocks fit into the 164 KB of sm_80
LAUNCH_MODEL = ROOT / "tests" / "unit" / "launch_model"
PATHS = ("aligned", "shifted", "turned", "scattered")
NUM_KERNELS = 6 * len(PATHS) * 2  # pairs of element sizes, paths, without and with the hash


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py as a module."""
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("hybrid_rl_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nvcc(build: ModuleType) -> Path:
    found = build.find_nvcc(TORCH) or next(iter(sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))), None)
    if found is None:
        pytest.skip("no nvcc (set CUDA_HOME, or pip install nvidia-cuda-nvcc and nvidia-cuda-runtime of version 13.0)")
    return found


@dataclass
class Kernel:
    """What the compiler made of one: path; registers of a thread; bytes of its stack, spilt, and shared by a block."""

    path: str
    hashed: bool
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@pytest.fixture(scope="module")
def compiled(nvcc: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[Kernel], Path]]:
    """The kernels and the machine code for one generation; each is compiled once."""
    made: dict[str, tuple[list[Kernel], Path]] = {}

    def compile_for(generation: str) -> tuple[list[Kernel], Path]:
        if generation not in made:
            target = tmp_path_factory.mktemp("cubin") / f"{generation}.cubin"
            command = [str(nvcc), "-O3", "-std=c++20", f"-arch={generation}", "-Xptxas", "-v", "-cubin"]
            command += ["-Werror", "all-warnings", str(KERNELS), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            made[generation] = kernels_in(done.stderr), target
        return made[generation]

    return compile_for


def parameters_of(name: str) -> tuple[str, bool]:
    """Path and whether it hashes, from the mangled name of a kernel."""
    found = re.search(r"WidthILi\dELi\dELb\dEEELi(\d)ELb(\d)E", name)
    assert found is not None, name
    return PATHS[int(found[1])], found[2] == "1"


def kernels_in(report: str) -> list[Kernel]:
    """What `ptxas -v` says."""
    pattern = (
        r"Compiling entry function '(\S+)'.*?\n.*\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\n.*Used (\d+) registers(.*)"
    )
    kernels = []
    for name, stack, stores, loads, registers, rest in re.findall(pattern, report):
        shared = re.search(r"(\d+) bytes smem", rest)
        spilt = int(stores) + int(loads)
        kernels.append(Kernel(*parameters_of(name), int(registers), int(stack), spilt, int(shared[1]) if shared else 0))
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize("glue", GLUES, ids=lambda path: path.stem)
def test_what_the_operator_takes_of_this_torch_is_there(build: ModuleType, tmp_path: Path, glue: Path) -> None:
    """As C++ over a stand-in of CUDA's headers, without making code of it."""
    sources = ["-x", "c++", "-fsyntax-only", "-DUSE_CUDA", f"-I{LAUNCH_MODEL}", str(glue)]
    command = build.cpp_command(TORCH, sources, tmp_path / "none")
    if shutil.which(command[0]) is None:
        pytest.skip("needs a C++ compiler")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.sweep
@pytest.mark.timeout(900)  # nvcc takes ten seconds, on a busy machine many times longer
@pytest.mark.parametrize("glue", GLUES, ids=lambda path: path.stem)
def test_the_operator_compiles_against_the_headers_of_this_torch(
    build: ModuleType, nvcc: Path, tmp_path: Path, glue: Path
) -> None:
    """To an object for one generation: that needs no CUDA build of torch."""
    target = tmp_path / f"{glue.stem}.o"
    command = build.cuda_command(nvcc, TORCH, [str(glue)], target, ["-arch=sm_90"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"hybrid_rl::{glue.stem}".encode() in target.read_bytes()


GENERATIONS = ["sm_90", pytest.param("sm_80", marks=pytest.mark.sweep)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_four_blocks_of_every_kernel_fit_and_nothing_is_spilt(
    compiled: Callable[[str], tuple[list[Kernel], Path]], generation: str
) -> None:
    kernels, _ = compiled(generation)
    assert len(kernels) == NUM_KERNELS
    for kernel in kernels:
        assert kernel.registers <= MOST_REGISTERS, kernel
        assert kernel.stack_bytes == kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= MOST_SHARED_BYTES, kernel


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_machine_code_moves_sixteen_bytes_at_a_time(
    compiled: Callable[[str], tuple[list[Kernel], Path]], generation: str
) -> None:
    """On both sides, on every path but that of single elements; and nothing goes through local memory."""
    disassembler = find_nvdisasm()
    if disassembler is None:
        pytest.skip("no nvdisasm (it comes with CUDA's toolkit and with Triton's wheel)")
    _, cubin = compiled(generation)
    done = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code = {}
    for section in re.split(r"\n\s*\.section\s+\.text\.", done.stdout)[1:]:
        code[parameters_of(section.split(",", 1)[0]) + (section.split(",", 1)[0],)] = section
    assert len(code) == NUM_KERNELS
    for (path, _, name), text in code.items():
        assert not re.search(r"\b(LDL|STL)\b", text), name
        for access in (r"\bLDG\.E(\.\w+)*\.128\b", r"\bSTG\.E(\.\w+)*\.128\b"):
            assert bool(re.search(access, text)) == (path != "scattered"), (name, access)


def find_nvdisasm() -> str | None:
    triton = importlib.util.find_spec("triton")
    folders = [Path(triton.origin).parent] if triton is not None and triton.origin is not None else []
    folders.append(Path(sys.prefix) / "triton" / "triton")  # where the Makefile keeps it apart
    beside = [folder / "backends" / "nvidia" / "bin" / "nvdisasm" for folder in folders]
    return next((str(path) for path in beside if path.exists()), shutil.which("nvdisasm"))


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


# ------------------------------------------------------------------------------------- an installation and its kernels


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Builds a copy of this project beside what looks like a CUDA build of torch and nvcc."""
    (tmp_path / "hybrid_rl").mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    library = tmp_path / "site" / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "site" / "torch" / "__init__.py").touch()

    def run(nvcc: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH", "HYBRID_RL_BUILD_CUDA")
        }
        environment |= {"PYTHONPATH": str(tmp_path / "site"), "CXX": "false", "PATH": "/usr/bin:/bin", **variables}
        if nvcc is not None:
            compiler = tmp_path / "cuda" / "bin" / "nvcc"
            compiler.parent.mkdir(parents=True, exist_ok=True)
            compiler.write_text(f"#!/bin/sh\n{nvcc}\n")
            compiler.chmod(0o755)
            environment["CUDA_HOME"] = str(tmp_path / "cuda")
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def test_an_installation_whose_kernels_do_not_compile_fails_with_the_reason_and_the_way_on(
    project: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    pytest.importorskip("setuptools")
    done = project("echo 'a.cu(321): error: identifier is undefined' >&2; exit 2")
    assert done.returncode != 0
    assert "a.cu(321): error: identifier is undefined" in done.stderr
    assert "set HYBRID_RL_BUILD_CUDA=0 to install without these kernels" in done.stderr
    without = project("exit 2", HYBRID_RL_BUILD_CUDA="0")
    assert without.returncode == 0, without.stderr
    assert "built without the kernels for CUDA (HYBRID_RL_BUILD_CUDA=0)" in without.stderr
    wrong = project("exit 0", HYBRID_RL_BUILD_CUDA="off")
    assert wrong.returncode != 0 and "HYBRID_RL_BUILD_CUDA='off'; set 0" in wrong.stderr


@pytest.mark.parametrize(
    ("nvcc", "variables", "status"),
    [("exit 2", {}, 1), ("exit 2", {"HYBRID_RL_BUILD_CUDA": "0"}, 0), (None, {}, 0)],
    ids=["failing", "switched off", "no nvcc"],
)
def test_an_installation_in_place_leaves_no_library_of_an_earlier_one(
    project: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    nvcc: str | None,
    variables: dict[str, str],
    status: int,
) -> None:
    pytest.importorskip("setuptools")
    if nvcc is None and Path("/usr/bin/nvcc").exists():
        pytest.skip("nvcc is on the system's path")
    for name in ("_native.so", "_native_cuda.so", "_cuda_region.so"):
        (tmp_path / "hybrid_rl" / name).write_bytes(b"of an earlier build")
    assert project(nvcc, **variables).returncode == status
    assert [*tmp_path.glob("hybrid_rl/*.so")] == []


def test_an_installation_survives_what_a_compiler_prints_and_wants_a_file_of_it(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    pytest.importorskip("setuptools")
    bytes_of_latin_1 = project("printf 'a.cu(7): error: f\\374r\\n' >&2; exit 2")
    assert bytes_of_latin_1.returncode == 1 and "Traceback" not in bytes_of_latin_1.stderr
    assert "a.cu(7): error: f" in bytes_of_latin_1.stderr and "HYBRID_RL_BUILD_CUDA=0" in bytes_of_latin_1.stderr
    nothing = project("exit 0", CXX="true")
    assert nothing.returncode == 1
    assert "nvcc ended with exit status 0, but has written no " in nothing.stderr
    assert "extension (true ended with exit status 0, but has written no " in nothing.stderr


def test_an_empty_name_of_a_compiler_is_none(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    expected = build.cpp_command(TORCH, ["a.cpp"], Path("x.so"))
    monkeypatch.setenv("CXX", " ")
    assert build.cpp_command(TORCH, ["a.cpp"], Path("x.so")) == expected
    monkeypatch.setenv("CXX", "ccache g++")
    assert build.cpp_command(TORCH, ["a.cpp"], Path("x.so"))[:2] == ["ccache", "g++"]


def test_without_nvcc_an_installation_goes_on_and_says_so(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    pytest.importorskip("setuptools")
    done = project(None)
    assert done.returncode == 0, done.stderr
    if Path("/usr/bin/nvcc").exists():
        pytest.skip("nvcc is on the system's path")
    assert "built without the kernels for CUDA (no nvcc; set CUDA_HOME)" in done.stderr
