"""Writes a parquet file without rows whose prompt was there before: `python recipes/real/without_duplicates.py IN OUT`.

DAPO-Math-17k is published with every prompt about a hundred times; `hybrid-rl data FILE` says how many repeat.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pyarrow
import pyarrow.parquet


def main(arguments: Sequence[str]) -> tuple[int, int]:
    """Write the first row of each prompt, in order. Returns the numbers of rows read and written."""
    if len(arguments) != 2:
        sys.exit(__doc__)
    table = pyarrow.parquet.read_table(arguments[0])
    first: dict[str, int] = {}
    for place, prompt in enumerate(table.column("prompt")):
        first.setdefault(json.dumps(prompt.as_py(), sort_keys=True), place)
    pyarrow.parquet.write_table(table.take(pyarrow.array(first.values())), arguments[1])
    return table.num_rows, len(first)


if __name__ == "__main__":
    read, written = main(sys.argv[1:])
    print(f"{read:,} rows read, {written:,} written")
