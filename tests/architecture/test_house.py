"""The repository keeps the rules of the house."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from .layers import CORE_CHAIN, CORE_ROOMS, PRIVATE_TEST_FILES, SHARED_FILE_NAMES
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


def test_a_file_name_occurs_once() -> None:
    """Or whoever looks for a file by its name opens another one."""
    names = Counter(path.stem for path in (ROOT / "hybrid_rl").rglob("*.py"))
    assert {name for name, number in names.items() if number > 1} == SHARED_FILE_NAMES


def test_few_test_files_read_private_names() -> None:
    """What tests have to see inside of things stands in tests/support/inside, so that a change there is one of few."""
    files = [
        path for path in (ROOT / "tests").rglob("*.py") if any(map(_is_private, ast.walk(ast.parse(path.read_text()))))
    ]
    assert len(files) <= PRIVATE_TEST_FILES, [str(path.relative_to(ROOT)) for path in sorted(files)]


def _is_private(node: ast.AST) -> bool:
    """Whether a node is an attribute `x._name` of something else than the object itself."""
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
