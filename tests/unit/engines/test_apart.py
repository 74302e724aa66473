"""Imports in a separate thread."""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from hybrid_rl.engines.detached_import import import_apart

NAME = "slow_module_of_a_test"


def test_a_module_that_another_thread_imports_comes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among sys.modules as soon as its code begins to run."""
    events = ModuleType("events_of_a_test")
    begun, goes_on = threading.Event(), threading.Event()
    vars(events).update(begun=begun, goes_on=goes_on)
    monkeypatch.setitem(sys.modules, events.__name__, events)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "from events_of_a_test import begun, goes_on\nbegun.set()\ngoes_on.wait(60)\nVALUE = 7\n"
    (tmp_path / f"{NAME}.py").write_text(code)
    waits_or_is_done = threading.Event()
    own = importlib.import_module

    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name == NAME and begun.is_set():
            waits_or_is_done.set()
        return own(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(import_apart, NAME)
            assert begun.wait(60)
            second = pool.submit(lambda: hasattr(import_apart(NAME), "VALUE"))
            second.add_done_callback(lambda _: waits_or_is_done.set())
            assert waits_or_is_done.wait(60)
            goes_on.set()
            assert first.result().VALUE == 7 and second.result()
    finally:
        goes_on.set()
        sys.modules.pop(NAME, None)
