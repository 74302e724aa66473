"""docs/algorithms.md is what the code says, and names everything that can be chosen."""

from __future__ import annotations

import dataclasses
import re

import pytest

from docs.tables import PAGE, written
from hybrid_rl.algos import ADVANTAGES, CORRECTIONS, KL_TERMS, POLICY_LOSSES
from hybrid_rl.config import AlgorithmConfig, ValueHeadConfig
from hybrid_rl.config.algorithm_keys import AdaptiveEntropyConfig
from tests.unit.algos.variants import records

TEXT = PAGE.read_text()
RECORDS = {
    f"{section} {name}": record
    for section, home in (("advantage", ADVANTAGES), ("policy_loss", POLICY_LOSSES), ("correction", CORRECTIONS))
    for name, record in records(home).items()
}
KEYS = {
    item.name
    for section in (*records(KL_TERMS).values(), AlgorithmConfig, AdaptiveEntropyConfig, ValueHeadConfig)
    for item in dataclasses.fields(section)
}
# Without a paper: the log-likelihood itself, no correction at all, and what is verl's.
WITHOUT_SOURCE = {"advantage sft", "correction none", "correction kl_rejection"}


def test_the_page_is_what_the_code_says() -> None:
    assert written(TEXT) == TEXT, "docs/algorithms.md is not what the code says; run python docs/tables.py"


def test_a_part_without_its_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="must have <!-- policy losses --> and <!-- end of policy losses --> once"):
        written(TEXT.replace("<!-- end of policy losses -->", ""))


@pytest.mark.parametrize("choice", RECORDS)
def test_every_record_names_its_source(choice: str) -> None:
    named = re.search(r"arXiv:\d{4}\.\d{5}|(?:19|20)\d\d\b", RECORDS[choice].__doc__ or "")
    assert bool(named) != (choice in WITHOUT_SOURCE)


def test_every_kl_term_has_a_row() -> None:
    part = TEXT.split("\n## KL\n", 1)[1].split("\n## ", 1)[0]
    assert all(f"\n| `{name}` " in part for name in records(KL_TERMS))


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_is_named(key: str) -> None:
    presets = TEXT.split("<!-- presets -->", 1)[1].split("<!-- end of presets -->", 1)[0]
    assert re.search(rf"`([a-z_]+\.)?{key}[`=]", TEXT.replace(presets, ""))
