"""Runs without their pictures, which take longer to draw than a short run."""

import pytest


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Have runs draw neither curves nor memory."""
    patch.setattr("hybrid_rl.extras.pictures.curves.draw", lambda *_: None)
    patch.setattr("hybrid_rl.extras.pictures.memory_picture.draw_memory", lambda *_, **__: None)
