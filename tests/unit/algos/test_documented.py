"""docs/algorithms.md names everything that can be chosen, and says what presets really set."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hybrid_rl.algos.interface import ADVANTAGES, CORRECTIONS, KL_TERMS, POLICY_LOSSES
from hybrid_rl.config import AlgorithmConfig, ValueHeadConfig
from hybrid_rl.config.algorithm_keys import AdaptiveEntropyConfig
from hybrid_rl.config.presets import PRESETS

TEXT = Path(__file__).parents[3].joinpath("docs/algorithms.md").read_text()
PRESET_ROWS = [line for line in TEXT.split("## Presets", 1)[1].splitlines() if line.startswith("| `")][: len(PRESETS)]
REST = "\n".join(line for line in TEXT.splitlines() if line not in PRESET_ROWS)
# Records that other tests register in this process are not ours to document.
RECORDS = {
    f"{section} {name}": record
    for section, records in (
        ("advantage", ADVANTAGES),
        ("policy_loss", POLICY_LOSSES),
        ("kl", KL_TERMS),
        ("correction", CORRECTIONS),
    )
    for name, record in records.items()
    if record.__module__.startswith("hybrid_rl.")
}
KEYS = {
    item.name
    for section in (*RECORDS.values(), AlgorithmConfig, AdaptiveEntropyConfig, ValueHeadConfig)
    for item in dataclasses.fields(section)
}


@pytest.mark.parametrize("choice", RECORDS)
def test_every_record_has_a_row(choice: str) -> None:
    section, name = choice.split()
    heading = {
        "advantage": "## Advantage estimators",
        "policy_loss": "## Policy losses",
        "kl": "## KL",
        "correction": "## Corrections",
    }
    part = TEXT.split(heading[section] + "\n", 1)[1].split("\n## ", 1)[0]
    assert f"\n| `{name}` " in part


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_is_named(key: str) -> None:
    assert re.search(rf"`([a-z_]+\.)?{key}[`=]", REST)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_what_they_set(name: str) -> None:
    preset = PRESETS[name]
    row = next(line for line in PRESET_ROWS if line.startswith(f"| `{name}` | {preset.title} ({preset.source}) |"))
    leaves = [f"`{path.split('.')[-1]}={value}`" for path, value in preset.settings.items()]
    assert row.split("|")[-2].strip() == (", ".join(leaves) or "nothing: these are the defaults")
