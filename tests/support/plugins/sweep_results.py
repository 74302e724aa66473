"""A plugin of pytest: a table of the tests that ran, a line per function, for benchmarks/results (`make sweep`).

`-p tests.support.plugins.sweep_results --sweep-results FILE` adds to FILE. Numbers that tests gave to
`record_property` are summed up, and so are the examples that Hypothesis may draw; seconds are those of the clock, added
up over processes.
"""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

LIBRARIES = ("torch", "transformers", "hypothesis")


@dataclass
class Line:
    """What came of the cases of one test function."""

    outcomes: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class Results:
    """Lines by test function, in the order in which they first reported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, Line] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of set-up, call and end each; a case is counted at its call, or where it failed or was skipped before."""
        line = self._lines.setdefault(report.nodeid.partition("[")[0], Line())
        line.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            line.outcomes[report.outcome] += 1
        if report.when == "call":
            line.numbers.update({name: value for name, value in report.user_properties if isinstance(value, int)})

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        if not self._lines:
            return
        machine = [platform.machine(), torch.backends.cpu.get_cpu_capability(), f"Python {platform.python_version()}"]
        total = sum((line.outcomes for line in self._lines.values()), Counter[str]())
        lines = [
            ", ".join(machine + [f"{name} {version(name)}" for name in LIBRARIES]) + ": ",
            ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(total.items())) + ".",
            "",
            "| test | passed | failed | skipped | seconds | counted |",
            "|---|---|---|---|---|---|",
            *(self._row(name, line) for name, line in sorted(self._lines.items())),
        ]
        with self._path.open("a") as file:
            file.write("\n".join(lines) + "\n\n")

    def _row(self, name: str, line: Line) -> str:
        counts = " | ".join(str(line.outcomes[outcome]) for outcome in ("passed", "failed", "skipped"))
        counted = ", ".join(f"{number:,} {what}" for what, number in sorted(line.numbers.items()))
        return f"| {name.removeprefix('tests/')} | {counts} | {line.seconds:.0f} | {counted} |"


def pytest_addoption(parser: pytest.Parser) -> None:
    """--sweep-results FILE."""
    parser.addoption("--sweep-results", type=Path, help="add a table of what ran to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Processes of pytest-xdist report to the one that started them, which alone writes."""
    path = config.getoption("--sweep-results")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(path))


def pytest_runtest_setup(item: Any) -> None:
    """Note how many examples Hypothesis may draw."""
    settings = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
    if settings is not None:
        item.user_properties.append(("examples", settings.max_examples))
