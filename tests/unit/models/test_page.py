"""The statements of docs/models.md about families, against the table of families that tests run."""

from tests.unit.models.families import FAMILIES, REFUSED, VISION
from tests.unit.models.page import PAGE, written


def test_the_lists_of_families_are_those_of_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "write them again: python -m tests.unit.models.page"


def test_every_family_is_named_once() -> None:
    titles = [row.title for table in (FAMILIES, VISION, REFUSED) for row in table.values()]
    assert len(set(titles)) == len(titles)
