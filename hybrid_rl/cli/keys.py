"""`hybrid-rl keys`: the keys of the configuration."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from hybrid_rl.cli.key_values import complete_word
from hybrid_rl.cli.lazily import put_off
from hybrid_rl.cli.tables import show, table, wide_console

if TYPE_CHECKING:
    from hybrid_rl.extras.names.listing import Key


def print_keys(
    word: Annotated[
        str,
        typer.Argument(
            metavar="WORD",
            help="A section, or what is in the name, the description or another library's name of a key.",
            autocompletion=complete_word,
        ),
    ] = "",
) -> None:
    """List the keys of the configuration, by section: values, default, meaning, and their names in other libraries.

    A key is given as KEY=VALUE to a command, as a keyword to Trainer, or in a YAML file. Its last part is enough:
    learning_rate=1e-5 and optimizer.learning_rate=1e-5 mean the same. None is written null there. Piped output has one
    line per key.

    Examples:
      hybrid-rl keys                    all of them
      hybrid-rl keys optimizer          one section
      hybrid-rl keys learning_rate
      hybrid-rl keys ppo_mini_batch_size        what is it called here?
      hybrid-rl keys | grep -i tokens
    """
    put_off("torch")
    from hybrid_rl.config.unknown import LIKENESS
    from hybrid_rl.extras.names.listing import all_keys

    keys = all_keys()
    shown_keys = [key for key in keys if word and key.section == word]
    shown_keys = shown_keys or [shown for key in keys if (shown := _matching(key, word))]
    if not shown_keys:
        near = difflib.get_close_matches(word, [key.name for key in keys], 1, LIKENESS)
        advice = f"did you mean {near[0]}?" if near else "`hybrid-rl keys` lists all"
        print(f"no key contains {word!r}; {advice}", file=sys.stderr)
        raise typer.Exit(1)
    console = wide_console()
    if console.is_terminal:
        show_sections(console, shown_keys)
        return
    lines = [line for key in shown_keys for line in (key, *key.entries)]
    rows = (
        (k.path, k.default, k.values, (f"{k.when}: " if k.when else "") + k.doc, "; ".join(k.elsewhere)) for k in lines
    )
    show(console, table(("key", "default", "values", "meaning", "elsewhere"), rows))


def show_sections(console: Console, keys: Sequence[Key]) -> None:
    """Print keys for reading: under headings, dependent ones under what they depend on."""
    from hybrid_rl.extras.names.listing import section_title

    for section, of_section in groupby(keys, lambda key: key.section):
        title = Text(section or "run", style="bold cyan").append(
            f"  {section_title(section)}", style="default not bold"
        )
        console.print(title)
        console.print()
        for when, dependent in groupby(of_section, lambda key: key.when):
            if when:
                console.print(Padding(Text(when, style="italic cyan"), (1, 0, 0, 2)))
            for key in dependent:
                _show_key(console, key, indent=4 if when else 2)
        console.print()


def _show_key(console: Console, key: Key, indent: int) -> None:
    # The path beyond the section has to be said only if it is longer than the name.
    name = key.path.removeprefix(f"{key.section}.") if key.section else key.path
    line = Text(name, style="bold").append(f" = {key.default}", style="not bold green")
    console.print(Padding(line.append(f"   {key.values}", style="not bold dim"), (0, 0, 0, indent)))
    console.print(Padding(Text(key.doc), (0, 0, 0, indent + 4)))
    if key.elsewhere:
        console.print(Padding(Text("; ".join(key.elsewhere), style="dim"), (0, 0, 0, indent + 4)))
    for entry in key.entries:
        doc = (f"{entry.when}: " if entry.when else "") + entry.doc
        _show_key(console, replace(entry, section=key.path, doc=doc), indent + 4)


def _matching(key: Key, word: str) -> Key | None:
    """Return a key that has the word; of one that is a mapping and does not have it itself, the entries that do."""
    has_word = any(word in text for text in (key.path, key.doc, *key.elsewhere))
    entries = tuple(entry for entry in key.entries if has_word or _matching(entry, word))
    return replace(key, entries=entries) if has_word or entries else None
