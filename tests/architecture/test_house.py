"""The repository keeps the rules of the house."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .layers import CORE_CHAIN, CORE_ROOMS
from .rules import RULES, core_rooms

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps_rule(rule: Callable[[Path], list[str]]) -> None:
    findings = rule(ROOT)
    assert not findings, "\n".join([rule.__doc__ or "", *findings])


def test_the_core_has_no_more_rooms_than_it_needs() -> None:
    assert core_rooms(ROOT) == (CORE_ROOMS, CORE_CHAIN)


def test_every_slow_test_is_there() -> None:
    """Under another name it would be taken for quick, and `make check` would run it."""
    gone = []
    for name in (ROOT / "tests" / "slow_tests.txt").read_text().split():
        path, _, function = name.partition("::")
        if not (ROOT / path).is_file() or f"\ndef {function}(" not in (ROOT / path).read_text():
            gone.append(name)
    assert not gone, f"no such tests; give slow_tests.txt their new names, or run make durations: {gone}"
