"""Writes the parts of docs/algorithms.md that follow from the code: `python docs/tables.py`.

A part stands between `<!-- NAME -->` and `<!-- end of NAME -->`: the presets, and the records of a section with their
docstrings and keys.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path

from hybrid_rl.algos import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from hybrid_rl.algos.options import place
from hybrid_rl.config.presets import PRESETS

PAGE = Path(__file__).with_name("algorithms.md")


def presets() -> str:
    """The table of presets: name, paper, keys that it sets."""
    rows = ["| preset | paper | sets |", "|---|---|---|"]
    for name, preset in PRESETS.items():
        keys = [f"`{key}={value}`" for key, value in preset.settings.items()]
        settings = ", ".join(keys) or "nothing: these are the defaults"
        rows.append(f"| `{name}` | {preset.title} ({preset.source}) | {settings} |")
    return "\n".join(rows)


def records(home: Mapping[str, type]) -> str:
    """A heading for each record of the library, its docstring, and its keys with default and meaning."""
    parts = []
    for name, record in home.items():
        if not record.__module__.startswith("hybrid_rl."):
            continue
        lines = [f"### `{name}`", "", inspect.getdoc(record) or ""]
        keys = [
            f"- `{place(item)}` = {item.default}: {item.metadata['doc']}" for item in dataclasses.fields(record)[1:]
        ]
        parts.append("\n".join([*lines, "", *keys]).rstrip())
    return "\n\n".join(parts)


def filled(text: str, parts: Mapping[str, str], page: str) -> str:
    """A text with these generated parts between their marks. Raises ValueError if the marks of one are missing."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{page} must have {begin} and {end} once; put them where that part belongs")
        text = pattern.sub(lambda _, part=part, begin=begin, end=end: f"{begin}\n{part}\n{end}", text)  # type: ignore[misc]
    return text


def written(text: str) -> str:
    """The page with its generated parts as the code has them."""
    parts = {
        "presets": presets(),
        "advantage estimators": records(ADVANTAGES),
        "policy losses": records(POLICY_LOSSES),
        "corrections": records(CORRECTIONS),
    }
    return filled(text, parts, PAGE.name)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
