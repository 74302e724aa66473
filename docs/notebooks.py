"""Runs the notebooks of docs/notebooks and keeps them with their outputs: `python docs/notebooks.py [NAME]`.

A cell with the tag `interrupt` gets a real interrupt, as from the stop button, when a few training steps are recorded.
One with the tag `again` is run a second time, as readers do.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).with_name("notebooks")
STEPS_BEFORE_INTERRUPT = 3
CELL_SECONDS = 600
QUIET = "ignore:IProgress not found"  # without ipywidgets, which nothing here needs


class Runner:
    """Runs one notebook in a folder. again: whether cells with the tag `again` are run twice."""

    def __init__(self, notebook: Any, folder: Path, *, again: bool = True) -> None:
        self._folder, self._again = folder, again
        self._watching: asyncio.Task[None] | None = None
        self._client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            on_cell_execute=self._begin,
            on_cell_executed=self._end,
            record_timing=False,
        )

    def run(self) -> Any:
        """Run all cells and return the notebook with its outputs. Raises CellExecutionError for a cell that fails."""
        with self._client.setup_kernel(env=os.environ | {"PYTHONWARNINGS": QUIET}):
            for place, cell in enumerate(self._client.nb.cells):
                for _ in range(1 + (self._again and "again" in tags_of(cell))):
                    self._client.execute_cell(cell, place)
        return self._client.nb

    async def _begin(self, cell: Any, cell_index: int) -> None:
        if "interrupt" in tags_of(cell):
            self._watching = asyncio.create_task(self._interrupt(self._records()))

    async def _end(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _interrupt(self, before: int) -> None:
        while self._records() < before + STEPS_BEFORE_INTERRUPT:
            await asyncio.sleep(0.05)
        await self._client.km.interrupt_kernel()

    def _records(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self._folder.glob("runs/*/metrics.jsonl"))


def tags_of(cell: Any) -> list[str]:
    """Return the tags of a cell."""
    return list(cell.metadata.get("tags", []))


def tidied(notebook: Any, folder: Path) -> Any:
    """Return a notebook without the path of the folder that it ran in, and without what differs from run to run."""
    places = re.compile("|".join(re.escape(f"{place}/") for place in {folder, folder.resolve()}))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            _tidy(output, places)
    notebook.metadata.pop("widgets", None)
    return notebook


def _tidy(value: Any, places: re.Pattern[str]) -> Any:
    """Remove the places from all texts in a value, in place where it can be."""
    if isinstance(value, str):
        return places.sub("", value)
    if isinstance(value, dict):
        for name, inner in value.items():
            value[name] = _tidy(inner, places)
    if isinstance(value, list):
        value[:] = [_tidy(inner, places) for inner in value]
    return value


def write(path: Path) -> None:
    """Run a notebook and write it back with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = Runner(nbformat.read(path, as_version=4), Path(folder), again=False).run()
        nbformat.write(tidied(notebook, Path(folder)), path)


if __name__ == "__main__":
    for name in sys.argv[1:] or ["quickstart", "eight_gpus"]:
        write(FOLDER / f"{name}.ipynb")
