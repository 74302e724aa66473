"""Algorithms by the names of their papers: which records they choose, and the papers' values if they differ from
the defaults. They are data, in presets.yaml.

What a paper says about data, lengths, learning rates and numbers of mini-batches is not part of an algorithm and is
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybrid_rl.process.files import read_yaml


@dataclass(frozen=True)
class Preset:
    """title and source of a paper; settings: by the names of sections and keys. What a user gives overrides them."""

    title: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {name: Preset(**entry) for name, entry in read_yaml(Path(__file__).with_suffix(".yaml")).items()}
)
