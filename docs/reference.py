"""Writes what other pages than docs/algorithms.md have from the code: `python -m docs.reference`.

The whole of docs/configuration.md, the columns of a batch in docs/api.md, what can be set in docs/trainer.md.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.tables import filled
from hybrid_rl.batch import FIELDS
from hybrid_rl.config import visible_leaves
from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.habits import HABITS
from hybrid_rl.config.load import Leaf
from hybrid_rl.run.live import LIVE

FOLDER = Path(__file__).parent
# Section -> what its keys are about, in the order of the page. Keys without a section come first.
SECTIONS = {
    "": "The run",
    "model": "Model",
    "data": "Data",
    "rewards": "Rewards",
    "algorithm": "Algorithm",
    "advantage": "Advantage",
    "policy_loss": "Policy loss",
    "kl": "KL",
    "correction": "Correction for the engine",
    "entropy": "Entropy",
    "critic": "Critic",
    "optimizer": "Optimizer and batches",
    "rollout": "Rollout and engines",
    "agents": "Agents",
    "eval": "Evaluation",
    "fsdp": "FSDP2",
    "memory": "Memory",
    "controller": "Controller",
}
INTRODUCTION = """# Configuration reference

Every key, written from the code by `python -m docs.reference`; `hybrid-rl keys WORD` searches them in a terminal. A key
is given by its leaf name (`learning_rate`) or its path (`optimizer.learning_rate`), as a keyword of `Trainer`, in a
YAML file, or as `key=value` on a command line. Keys that exist only with a certain choice say so in bold. *Elsewhere*
lists names of TRL, verl and other libraries that mean the same or come close; keys without it have TRL's name if TRL
has such a key.
"""


def leaves() -> dict[str, tuple[Leaf, list[str]]]:
    """Every key by path, with the choices under which it exists; none for a key that always does."""
    always = visible_leaves()
    found = {path: (leaf, list[str]()) for path, leaf in always.items()}
    for section, choice in CHOICES.items():
        seen: dict[str, list[str]] = {}
        for member in choice.members:
            for path, leaf in visible_leaves({section: member}).items():
                if path not in always:
                    found.setdefault(path, (leaf, []))
                if path.startswith(section + "."):
                    seen.setdefault(path, []).append(member)
        for path, members in seen.items():
            if len(members) < len(choice.members):
                found[path][1].extend(f"{choice.tag}={member}" if choice.tag else member for member in members)
    return found


def type_words(kind: Any) -> str:
    """A type as a user would write its values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " · ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(one) for one in arguments)
    if origin is list:
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return "mapping"
    return {type(None): "None", str: "text", bool: "yes/no", float: "number", int: "integer"}.get(kind, str(kind))


def range_words(metadata: Mapping[str, Any]) -> str:
    """The bounds of a key, empty if it has none."""
    signs = (("minimum", "≥"), ("above", ">"), ("maximum", "≤"), ("below", "<"))
    return ", ".join(
        f"{sign} {metadata[name]:,}" for name, sign in signs if metadata.get(name) is not None and metadata[name] < 1e6
    )


def names_elsewhere() -> dict[str, list[str]]:
    """Leaf name -> names of other libraries whose advice is to set that key."""
    found: dict[str, list[str]] = {}
    for name, advice in HABITS.items():
        said = re.match(r"set (?:\w+\.)?(\w+)", advice)
        if said:
            found.setdefault(said[1], []).append(name)
    return found


def rows(section: str) -> Iterator[str]:
    """The rows of a section's table."""
    others = names_elsewhere()
    for path, (leaf, members) in leaves().items():
        if path.rpartition(".")[0].partition(".")[0] != section:
            continue
        where = f"**{', '.join(members)}**: " if members else ""
        kind = ", ".join(filter(None, (type_words(leaf.type), range_words(leaf.metadata))))
        named = ", ".join(f"`{name}`" for name in others.get(path.rpartition(".")[2], ()))
        meaning = where + leaf.doc + (f"<br>*Elsewhere:* {named}" if named else "")
        cells = (f"`{path}`<br>{kind}", f"`{leaf.default}`", meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def configuration() -> str:
    """The page of all keys."""
    parts = [INTRODUCTION]
    for section, title in SECTIONS.items():
        head = "| key and values | default | meaning |\n|---|---|---|"
        parts.append(f"## {title}\n\n{head}\n" + "\n".join(rows(section)) + "\n")
    return "\n".join(parts)


def columns() -> str:
    """The table of a batch's columns."""
    shapes = {"sample": "[N]", "object": "list of N", "prompt": "tokens of the prompt"}
    lines = ["| column | one entry per | meaning |", "|---|---|---|"]
    for name, field in FIELDS.items():
        shape = shapes.get(field.align, "tokens of the completion")
        kind = f", {str(field.dtype).removeprefix('torch.')}" if field.dtype else ""
        lines.append(f"| `{name}` | {shape}{kind} | {field.doc} |")
    return "\n".join(lines)


def live() -> str:
    """The table of what can be set on a live Trainer."""
    return "\n".join(["| setting | meaning |", "|---|---|", *(f"| `{name}` | {doc} |" for name, doc in LIVE.items())])


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    found = {FOLDER / "configuration.md": configuration()}
    for name, parts in {"api.md": {"columns": columns()}, "trainer.md": {"live": live()}}.items():
        found[FOLDER / name] = filled((FOLDER / name).read_text(), parts, name)
    return found


if __name__ == "__main__":
    for place, text in pages().items():
        place.write_text(text)
