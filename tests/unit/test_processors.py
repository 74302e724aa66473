"""Numbers on processors with fewer instructions than this one, where libraries add up in another order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.kills.forked import Forked

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Asserts that the level is taken, since an unknown value would be ignored in silence; then the tests, with a library.
RUN = """
import sys, pytest, torch
from pathlib import Path
from hybrid_rl.compat import native
level, library, *arguments = sys.argv[1:]
assert torch.backends.cpu.get_cpu_capability() == level, torch.backends.cpu.get_cpu_capability()
if library:
    native._LIBRARY_PATH = Path(library)
    assert native.is_available()
sys.exit(pytest.main(arguments))
"""


@dataclass(frozen=True)
class Level:
    """A kind of processor. capability: PyTorch's name for it; variables: what makes libraries stay below it; march:
    the compiler's name."""

    capability: str
    variables: dict[str, str]
    march: str


LEVELS = {
    "avx2": Level("AVX2", {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2"}, "x86-64-v3"),
    "default": Level("DEFAULT", {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41"}, "x86-64"),
}
# Long sums against numbers worked out otherwise: a few seconds.
SENSITIVE = ("engines/test_sampling.py", "models/heads/test_logprobs.py")
LONG = "every_token or large_vocabulary or first_of_several or logprobs.py"
NUMERICAL = ("algos", "models", "rollout", "workers")
COMPILED = ("engines/test_sampling.py", "engines/inplace/test_paged_attention.py", "models/attention/test_compiled.py")
COMPILED += ("resharding/test_execute.py", "resharding/test_merged.py", "test_native.py")


def run(forked: Forked, level: str, folder: Path, *arguments: str, library: str = "") -> None:
    """pytest in a process of its own, whose libraries think that the processor has no more than this level: they look
    when they compute for the first time.

    folder: for what is compiled. PyTorch's cache of compiled graphs does not know for which instructions one is: code
    for AVX2 that is found later, and built for AVX-512, writes past the end of its buffers.
    """
    chosen = LEVELS[level]
    environment = {**os.environ, **chosen.variables, "PYTHONPATH": str(ROOT)}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    command = ["-c", RUN, chosen.capability, library, "-q", "-x", "-p", "no:cacheprovider", *arguments]
    done = forked.run(*command, environment=environment, limit_seconds=3600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def paths(names: tuple[str, ...]) -> list[str]:
    found = [HERE / name for name in names]
    assert all(path.exists() for path in found)
    return [str(path) for path in found]


@pytest.mark.parametrize("level", [pytest.param("avx2", marks=pytest.mark.sweep), "default"])
def test_long_sums_are_right(forked: Forked, level: str, tmp_path: Path) -> None:
    run(forked, level, tmp_path, *paths(SENSITIVE), "-k", LONG)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", LEVELS)
def test_whatever_computes_is_right(forked: Forked, level: str, tmp_path: Path) -> None:
    # Triton's interpreter computes with NumPy.
    run(forked, level, tmp_path, *paths(NUMERICAL), "-m", "not sweep", "--ignore-glob=*/test_triton_*.py")


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("level", LEVELS)
def test_the_extension_as_an_older_processor_runs_it(forked: Forked, level: str, tmp_path: Path) -> None:
    """Its functions exist once per instruction set and the loader picks: here each set is built by itself."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    march = LEVELS[level].march
    environment = {**os.environ, "CXX": f"g++ -march={march} -DHYBRID_RL_TARGETS="}
    build = [sys.executable, "setup.py", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}/temporary"]
    subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, check=True)
    library = tmp_path / "hybrid_rl" / "_native.so"
    run(forked, level, tmp_path, *paths(COMPILED), library=str(library))
