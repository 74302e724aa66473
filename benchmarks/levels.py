"""Comparisons on a processor with fewer instructions: both sides run as if on one.

Libraries read the variables of a level when they are loaded, so `enter` restarts the script with them. The compiled
extension holds one copy of its functions per level, of which the loader takes the processor's best; for a lower level
it is built for that level only, into build/.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}}
MARCH = {"avx2": "x86-64-v3"}
ENTERED = "HYBRID_RL_BENCHMARK_LEVEL"


def add_argument(parser: ArgumentParser) -> None:
    """The argument that names a level."""
    parser.add_argument("--cpu-level", choices=sorted(LEVELS), help="run both sides as on such a processor (needs g++)")


def enter(level: str | None) -> None:
    """Restart the script with the variables of this level; returns if they are already set, or no level is given."""
    if level is None or os.environ.get(ENTERED) == level:
        return
    variables = {**LEVELS[level], ENTERED: level, "HYBRID_RL_NATIVE_FOLDER": str(library_folder(level))}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})


def library_folder(level: str) -> Path:
    """Build the extension for this level only, and return its folder."""
    made = ROOT / "build" / level
    build = ["setup.py", "-q", "build_ext", f"--build-lib={made}", f"--build-temp={made / 'temporary'}"]
    environment = {**os.environ, "CXX": f"g++ -march={MARCH[level]} -DHYBRID_RL_TARGETS="}
    subprocess.run([sys.executable, *build], cwd=ROOT, env=environment, stdout=sys.stderr, check=True)
    return made / "hybrid_rl"
