"""End-to-end tests that take minutes run on request: `-m e2e_full`, or `-m "e2e_full or not e2e_full"` for all."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what was not asked for."""
    if "e2e_full" in str(config.option.markexpr):
        return
    for item in items:
        if item.get_closest_marker("e2e_full"):
            item.add_marker(pytest.mark.skip(reason="a recipe to its end: make e2e"))
