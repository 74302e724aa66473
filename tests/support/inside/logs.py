"""What a display and a file of lines keep to themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_rl.logging.progress_display import ProgressDisplay
    from hybrid_rl.logging.run_folder import JsonLines


def num_waiting(file: JsonLines) -> int:
    """Lines that could not be written yet."""
    return len(file._pending)


def refresh(display: ProgressDisplay) -> None:
    """Draw the live lines now."""
    screen: Any = display._screen
    screen._live.refresh()


def begin_at(display: ProgressDisplay, seconds: float) -> None:
    """Begin to count time, without drawing anything."""
    display._begun = seconds
    display._moments.append(seconds)


def seconds_left(display: ProgressDisplay) -> float | None:
    """What the live lines say of the time that is left."""
    return display._seconds_left()
