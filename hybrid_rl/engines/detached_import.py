"""Imports that keep no reference to their caller."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

from hybrid_rl.controller import enter_device


def import_apart(name: str) -> ModuleType:
    """Import a module in a separate thread. Modules of vLLM keep errors of imports that they can do without, and an
    error keeps the frames below it: were a Trainer among them, it would never be collected, nor its engine closed."""
    if name in sys.modules:
        return importlib.import_module(name)  # which waits for another thread that is importing it

    def run() -> ModuleType:
        enter_device()
        return importlib.import_module(name)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
