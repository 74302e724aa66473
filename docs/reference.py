"""Writes what other pages than docs/algorithms.md have from the code: `python -m docs.reference`.

The whole of docs/configuration.md, the files in docs/architecture.md, the columns of a batch in docs/api.md, what can
be set in docs/trainer.md, and the names of other libraries for keys, in docs/from_trl.md and docs/from_verl.md.
"""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

from docs.tables import filled
from hybrid_rl.batch import FIELDS
from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.load import leaf_names
from hybrid_rl.extras.names import Kind, records
from hybrid_rl.extras.names.listing import Key, all_keys, section_title
from hybrid_rl.run.missing import LIVE

FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parent / "hybrid_rl"
KEYS = (leaf_names() | CHOICES.keys()) - {"name", "path", "model"}
INTRODUCTION = """# Configuration reference

Every key, written from the code by `python -m docs.reference`; `hybrid-rl keys WORD` searches them in a terminal. A key
is given by its leaf name (`learning_rate`) or its path (`optimizer.learning_rate`), as a keyword of `Trainer`, in a
YAML file, or as `key=value` on a command line; an entry of a mapping by the name of both (`ray.env_vars`). Keys that
exist only with a certain choice say so in bold. *Elsewhere* lists the names of keys of TRL, verl and other libraries
instead of which this one is set.
"""


def row(key: Key) -> str:
    """The row of a key."""
    named = "; ".join(key.elsewhere)
    meaning = (f"**{key.when}**: " if key.when else "") + key.doc + (f"<br>*Elsewhere:* {named}" if named else "")
    meaning += "".join(f"<br>{entry(part)}" for part in key.entries)
    cells = (f"`{key.path}`<br>{key.values}", f"`{key.default}`", meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def entry(key: Key) -> str:
    """An entry of a key that is a mapping, in one line."""
    named = f" (*elsewhere* {'; '.join(key.elsewhere)})" if key.elsewhere else ""
    when = f"**{key.when}**: " if key.when else ""
    return f"`{key.name}`: {when}{key.values}, default `{key.default}`: {key.doc}{named}"


def configuration() -> str:
    """The page of all keys."""
    parts = [INTRODUCTION]
    for section, keys in groupby(all_keys(), lambda key: key.section):
        rows = "\n".join(map(row, keys))
        head = "| key and values | default | meaning |\n|---|---|---|"
        parts.append(f"## {section or 'run'}\n\n{section_title(section)}\n\n{head}\n{rows}\n")
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


def elsewhere(*libraries: str) -> str:
    """The keys of other libraries: those of the same name, then a table for each kind of answer."""
    known = [habit for habit in records() if habit.library in libraries]
    same = [f"`{habit.name}`" for habit in known if habit.kind == "same"]
    parts = [f"### The same name and meaning ({len(same)})", ", ".join(same)]
    titles: dict[Kind, str] = {
        "other name": "Another name",
        "not needed": "Nothing to set: it is so anyway",
        "missing": "Not here",
    }
    for kind, title in titles.items():
        found = [habit for habit in known if habit.kind == kind]
        answers: dict[tuple[str, str], list[str]] = {}
        for habit in found:
            answers.setdefault((habit.here, habit.note), []).append(f"`{habit.name}`")
        has_here = kind == "other name"
        head = "| there | here | note |\n|---|---|---|" if has_here else "| there | |\n|---|---|"
        rows = (
            "| " + " | ".join(["<br>".join(names), *([_coded(here)] if has_here else []), note]) + " |"
            for (here, note), names in answers.items()
        )
        parts += [f"### {title} ({len(found)})", "\n".join([head, *rows])]
    return "\n\n".join(parts)


def files() -> str:
    """What each file of the package is about, in its own words, by room."""
    parts = []
    for room, inside in groupby(sorted(PACKAGE.rglob("*.py")), lambda path: path.relative_to(PACKAGE).parts[0]):
        lines = [f"### {room.removesuffix('.py')}", ""]
        for path in inside:
            said = ast.get_docstring(ast.parse(path.read_text()))
            assert said is not None, path
            name = path.relative_to(PACKAGE).as_posix()
            lines.append(f"- `{name}`: {' '.join(said.partition(chr(10) * 2)[0].split())}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _coded(here: str) -> str:
    """What is to be set, with the keys in it as code."""
    names = sorted(KEYS, key=len, reverse=True)
    return re.sub(
        rf"(?<![\w.])(?:\w+\.)*(?:{'|'.join(names)})\b(?:\.[a-z_]+)?(?:=(?:\[[\w,]*\]|[\w.]+))?", r"`\g<0>`", here
    )


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    found = {FOLDER / "configuration.md": configuration()}
    marked = {
        "architecture.md": {"files": files()},
        "api.md": {"columns": columns()},
        "trainer.md": {"live": live()},
        "from_trl.md": {"TRL's keys": elsewhere("TRL"), "keys of transformers": elsewhere("transformers")},
        "from_verl.md": {"verl's keys": elsewhere("verl")},
    }
    for name, parts in marked.items():
        found[FOLDER / name] = filled((FOLDER / name).read_text(), parts, name)
    return found


if __name__ == "__main__":
    for place, text in pages().items():
        place.write_text(text)
