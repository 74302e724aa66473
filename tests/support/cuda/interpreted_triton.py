"""Triton's interpreter on the CPU, for tests of kernels."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.kills.forked import Forked

FOLDER = Path(sys.prefix) / "triton"  # where the Makefile puts it, apart from what every process imports
needs_triton = pytest.mark.skipif(
    not (FOLDER.is_dir() or find_spec("triton")), reason="needs Triton (make install, on Linux on x86-64)"
)


@contextmanager
def importable() -> Iterator[None]:
    """Let this process import Triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield


def run_cases(forked: Forked, module: str, *arguments: str) -> Any:
    """Run the cases of a module of tests.gpu in a process of their own, and read what they print.

    Whether Triton interprets is decided when it is imported.
    """
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "TRITON_INTERPRET": "1"}
    done = forked.run("-m", f"tests.gpu.{module}", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
