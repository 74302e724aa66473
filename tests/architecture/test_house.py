"""The repository keeps the rules of the house."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .rules import RULES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps_rule(rule: Callable[[Path], list[str]]) -> None:
    findings = rule(ROOT)
    assert not findings, "\n".join([rule.__doc__ or "", *findings])
