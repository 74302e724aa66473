"""The code blocks of README and docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
FENCE = re.compile(r"^( *)(?:<!-- not run: (.*?) -->\n+ *)?```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. reason: why it is not run; None if it is."""

    page: str
    language: str
    code: str
    reason: str | None


def blocks() -> Iterator[Block]:
    """Every block of every page, in order."""
    for page, text in PAGES.items():
        for indent, reason, language, code in FENCE.findall(text):
            yield Block(
                page, language, "\n".join(line.removeprefix(indent) for line in code.split("\n")), reason or None
            )


BLOCKS = tuple(blocks())
