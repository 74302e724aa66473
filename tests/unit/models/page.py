"""The lists of families in docs/models.md, from the table that tests are parametrised over.

`python -m tests.unit.models.page` writes them again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.unit.models.families import (
    FAMILIES,
    MIXTURES,
    MORE_DENSE,
    MORE_MIXTURES,
    NOT_CAPTURED,
    REFUSED,
    REFUSED_OVER_VLLM,
    SUPPORTED,
    VISION,
)

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"


def block() -> str:
    """Return the text between BEGIN and END."""
    groups = {
        "dense": [*SUPPORTED.values(), *MORE_DENSE.values()],
        "mixtures of experts": [*MIXTURES.values(), *MORE_MIXTURES.values()],
        "vision-language, trained on text": VISION.values(),
    }
    lines = ["| | families |", "|---|---|"]
    lines += [f"| {name} | {_titles(family.title for family in families)} |" for name, families in groups.items()]
    lines.append("| over vLLM | all dense ones and mixtures of experts but those that are refused below |")
    lines += ["", "| limits | |", "|---|---|"]
    lines += [f"| {family.title} | {family.note} |" for family in FAMILIES.values() if family.note]
    without_graphs = _titles(FAMILIES[name].title for name in NOT_CAPTURED)
    lines.append(f"| {without_graphs} | in place without CUDA graphs: a warning says so |")
    lines += ["", "| refused over vLLM | because |", "|---|---|"]
    lines += [f"| {titles} | {reason} |" for reason, titles in _refused_over_vllm().items()]
    lines += ["", "| refused in place | because of |", "|---|---|"]
    lines += [f"| {row.title} | {reason} |" for reason, row in REFUSED.items()]
    return "\n".join(lines) + "\n"


def _titles(titles: Iterable[str]) -> str:
    return ", ".join(sorted(titles, key=str.lower))


def _refused_over_vllm() -> dict[str, str]:
    """Titles by reason."""
    reasons = dict.fromkeys(REFUSED_OVER_VLLM.values())
    return {
        reason: _titles(FAMILIES[name].title for name, its in REFUSED_OVER_VLLM.items() if its == reason)
        for reason in reasons
    }


def written(text: str) -> str:
    """The page with the lists as they should be."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + block() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
