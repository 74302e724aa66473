"""When what was trained is saved by itself, without a run."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.run import rescue
from hybrid_rl.run.position import Position


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rescue, "_watch_script", lambda: None)
    found = SimpleNamespace(saved=0, saved_folder=None, closed="", work=(), is_own=True)
    found.policy, found.display = SimpleNamespace(has_ended=False), SimpleNamespace(message=lambda _: None)
    found.save = lambda: setattr(found, "saved", found.saved + 1)
    return found


def rescue_of(parts: Any, position: Position) -> rescue.Rescue:
    parts.position, parts.log = position, parts
    return rescue.Rescue(parts, parts, parts)


def test_only_what_a_whole_fit_has_trained_is_kept(parts: Any) -> None:
    position = Position(max_steps=9, step=2)
    found = rescue_of(parts, position)
    found.keep()
    assert parts.saved == 0
    found.note_fitted()
    found.keep()
    assert parts.saved == 1
    position.step = 3  # a step by hand
    found.keep()
    assert parts.saved == 1


@pytest.mark.parametrize(
    ("name", "value"), [("closed", ";"), ("work", ["step()"]), ("is_own", False), ("saved_folder", "checkpoint-2")]
)
def test_nothing_is_saved_twice_or_by_another(parts: Any, name: str, value: Any) -> None:
    found = rescue_of(parts, Position(max_steps=9, step=2))
    found.note_fitted()
    setattr(parts, name, value)
    found.keep()
    assert parts.saved == 0


def test_a_full_disk_is_a_warning(parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    def full() -> None:
        raise OSError("full")

    parts.save = full
    found = rescue_of(parts, Position(max_steps=9, step=2))
    found.note_fitted()
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        found.keep()
    assert "step 2 could not be saved: full" in caplog.text
