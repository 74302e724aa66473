"""The registry of algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybrid_rl.algos import interface


@contextmanager
def registrations_forgotten() -> Iterator[None]:
    """Take back afterwards what is registered in the block."""
    homes = interface._registered
    before = {tag: dict(home) for tag, home in homes.items()}
    try:
        yield
    finally:
        for tag, home in homes.items():
            home.clear()
            home.update(before[tag])
