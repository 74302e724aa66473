"""`KEY=VALUE` arguments of commands, and their completion in a shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from hybrid_rl.cli.lazily import put_off

# As the listing of keys writes a choice of words.
CHOICE = "one of "
YES_OR_NO = "true or false"


def take(name: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `name=VALUE`, which is not a key of the configuration, off the arguments: its values, and the rest."""
    start = f"{name}="
    values = [argument.removeprefix(start) for argument in arguments if argument.startswith(start)]
    return values, [argument for argument in arguments if not argument.startswith(start)]


def complete_setting(incomplete: str) -> list[str]:
    """Complete the key of `KEY=VALUE`, and its value if that is one of some words."""
    key = _bash_key()
    if key is not None:
        return [value for value in values_of(key) if value.startswith(incomplete.lstrip("="))]
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in values_of(key) if value.startswith(start)]
    keys = [name for name in names() if name.startswith(incomplete)]
    # Its values as well if there is but one: after a single word bash would write a space.
    values = values_of(keys[0]) if len(keys) == 1 else []
    return [f"{name}=" for name in keys] + [f"{keys[0]}={value}" for value in values]


def complete_word(incomplete: str) -> list[str]:
    """Complete a section, or the name of a key."""
    put_off("torch")
    from hybrid_rl.extras.names.listing import all_keys

    keys = all_keys()
    words = dict.fromkeys([key.section for key in keys if key.section] + [key.name for key in keys])
    return [word for word in words if word.startswith(incomplete)]


def names() -> list[str]:
    """Return all that may stand before "=": leaf names, what chooses the class of a section, and whole paths."""
    put_off("torch")
    from hybrid_rl.config.choices import CHOICES
    from hybrid_rl.extras.names.listing import all_keys

    keys = all_keys()
    sections = [section for section, choice in CHOICES.items() if choice.tag is not None]
    # "name" alone could be a key of anything.
    paths = [line.path for key in keys for line in (key, *key.entries)]
    return list(dict.fromkeys([key.name for key in keys if key.name != "name"] + sections + paths))


def values_of(key: str) -> list[str]:
    """Return the words that a key takes, or its default if it takes numbers or any text; none for an unknown key."""
    put_off("torch")
    from hybrid_rl.config.choices import CHOICES
    from hybrid_rl.extras.names.listing import all_keys

    if key in CHOICES and CHOICES[key].tag is not None:
        return list(CHOICES[key].members)
    for known in (line for entry in all_keys() for line in (entry, *entry.entries)):
        if key in (known.path, known.name):
            if known.values.startswith(CHOICE):
                return known.values.removeprefix(CHOICE).split(", ")
            if known.values == YES_OR_NO:
                return ["true", "false"]
            return ["null" if known.default == "None" else known.default]
    return []


def _bash_key() -> str | None:
    """Return the key whose value bash asks about; None if it asks about a key. For bash "=" ends a word: of KEY=VALUE
    it completes VALUE alone, after the words KEY and "="."""
    words, place = os.environ.get("COMP_WORDS", "").split(), int(os.environ.get("COMP_CWORD", "0"))
    for number in (place - 1, place):  # the word before is "=", or that of the cursor
        if 0 < number < len(words) and words[number] == "=":
            return words[number - 1]
    return None


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Any key of the configuration; hybrid-rl keys lists them.",
        autocompletion=complete_setting,
    ),
]
