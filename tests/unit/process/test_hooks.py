"""The core reaches extras by hooks, and users by their former names, without a second copy of any module."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hybrid_rl.process.hooks import FORMER_NAMES, HOOKS, extra


@pytest.mark.parametrize("hook", HOOKS)
def test_an_extra_has_what_a_hook_names(hook: str) -> None:
    assert callable(extra(hook))


@pytest.mark.parametrize("name", [*FORMER_NAMES, "hybrid_rl.report.runs", "hybrid_rl.agents.adapters.gym"])
def test_a_former_name_is_that_of_the_same_module(name: str) -> None:
    former = next(former for former in FORMER_NAMES if f"{name}.".startswith(f"{former}."))
    today = f"hybrid_rl.extras.{FORMER_NAMES[former]}{name.removeprefix(former)}"
    assert importlib.import_module(name) is importlib.import_module(today)
    assert importlib.import_module(name).__spec__.name == today  # type: ignore[union-attr]


def test_what_never_was_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="hybrid_rl.reports"):
        importlib.import_module("hybrid_rl.reports")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module("hybrid_rl.report.nowhere")


def test_the_core_starts_without_its_extras() -> None:
    code = "import sys, hybrid_rl.run.trainer; print([n for n in sys.modules if n.startswith('hybrid_rl.extras')])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
