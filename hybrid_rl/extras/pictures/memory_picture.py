"""Pictures of a rank's memory over a training step: a PNG, and a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.memory.comparison import Expected
from hybrid_rl.memory.cycle import RESIDENTS
from hybrid_rl.memory.history import Span, StepMemory

MEMORY, PHASES, MOVES = 0, 1, 2  # threads of a process in a trace
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def draw_memory(step: StepMemory, picture: Path, *, title: str, expected: Expected | None = None) -> None:
    """Draw the bytes by resident over a step as a PNG, with the phases underneath.

    expected: of the plan that the run was checked against; what it predicts becomes lines over what was measured: of
    the same residents, and, if peaks of the device were measured too, of these. Phases that it lacks have no line.
    """
    from matplotlib.figure import Figure

    moments, bytes_of = shown(step)
    lines = lines_of(step, expected)
    heights = [1.0, *(float(sum(level)) for level in zip(*bytes_of.values(), strict=True))]
    highest = max([*heights, *(y for line in lines for _, y in line.points if not math.isnan(y))])
    scale, unit = next((scale, unit) for scale, unit in UNITS if highest >= scale)
    names = list(dict.fromkeys(phase.name for phase in step.phases))
    figure = Figure(figsize=(11, 4 + 0.22 * len(names)), layout="constrained")
    memory, phases = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 0.4 + 0.22 * len(names)])
    if bytes_of:
        rows = [[num_bytes / scale for num_bytes in row] for row in bytes_of.values()]
        colors = [f"C{RESIDENTS.index(tag) % 10}" if tag in RESIDENTS else "0.6" for tag in bytes_of]
        memory.stackplot(moments, rows, labels=list(bytes_of), colors=colors, step="post", alpha=0.85)
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        style: dict[str, Any] = {"color": line.color, "linestyle": line.style, "linewidth": 1}
        memory.plot(xs, [y / scale for y in ys], label=line.label, **style)
    memory.set_title(title, fontsize=10)
    memory.set_ylabel(unit)
    memory.grid(alpha=0.3)
    if bytes_of or lines:
        memory.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    for phase in step.phases:
        span = (phase.start - step.start, max(phase.end - phase.start, 0.002 * (step.end - step.start)))
        phases.broken_barh([span], (names.index(phase.name) - 0.4, 0.8), color="0.35")
    phases.set_yticks(range(len(names)), names, fontsize=8)
    phases.invert_yaxis()
    phases.set_xlabel("seconds", fontsize=8)
    phases.grid(alpha=0.3, axis="x")
    figure.savefig(picture, dpi=110)


def memory_record(step: StepMemory, expected: Expected | None) -> dict[str, Any]:
    """Return what a picture shows, for JSON. moments: seconds since the start of the step; bytes: by resident, from
    each moment to the next; phases: [name, start, end]; lines: label and points, null between pieces."""
    moments, bytes_of = shown(step)
    return {
        "moments": moments,
        "bytes": bytes_of,
        "phases": [[phase.name, phase.start - step.start, phase.end - step.start] for phase in step.phases],
        "lines": {
            line.label: [[x, None if math.isnan(y) else y] for x, y in line.points] for line in lines_of(step, expected)
        },
    }


def shown(step: StepMemory) -> tuple[list[float], dict[str, list[int]]]:
    """Return the series of a step without residents that never take memory, in the order of the cycle's table."""
    moments, bytes_of = step.series()
    order = {tag: place for place, tag in enumerate(RESIDENTS)}
    tags = sorted((tag for tag, row in bytes_of.items() if any(row)), key=lambda tag: (order.get(tag, len(order)), tag))
    return moments, {tag: bytes_of[tag] for tag in tags}


@dataclass(frozen=True)
class Line:
    """A line over phases. points: seconds since the start of the step, and bytes; NaN ends a piece."""

    label: str
    color: str
    style: str
    points: list[tuple[float, float]]


def lines_of(step: StepMemory, expected: Expected | None) -> list[Line]:
    """Return the lines that a picture has over its bands."""
    peaks = {phase: phase.peak_bytes for phase in step.phases if phase.peak_bytes is not None}
    predicted: dict[Span, int] = {}
    predicted_peaks: dict[Span, int] = {}
    if expected is not None:
        known = [phase for phase in step.phases if phase.name in expected.residents]
        predicted = {phase: sum(expected.residents[phase.name].values()) for phase in known}
        predicted_peaks = {phase: expected.peaks[phase.name] for phase in peaks if phase.name in expected.peaks}
    lines = (
        Line("predicted", "black", "--", _over(step, predicted)),
        Line("device, at most", "C3", "-", _over(step, peaks)),
        Line("device, predicted", "C3", "--", _over(step, predicted_peaks)),
    )
    return [line for line in lines if line.points]


def _over(step: StepMemory, bytes_of: Mapping[Span, int]) -> list[tuple[float, float]]:
    """Return a line that has these bytes while each phase lasts."""
    points: list[tuple[float, float]] = []
    for phase in sorted(bytes_of, key=lambda phase: phase.start):
        start, end = phase.start - step.start, phase.end - step.start
        points += [(start, float(bytes_of[phase])), (end, float(bytes_of[phase])), (end, math.nan)]
    return points


def chrome_trace(ranks: Sequence[Sequence[StepMemory]]) -> dict[str, Any]:
    """Return the steps of every rank in the Trace Event Format: bytes by resident as counters; phases, sleeps and wakes
    as durations. Times are microseconds since the epoch, by the clock of each rank's host."""
    events: list[dict[str, Any]] = []
    for rank, steps in enumerate(ranks):
        events.append(_named(rank, None, "process_name", f"rank {rank}"))
        events += [_named(rank, thread, "thread_name", name) for thread, name in ((PHASES, "phases"), (MOVES, "moves"))]
        for step in steps:
            events += _counters(rank, step)
            for phase in step.phases:
                events.append(_duration(rank, PHASES, phase.name, phase.start, phase.end - phase.start))
            for move in step.moves:
                verb = "wake" if move.awake else "sleep"
                events.append(_duration(rank, MOVES, f"{verb} {move.tag}", move.start, move.seconds))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(rank: int, thread: int | None, name: str, value: str) -> dict[str, Any]:
    place = {"pid": rank} if thread is None else {"pid": rank, "tid": thread}
    return {"ph": "M", "name": name, **place, "args": {"name": value}}


def _counters(rank: int, step: StepMemory) -> Iterator[dict[str, Any]]:
    moments, bytes_of = shown(step)
    for place, moment in enumerate(moments):
        values = {tag: row[place] for tag, row in bytes_of.items()}
        at = (step.start + moment) * 1e6
        yield {"ph": "C", "name": "memory (bytes)", "pid": rank, "tid": MEMORY, "ts": at, "args": values}


def _duration(rank: int, thread: int, name: str, start: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": start * 1e6, "dur": seconds * 1e6}
