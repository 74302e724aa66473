"""What `hybrid-rl doctor` asks of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rl.cli import doctor
from tests.support.inside.wrapping import Wrapper, wrap

if TYPE_CHECKING:
    import pytest


def no_gpu_line() -> str:
    """What it says of a machine without a GPU that can be used."""
    return doctor._no_gpu()


def machine_facts(folder: Path) -> dict[str, Any]:
    """What it says of this machine. folder: in which runs are to be written."""
    facts: dict[str, Any] = doctor._describe_machine(folder)
    return facts


def wrap_probes(patch: pytest.MonkeyPatch, wrapper: Wrapper) -> None:
    """Have `wrapper(probe_ranks, config)` called where it asks the ranks."""
    wrap(patch, doctor, "_probe_ranks", wrapper)
