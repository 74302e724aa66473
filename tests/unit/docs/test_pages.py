"""README and docs say what the code says: generated pages, quoted messages, links."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from docs.reference import pages
from tests.unit.docs.blocks import PAGES, ROOT

TROUBLE = PAGES["docs/troubleshooting.md"]
MESSAGES = re.findall(r"^\| `(.+?)` \|", TROUBLE, re.MULTILINE)


def texts_of_the_code() -> Iterator[str]:
    """Every text in the package, with … for what is filled in."""
    for path in (ROOT / "hybrid_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[\d.,]*[sdrgf]", "…", node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                yield "".join(map(str, parts))


@functools.cache
def texts() -> tuple[str, ...]:
    """All of them, each once."""
    return tuple(sorted(set(texts_of_the_code())))


def test_generated_pages_are_what_the_code_says() -> None:
    old = [path.name for path, text in pages().items() if PAGES[f"docs/{path.name}"] != text]
    assert not old, "write them again: python -m docs.reference"


@pytest.mark.slow
def test_every_quoted_message_is_in_the_code() -> None:
    assert len(MESSAGES) > 60
    missing = [message for message in MESSAGES if not any(holds(text, message) for text in texts())]
    assert not missing


def holds(text: str, quoted: str) -> bool:
    """Whether a text has the parts of a quotation in their order."""
    place = 0
    for part in filter(None, quoted.split("…")):
        found = text.find(part.strip(), place)
        if found < 0:
            return False
        place = found + len(part.strip())
    return True


def test_a_message_that_nobody_says_is_found_out() -> None:
    assert holds("the model … has … weights", "model … has") and not holds("the model … has … weights", "has … model")


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 150
    links = re.findall(r"\]\((?!http)([^)#]+)|(?:src|srcset)=\"([^\"]+)\"", text)
    links = [one or other for one, other in links]
    assert links and all((ROOT / link).is_file() for link in links)


def test_pages_use_one_name_for_the_model() -> None:
    """The one that the test of the blocks replaces, or a hybrid where the page is about those."""
    named = {name for text in PAGES.values() for name in re.findall(r'Trainer\(\s*(?:model=)?"([^"]+/[^"]+)"', text)}
    assert named <= {"Qwen/Qwen2.5-0.5B-Instruct", "LiquidAI/LFM2-350M", "runs/x/checkpoint-100"}
