"""A plugin of pytest: a test or a file that is skipped has failed, with its reason.

`make outside` installs what its tests need, so a skipped one says that an installation or a name is broken.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Make a failure of a skip."""
    report = yield
    if report.skipped:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{item.nodeid} must run here, and was skipped: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Make a failure of a file that is skipped as a whole."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = (
            "failed",
            f"{collector.nodeid} must run here, and was skipped: {report.longrepr}",
        )
    return report
