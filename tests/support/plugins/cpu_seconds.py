"""A plugin of pytest: the CPU seconds of every test, its processes included, for the budget of `make test`.

`-p tests.support.plugins.cpu_seconds --cpu-seconds FILE` adds a line per test to FILE: its seconds, and its name. What
a fixture of a file or session costs is counted at the test that first asks for it. `python -m
tests.support.plugins.cpu_seconds FILE` prints the test functions that are slow by that file: `make durations` writes
them into `tests/slow_tests.txt`.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# A function is slow if all of its cases together take as long: those that take less are `make check`, in 60 s.
SLOW_SECONDS = 0.12


def cpu_seconds() -> float:
    """User seconds of this process, of its descendants, and of those that one of them has waited for."""
    own = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own + sum(map(_seconds_below, _children(os.getpid())))


def slow_functions(lines: list[str]) -> list[str]:
    """Names of the test functions that take SLOW_SECONDS or more, sorted. lines: what the plugin wrote."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        number, name = line.split(" ", 1)
        seconds[name.partition("[")[0]] += float(number)
    return sorted(name for name, spent in seconds.items() if spent >= SLOW_SECONDS)


def _seconds_below(pid: int) -> float:
    try:
        # After the command's name, which may hold spaces: utime is field 14 of the whole line, cutime field 16.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended since; whoever waits for it has its seconds
        return 0.0
    return (int(fields[11]) + int(fields[13])) / TICKS_PER_SECOND + sum(map(_seconds_below, _children(pid)))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue
    return found


class Seconds:
    """Writes a line as each test ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around set-up, call and end of one test."""
        before = cpu_seconds()
        result = yield
        with self._path.open("a") as file:  # one short write, so that lines of two processes stay apart
            file.write(f"{cpu_seconds() - before:.3f} {item.nodeid}\n")
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """--cpu-seconds FILE."""
    parser.addoption("--cpu-seconds", type=Path, help="add the CPU seconds of every test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """In every process of pytest-xdist: each knows what its own tests cost."""
    path = config.getoption("--cpu-seconds")
    if path is not None:
        config.pluginmanager.register(Seconds(path))


if __name__ == "__main__":
    print(*slow_functions(Path(sys.argv[1]).read_text().splitlines()), sep="\n")
