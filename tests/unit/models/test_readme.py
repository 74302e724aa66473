"""The README's statements about families, against the table of families that tests run."""

from tests.unit.models.families import FAMILIES, REFUSED, VISION
from tests.unit.models.readme import README, written


def test_the_lists_of_families_are_those_of_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert written(text) == text, "write them again: python -m tests.unit.models.readme"


def test_every_family_is_named_once() -> None:
    titles = [row.title for table in (FAMILIES, VISION, REFUSED) for row in table.values()]
    assert len(set(titles)) == len(titles)
