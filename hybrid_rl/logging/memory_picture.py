"""Pictures of a rank's memory over a training step: a PNG, and a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.memory.cycle import RESIDENTS
from hybrid_rl.memory.history import StepMemory

MEMORY, PHASES, MOVES = 0, 1, 2  # threads of a process in a trace
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def draw_memory(step: StepMemory, picture: Path, *, title: str, predicted: Mapping[str, int]) -> None:
    """Draw the bytes by resident over a step as a PNG, with the phases underneath.

    predicted: bytes of the same residents by phase, of the plan that the run was checked against; they become a line
    over what was measured. Phases that it lacks have no line.
    """
    from matplotlib.figure import Figure

    moments, bytes_of = shown(step)
    predictions = predicted_line(step, predicted)
    highest = max([sum(level) for level in zip(*bytes_of.values(), strict=True)] + [y for _, y in predictions] + [1])
    scale, unit = next((scale, unit) for scale, unit in UNITS if highest >= scale)
    names = list(dict.fromkeys(phase.name for phase in step.phases))
    figure = Figure(figsize=(11, 4 + 0.22 * len(names)), layout="constrained")
    memory, phases = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 0.4 + 0.22 * len(names)])
    if bytes_of:
        rows = [[num_bytes / scale for num_bytes in row] for row in bytes_of.values()]
        colors = [f"C{RESIDENTS.index(tag) % 10}" if tag in RESIDENTS else "0.6" for tag in bytes_of]
        memory.stackplot(moments, rows, labels=list(bytes_of), colors=colors, step="post", alpha=0.85)
    if predictions:
        line = ([x for x, _ in predictions], [y / scale for _, y in predictions])
        memory.plot(*line, color="black", linestyle="--", linewidth=1, label="predicted")
    memory.set_title(title, fontsize=10)
    memory.set_ylabel(unit)
    memory.grid(alpha=0.3)
    if bytes_of:
        memory.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    for phase in step.phases:
        span = (phase.start - step.start, max(phase.end - phase.start, 0.002 * (step.end - step.start)))
        phases.broken_barh([span], (names.index(phase.name) - 0.4, 0.8), color="0.35")
    phases.set_yticks(range(len(names)), names, fontsize=8)
    phases.invert_yaxis()
    phases.set_xlabel("seconds", fontsize=8)
    phases.grid(alpha=0.3, axis="x")
    figure.savefig(picture, dpi=110)


def shown(step: StepMemory) -> tuple[list[float], dict[str, list[int]]]:
    """Return the series of a step without residents that never take memory, in the order of the cycle's table."""
    moments, bytes_of = step.series()
    order = {tag: place for place, tag in enumerate(RESIDENTS)}
    tags = sorted((tag for tag, row in bytes_of.items() if any(row)), key=lambda tag: (order.get(tag, len(order)), tag))
    return moments, {tag: bytes_of[tag] for tag in tags}


def predicted_line(step: StepMemory, predicted: Mapping[str, int]) -> list[tuple[float, float]]:
    """Return points (seconds since the start, bytes) of a line over every phase that has a prediction; NaN ends a
    piece."""
    points: list[tuple[float, float]] = []
    for phase in sorted(step.phases, key=lambda phase: phase.start):
        if phase.name in predicted:
            ends = (phase.start - step.start, phase.end - step.start)
            points += [(end, float(predicted[phase.name])) for end in ends] + [(ends[1], float("nan"))]
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
