"""The report of runs, from their folders to the page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.report import sample_choice
from hybrid_rl.extras.report.charts import layout
from hybrid_rl.extras.report.page import plotly_packed, render
from hybrid_rl.extras.report.runs import RunData, check, load, names_of
from hybrid_rl.extras.report.series import MAX_POINTS
from hybrid_rl.process.files import write_text

NAME = "report.html"
ALL_POINTS = 6000  # of a metric, over all runs


def write_report(runs: Sequence[str | Path] | str | Path, target: str | Path | None = None) -> Path:
    """Write one page of HTML about one or more runs, and return its path.

    runs: run folders; of runs that are still under way the page shows what they have written so far.
    target: the file; default report.html in the folder of a single run, else in the current folder.

    The page needs no other file and no network. It is bounded in size, and says what it leaves out. Raises ConfigError
    if a path is not a run folder, or if the file cannot be written.
    """
    folders = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    if not folders:
        raise ConfigError("a report needs at least one run folder")
    for folder in folders:
        check(folder)
    plotly_packed()  # if it is missing, that is said before runs are read
    unique = list({folder.resolve(): folder for folder in folders}.values())
    data = report_data(unique)
    if target is None:
        target = unique[0] / NAME if len(unique) == 1 else Path(NAME)
    if not str(target).strip():
        raise ConfigError("the file of the report has an empty name; name one, or leave it out")
    path = Path(target)
    path = path / NAME if path.is_dir() else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        page = render(data, f"{', '.join(run['name'] for run in data['runs'])} - hybrid_rl")
        if path.is_file() or not path.exists():
            write_text(path.resolve(), page)  # behind a link, and never half a page in the place of a good one
        else:
            path.write_text(page, encoding="utf-8")  # a pipe or a device is written to, not replaced
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    return path.absolute()


def report_data(folders: Sequence[Path]) -> dict[str, Any]:
    """Return everything that a page shows of these runs, as JSON can hold it."""
    max_points = min(MAX_POINTS, max(ALL_POINTS // len(folders), 100))
    runs = [load(folder, name, max_points) for folder, name in zip(folders, names_of(folders), strict=True)]
    rows, notes = _samples(runs)
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [run.shown for run in runs],
        "sections": layout([run.shown for run in runs]),
        "samples": rows,
        "notes": notes,
    }


def _samples(runs: Sequence[RunData]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a bounded choice of the samples of all runs, with `run` and `kind`, and what the page says of it."""
    lists = [(place, kind, lines) for place, run in enumerate(runs) for kind, lines in run.lines.items() if lines]
    rows: list[dict[str, Any]] = []
    notes = []
    for place, kind, lines in lists:
        kept = sample_choice.chosen(lines, sample_choice.MAX_SAMPLES // len(lists) or 1)
        records = sample_choice.read(kept, sample_choice.MAX_BYTES // len(lists))
        rows += [record | {"run": place, "kind": kind} for record in records]
        if len(records) < len(lines):
            steps = len({line.step for line in lines})
            subject = "samples" if kind == "train" else "evaluation samples"
            notes.append(
                f"{runs[place].shown['name']}: {len(records):,} of {len(lines):,} {subject} are on this page, from "
                f"{len({record['step'] for record in records}):,} of {steps:,} steps; all are in "
                f"{runs[place].shown['folder']}"
            )
    return rows, notes
