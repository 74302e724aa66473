"""Runs without their pictures, which take longer to draw than a short run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a program that draws nothing need not import it
    import pytest

DRAWING = ("hybrid_rl.extras.pictures.curves.draw", "hybrid_rl.extras.pictures.memory_picture.draw_memory")


def nothing(*_: Any, **__: Any) -> None:
    """In place of what draws."""


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Have runs draw neither curves nor memory."""
    for name in DRAWING:
        patch.setattr(name, nothing)
