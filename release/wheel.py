"""Checks a wheel before it is published: `python release/wheel.py dist/hybrid_rl-*.whl`; exit status 1 if one is wrong.

With --retag the wheel is first renamed to the manylinux tag that auditwheel finds: the oldest system whose C and C++
libraries have all that its libraries need. LibTorch is what they need besides; it comes with PyTorch and is left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = frozenset({"hybrid_rl/_native.so", "hybrid_rl/_cuda_region.so"})
CUDA_LIBRARY = "hybrid_rl/_native_cuda.so"  # only if the build had nvcc and PyTorch's build for CUDA
DATA = (
    *("py.typed", "config/*.yaml", "logging/*.yaml"),
    *("extras/names/*.yaml", "extras/quickstart/*.yaml", "extras/report/page/*"),
)
TAG = re.compile(r"py3-none-(manylinux_\d+_\d+|linux)_x86_64")


def main() -> int:
    """Check the wheels that are named; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--retag", action="store_true", help="rename each to its manylinux tag (needs auditwheel)")
    asked = parser.parse_args()
    found = []
    for wheel in asked.wheels:
        path = retag(wheel) if asked.retag else wheel
        print(path)
        found += [f"{path.name}: {problem}" for problem in problems(path)]
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


def expected_files() -> frozenset[str]:
    """Return what must be in the wheel beside its metadata, by its path there."""
    package = ROOT / "hybrid_rl"
    paths = [path for pattern in ("*.py", *DATA) for path in package.rglob(pattern) if "__pycache__" not in path.parts]
    return LIBRARIES | {path.relative_to(ROOT).as_posix() for path in paths}


def problems(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel: tag, files, version, extras; empty if it can be published."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        names = frozenset(archive.namelist())
        metadata_names = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(metadata_names[0]).decode())
    inside = frozenset(name for name in names if ".dist-info/" not in name)
    expected = expected_files()
    found = [f"{name} is missing" for name in sorted(expected - inside)]
    found += [f"{name} does not belong there" for name in sorted(inside - expected - {CUDA_LIBRARY})]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        found.append("the licence is missing")
    tag = "-".join(wheel.stem.split("-")[-3:])
    if TAG.fullmatch(tag) is None:
        found.append(f"its tag is {tag}, not py3-none-manylinux_…_x86_64: pip would take it elsewhere, or not here")
    if metadata["Version"] != project["version"]:
        found.append(f"its version is {metadata['Version']}, that of pyproject.toml {project['version']}")
    extras, declared = set(metadata.get_all("Provides-Extra", [])), set(project["optional-dependencies"])
    if extras != declared:
        found.append(f"its extras are not those of pyproject.toml: {', '.join(sorted(extras ^ declared))}")
    return found


def retag(wheel: Path) -> Path:
    """Rename a wheel to its manylinux tag; returns its new path. Raises SystemExit if there is no such tag."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    tag = manylinux_tag(shown.stdout)
    if shown.returncode or tag is None:
        raise SystemExit(f"{wheel}: auditwheel finds no manylinux tag for it\n{shown.stdout}{shown.stderr}")
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(wheel)]
    renamed = subprocess.run(command, capture_output=True, text=True, check=False)
    if renamed.returncode:
        raise SystemExit(f"{wheel}: wheel tags --platform-tag {tag} failed\n{renamed.stdout}{renamed.stderr}")
    return wheel.with_name(renamed.stdout.split()[-1])


def manylinux_tag(report: str) -> str | None:
    """Return the tag that the symbols of a wheel allow, out of what `auditwheel show` says; None if none."""
    words = " ".join(report.split())
    # The first tag of the report counts every library that the system does not have, LibTorch too.
    match = re.search(r'constrains the platform tag to "(manylinux_\d+_\d+_x86_64)"', words)
    return match[1] if match else None


if __name__ == "__main__":
    sys.exit(main())
