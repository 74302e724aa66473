"""Tables of the command line: folded to the width of a terminal, one line per row if they are piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

PIPED_WIDTH = 1000  # more than any row: piped output is for grep


def wide_console() -> Console:
    """Make a console for tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPED_WIDTH, highlight=False)


def show(console: Console, shown: RenderableType) -> None:
    """Print a table, or several. Piped output has no trailing spaces."""
    if console.is_terminal:
        console.print(shown)
        return
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table of texts, which are taken as they are."""
    made = Table(box=None, pad_edge=False)
    for title in titles:
        made.add_column(title, overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    return made
