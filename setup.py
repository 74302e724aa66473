"""Builds csrc/ as optional shared libraries; everything else is in pyproject.toml.

The operators stand on LibTorch's stable ABI and are loaded with `torch.ops.load_library`: they need torch's headers and
a C++ compiler, not Python's; the kernels for CUDA need a CUDA build of torch and nvcc as well. Regions of GPU memory
(csrc/cuda_region.cpp) need a C++ compiler alone. If something is missing, the installation goes on without and says so
(see hybrid_rl/compat/native.py). If all is there for CUDA and its kernels do not compile, the installation fails;
HYBRID_RL_BUILD_CUDA=0 leaves them out. HYBRID_RL_BUILD_NATIVE=0 compiles nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY, CUDA_LIBRARY, REGION_LIBRARY = "hybrid_rl._native", "hybrid_rl._native_cuda", "hybrid_rl._cuda_region"
REGION_SOURCES = [str(Path("csrc") / "cuda_region.cpp")]
SOURCES = sorted({str(path) for path in Path("csrc").glob("*.cpp")} - {*REGION_SOURCES})
CUDA_SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cu"))
HEADERS = sorted(str(path) for pattern in ("*.h", "*.cuh") for path in Path("csrc").glob(pattern))
SWITCH = "HYBRID_RL_BUILD_CUDA"
NOTHING = os.environ.get("HYBRID_RL_BUILD_NATIVE") == "0"
# The oldest torch whose stable ABI is used: a library built against a newer torch still loads there.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
# Where no GPU says what it is: code for two generations, and what a driver can make code of for later ones.
ARCHITECTURES = [
    *("-gencode", "arch=compute_80,code=[sm_80,compute_80]"),
    *("-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
]


class BuildNative(build_ext):
    """Compiles each library with one compiler call into `<name>.so`, without Python's name tag."""

    def get_ext_filename(self, fullname: str) -> str:
        """Path of the library inside the package; one name for every Python version."""
        return str(Path(*fullname.split("."))) + ".so"

    def run(self) -> None:
        """Builds all libraries. Those of an earlier build must not outlive one that makes none."""
        # With --inplace this is their place in the package. While setuptools builds it is one below build/, from where
        # it copies what was made.
        for ext in self.extensions:
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Builds, or says in one line why not. Raises SystemExit if the kernels for CUDA do not compile."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.unlink(missing_ok=True)
        if ext.name == REGION_LIBRARY:
            if problem := _build(region_command(ext.sources, target), target):
                print(
                    f"hybrid_rl: built without memory that keeps its address on GPUs ({_first_error(problem)}); the "
                    f"in-place engine cannot run there",
                    file=sys.stderr,
                )
            return
        spec = importlib.util.find_spec("torch")
        if ext.name == LIBRARY:
            if spec is None or spec.origin is None:
                problem = "torch is not visible to the build; use --no-build-isolation"
            else:
                problem = _build(cpp_command(Path(spec.origin).parent, ext.sources, target), target)
                problem = _first_error(problem) if problem else None
            if problem:
                print(
                    f"hybrid_rl: built without the compiled extension ({problem}); PyTorch stands in", file=sys.stderr
                )
        elif spec is not None and spec.origin is not None:
            self.build_cuda(Path(spec.origin).parent, ext.sources, target)

    def build_cuda(self, torch_root: Path, sources: list[str], target: Path) -> None:
        """Builds the kernels for CUDA for a CUDA build of torch."""
        switch = os.environ.get(SWITCH, "1")
        if switch not in ("0", "1"):
            raise SystemExit(f"{SWITCH}={switch!r}; set 0 (no kernels for CUDA) or 1 (those that nvcc can build)")
        nvcc = find_nvcc(torch_root)
        if not (torch_root / "lib" / "libtorch_cuda.so").exists():
            return
        if switch == "0" or nvcc is None:
            reason = f"{SWITCH}=0" if switch == "0" else "no nvcc; set CUDA_HOME"
            print(f"hybrid_rl: built without the kernels for CUDA ({reason}); PyTorch stands in", file=sys.stderr)
            return
        problem = _build(cuda_command(nvcc, torch_root, sources, target), target)
        if problem:
            raise SystemExit(  # setuptools forgives an optional extension every other error
                f"hybrid_rl: {nvcc} cannot compile the kernels for CUDA against the torch in {torch_root}. Name a "
                f"toolkit of torch's CUDA version in CUDA_HOME, or set {SWITCH}=0 to install without these kernels "
                f"(PyTorch's slower forms stand in then).\n{problem}"
            )


class TagWheel(bdist_wheel):
    """Names a wheel by what its libraries need: a platform, but no version of Python. None of them links to Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return tags of Python, of its ABI, and of the platform."""
        platform = super().get_tag()[2]
        return "py3", "none", platform


def cpp_command(torch_root: Path, sources: list[str], target: Path) -> list[str]:
    """The call that makes `target` of C++ sources; its first word is missing where there is no compiler."""
    return [
        *_compiler(),
        *("-O3", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", STABLE_ABI, f"-I{torch_root / 'include'}"),
        *sources,
        *("-o", str(target), f"-L{torch_root / 'lib'}", "-ltorch_cpu"),
    ]


def region_command(sources: list[str], target: Path) -> list[str]:
    """The call that makes `target` of sources that take nothing but the C++ library."""
    flags = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden")
    return [*_compiler(), *flags, *sources, "-o", str(target), "-ldl"]


def _compiler() -> list[str]:
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]
    return shlex.split(os.environ.get("CXX", "")) or found or ["c++"]


def cuda_command(
    nvcc: Path, torch_root: Path, sources: list[str], target: Path, architectures: list[str] | None = None
) -> list[str]:
    """The call that makes `target` of CUDA sources: an object where it is called .o, else a library.

    architectures: options of nvcc; None: the GPU that is here, or ARCHITECTURES where there is none.
    """
    if architectures is None:
        architectures = ["-arch=native"] if _has_gpu() else ARCHITECTURES
    is_object = target.suffix == ".o"
    link = ["-shared", f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-ltorch_cuda"]
    return [
        *(str(nvcc), "-O3", "-std=c++20", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-DUSE_CUDA", STABLE_ABI),
        *([] if is_object else ["--threads", "0"]),
        *architectures,
        *(f"-I{torch_root / 'include'}", f"-L{nvcc.parents[1] / 'lib'}"),  # pip's nvcc has no lib64
        *(["-c"] if is_object else link),
        *sources,
        *("-o", str(target)),
    ]


def find_nvcc(torch_root: Path) -> Path | None:
    """nvcc of CUDA_HOME, of the path, or of pip's packages beside torch."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    candidates += [Path(on_path).resolve()] if on_path else []
    candidates += sorted(torch_root.parent.glob("nvidia/*/bin/nvcc"))
    return next((path for path in candidates if path.exists()), None)


def _has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and "GPU" in subprocess.run([smi, "-L"], capture_output=True, text=True, check=False).stdout


def _build(command: list[str], target: Path) -> str | None:
    """Runs a compiler; returns what stood in the way, or None."""
    if shutil.which(command[0]) is None:
        return f"no compiler: {command[0]} not found; set CXX"
    target.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    name = Path(command[0]).name
    if result.returncode == 0:
        return None if target.exists() else f"{name} ended with exit status 0, but has written no {target}"
    target.unlink(missing_ok=True)
    said = (result.stderr.strip() or result.stdout.strip())[-4000:]
    return f"{name} failed with exit status {result.returncode}:\n{said}"


def _first_error(problem: str) -> str:
    head, *lines = problem.splitlines()
    return " ".join([head, *[line.strip() for line in lines if "error" in line][:1]])


if __name__ == "__main__":
    setup(
        ext_modules=[]
        if NOTHING
        else [
            Extension(LIBRARY, sources=SOURCES, depends=HEADERS, optional=True),
            Extension(CUDA_LIBRARY, sources=CUDA_SOURCES, depends=HEADERS, optional=True),
            Extension(REGION_LIBRARY, sources=REGION_SOURCES, depends=HEADERS, optional=True),
        ],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": TagWheel},
    )
