"""What the pictures of memory show: the numbers that are drawn, and a trace that its format allows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.extras.pictures.memory_picture import Line, chrome_trace, draw_memory, lines_of, shown
from hybrid_rl.memory.comparison import Expected
from hybrid_rl.memory.history import Level, Span, StepMemory
from hybrid_rl.memory.leases import Transition

# Two seconds of update, one of moving, four of generating.
STEP = StepMemory(
    50.0,
    57.0,
    {"kv_cache": 0, "teacher": 0, "actor": 10, "optimizer": 20},
    (Level(52.0, "optimizer", 0), Level(52.5, "kv_cache", 40)),
    (Span("update", 50.0, 52.0), Span("generate", 53.0, 57.0)),
    (Transition("optimizer", False, 0.5, 52.0, 20), Transition("kv_cache", True, 0.5, 52.5, 40)),
)


def test_series_are_those_that_take_memory_in_the_order_of_the_table() -> None:
    moments, bytes_of = shown(STEP)
    assert moments == [0.0, 2.0, 2.5, 7.0]
    assert list(bytes_of.items()) == [
        ("actor", [10, 10, 10, 10]),
        ("optimizer", [20, 0, 0, 0]),
        ("kv_cache", [0, 0, 40, 40]),
    ]


def test_predictions_are_lines_over_each_phase_that_has_one() -> None:
    expected = Expected({"generate": {"actor": 12, "kv_cache": 40}, "save": {"actor": 30}}, {"generate": 77})
    assert lines_of(STEP, None) == []
    (line,) = lines_of(STEP, expected)
    assert line.label == "predicted" and finite(line) == [(3.0, 52.0), (7.0, 52.0)]
    phases = (STEP.phases[0], replace(STEP.phases[1], peak_bytes=90))
    lines = {line.label: finite(line) for line in lines_of(replace(STEP, phases=phases), expected)}
    assert lines == {
        "predicted": [(3.0, 52.0), (7.0, 52.0)],
        "device, at most": [(3.0, 90.0), (7.0, 90.0)],
        "device, predicted": [(3.0, 77.0), (7.0, 77.0)],
    }


def finite(line: Line) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.points if not math.isnan(y)]


def test_the_picture_has_these_bands_line_and_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    expected = Expected({"update": {"actor": 500, "optimizer": 2000}, "generate": {"actor": 2000}}, {})
    draw_memory(STEP, tmp_path / "memory.png", title="step 3", expected=expected)
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    memory, phases = figures[0].axes
    assert memory.get_ylabel() == "kB" and memory.get_title() == "step 3"
    assert [text.get_text() for text in memory.get_legend().get_texts()] == [
        *("predicted", "kv_cache", "optimizer", "actor")
    ]
    # The highest band ends at 10 + 20 bytes in the update and at 10 + 40 when it generates.
    tops = [float(band.get_paths()[0].vertices[:, 1].max()) for band in memory.collections]
    assert tops == pytest.approx([0.010, 0.030, 0.050])
    line = [(x, y) for x, y in memory.lines[0].get_xydata().tolist() if not math.isnan(y)]
    assert line == [(0.0, 2.5), (2.0, 2.5), (3.0, 2.0), (7.0, 2.0)]
    assert [label.get_text() for label in phases.get_yticklabels()] == ["update", "generate"]
    spans = [bar.get_paths()[0].get_extents() for bar in phases.collections]
    assert [(span.x0, span.x1) for span in spans] == [(0.0, 2.0), (3.0, 7.0)]


def test_an_empty_step_can_be_drawn(tmp_path: Path) -> None:
    draw_memory(StepMemory(0.0, 1.0, {}, (), (), ()), tmp_path / "memory.png", title="")
    assert (tmp_path / "memory.png").exists()


def test_a_trace_holds_counters_phases_and_moves_of_every_rank() -> None:
    trace = json.loads(json.dumps(chrome_trace([[STEP], [STEP]])))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        assert event["ph"] in "MCX" and event["pid"] in (0, 1) and isinstance(event["name"], str)
        assert event["ph"] == "M" or isinstance(event["ts"], float)
        assert (event["ph"] == "X") == ("dur" in event)
    mine = [event for event in trace["traceEvents"] if event["pid"] == 1]
    counters = [(event["ts"], event["args"]) for event in mine if event["ph"] == "C"]
    assert counters == [
        (50.0e6, {"actor": 10, "optimizer": 20, "kv_cache": 0}),
        (52.0e6, {"actor": 10, "optimizer": 0, "kv_cache": 0}),
        (52.5e6, {"actor": 10, "optimizer": 0, "kv_cache": 40}),
        (57.0e6, {"actor": 10, "optimizer": 0, "kv_cache": 40}),
    ]
    durations = [(event["name"], event["ts"], event["dur"]) for event in mine if event["ph"] == "X"]
    assert durations == [
        ("update", 50.0e6, 2.0e6),
        ("generate", 53.0e6, 4.0e6),
        ("sleep optimizer", 52.0e6, 0.5e6),
        ("wake kv_cache", 52.5e6, 0.5e6),
    ]
    assert [event["args"]["name"] for event in mine if event["ph"] == "M"] == ["rank 1", "phases", "moves"]
