"""Heartbeat of this process: when its work last made progress."""

from __future__ import annotations

import time

_last_progress = time.monotonic()


def mark_progress() -> None:
    """Record that the work of this process makes progress. Called at engine steps and micro-batches."""
    global _last_progress
    _last_progress = time.monotonic()


def seconds_since_progress() -> float:
    """Seconds since the work of this process last made progress."""
    return time.monotonic() - _last_progress
