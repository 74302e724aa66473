"""install.py: where packages come from, and what is said while they come."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["install"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def configured(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let pip say that it is configured like this."""
    for name in ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    ended = subprocess.CompletedProcess([], 0, stdout=text)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)


def test_uv_looks_where_pip_is_configured_to_look(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "global.find-links='/a /b'",
        "global.index-url='https://one'",
        ":env:.index-url='https://two'",
        "x.cert='c'",
    ]
    configured(monkeypatch, "\n".join(lines))
    assert program.pip_sources(Path("python")) == [
        *("--find-links", "/a", "--find-links", "/b", "--default-index", "https://two"),
        *("--index-strategy", "unsafe-best-match"),
    ]
    configured(monkeypatch, "")
    assert program.pip_sources(Path("python")) == []
    configured(monkeypatch, lines[0])
    monkeypatch.setenv("UV_INDEX_URL", "https://own")
    assert program.pip_sources(Path("python")) == []


@pytest.mark.parametrize(
    ("torch", "pip", "has_gpu", "is_reached", "expected"),
    [
        ("auto", "", False, True, True),
        ("auto", "", True, True, False),  # the build for GPUs
        ("auto", "", False, False, False),  # said, and PyPI's is taken
        ("auto", "global.index-url='https://mine'", False, True, False),  # the user's index knows best
        ("cpu", "global.index-url='https://mine'", True, False, True),
        ("default", "", False, True, False),
    ],
)
def test_torch_is_the_cpu_build_where_nothing_speaks_for_another(
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    torch: str,
    pip: str,
    has_gpu: bool,
    is_reached: bool,
    expected: bool,
) -> None:
    configured(monkeypatch, pip)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(program, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(program, "is_reached", lambda index: is_reached)
    for uv, option in ((None, program.CPU_INDEX), ("uv", "--torch-backend")):
        place = program.with_sources(program.Place(Path("venv"), uv), torch)
        assert (option in place.chosen) == expected


def test_what_is_said_while_packages_come(program: ModuleType) -> None:
    assert program.news("  Downloading torch-2.13.0.whl (190 MB)\n") == "Downloading torch-2.13.0.whl (190 MB)"
    assert program.news("Installing collected packages: a, b, c\n") == "unpacking 3 packages"
    assert program.news("WARNING: Location x is ignored\n") == program.news("\n") == ""


def test_an_installer_that_fails_is_heard(program: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    with pytest.raises(program.Failed, match=r"no such package\n.*ended with status 3 \(log: "):
        program.run_shown("numpy", command, tmp_path / "log")
    assert not program.run_shown("numpy", command, tmp_path / "log", must=False)
    assert (tmp_path / "log").read_text().count("no such package") == 4  # twice in the command, twice said
