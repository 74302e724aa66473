"""What is refused, with the reason, and its neighbours, which are not: the table is test_refusals.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.config.hardware import NO_GPU, Hardware
from hybrid_rl.errors import ConfigError

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
MACHINES = {
    "none": NO_GPU,
    "no CUDA": Hardware(missing="torch 2.11 is built without CUDA"),
    "node": Hardware(8, "H100"),
    "box": Hardware(1, "L4"),
    "old": Hardware(2, "Tesla T4", has_bfloat16=False),
}


def resolved(machine: str = "none", module: Any = None, evaluates: bool = True, **keys: Any) -> TrainerConfig:
    config, given = load_config(None, keys)
    return resolve(config, given, has_eval=evaluates, hardware=MACHINES[machine], module_device=module)


@pytest.mark.parametrize("row", TABLE["refused"], ids=lambda row: str(row[0]))
def test_what_is_refused(row: list[Any]) -> None:
    keys, words, *mended = row
    with pytest.raises(ConfigError, match=words):
        resolved(**keys)
    for changes in mended:
        resolved(**keys | changes)


@pytest.mark.parametrize(("keys", "changes"), TABLE["inert"], ids=str)
def test_keys_that_would_do_nothing(keys: dict[str, Any], changes: dict[str, Any]) -> None:
    name = next(iter(keys))
    with pytest.raises(ConfigError, match=rf"\b{name}(={re.escape(repr(keys[name]))}|') would do nothing: "):
        resolved(**keys)
    resolved(**keys | changes)


@pytest.mark.parametrize("keys", TABLE["accepted"], ids=str)
def test_what_is_accepted(keys: dict[str, Any]) -> None:
    resolved(**keys)
