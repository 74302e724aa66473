"""Builds csrc/ as an optional shared library; everything else is in pyproject.toml.

The library stands on LibTorch's stable ABI and is loaded with `torch.ops.load_library`: it needs torch's headers and a
C++ compiler, not Python's. Where one of them is missing the installation goes on without it (see hybrid_rl/native.py).
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
from setuptools.command.build_ext import build_ext

LIBRARY = "hybrid_rl._native"
SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h*"))
# The oldest torch whose stable ABI is used: a library built against a newer torch still loads there.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"


class BuildNative(build_ext):
    """Compiles the sources with one compiler call into `_native.so`, without Python's name tag."""

    def get_ext_filename(self, fullname: str) -> str:
        """Path of the library inside the package; one name for every Python version."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Builds, or says in one line why not; never an error."""
        target = Path(self.get_ext_fullpath(ext.name))
        # A library of an earlier build must not outlive a failing one.
        target.unlink(missing_ok=True)
        problem = _compile(ext.sources, target)
        if problem:
            print(f"hybrid_rl: built without the compiled extension ({problem}); PyTorch stands in", file=sys.stderr)


def _compile(sources: list[str], target: Path) -> str | None:
    """Compiles `sources` to `target`; returns what stood in the way, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not visible to the build; install it first and use --no-build-isolation"
    compiler = shlex.split(os.environ["CXX"]) if "CXX" in os.environ else _default_compiler()
    if not compiler or shutil.which(compiler[0]) is None:
        return f"no C++ compiler: {shlex.join(compiler) or 'c++, g++ and clang++'} not found; set CXX"
    torch_root = Path(spec.origin).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *compiler,
        *("-O3", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", STABLE_ABI, f"-I{torch_root / 'include'}"),
        *sources,
        *("-o", str(target), f"-L{torch_root / 'lib'}", "-ltorch_cpu"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    target.unlink(missing_ok=True)
    errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()[-1:]
    return f"{compiler[0]} failed: {errors[0].strip() if errors else f'exit status {result.returncode}'}"


def _default_compiler() -> list[str]:
    return [name for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]


setup(
    ext_modules=[Extension(LIBRARY, sources=SOURCES, depends=HEADERS, optional=True)],
    cmdclass={"build_ext": BuildNative},
)
