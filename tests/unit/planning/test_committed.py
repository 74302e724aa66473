"""The plans of docs/plans are what the code says today."""

from __future__ import annotations

import pytest

from docs import plans

pytestmark = pytest.mark.slow


def test_the_fastest_plan_is_fresh() -> None:
    """If it is not, `python docs/plans.py` writes all of them again."""
    case = plans.CASES[0]
    assert (plans.FOLDER / f"{case.name}.md").read_text() == plans.page(case, case.plan())


def test_every_plan_is_there_and_listed() -> None:
    pages = {path.stem for path in plans.FOLDER.glob("*.md")} - {"README"}
    assert pages == {case.name for case in plans.CASES}
    texts = {name: (plans.FOLDER / f"{name}.md").read_text() for name in pages}
    listed = plans.index({name: plans.verdict(text) for name, text in texts.items()})
    assert (plans.FOLDER / "README.md").read_text() == listed
    for case in plans.CASES:
        assert case.command in texts[case.name]
