"""What a plan shows, for a plan made by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_rl.extras.plan.handoff_plan import HandoffPlan
from hybrid_rl.extras.plan.plan_tables import memory_table
from hybrid_rl.planning.ledger import PhaseMemory, Share
from hybrid_rl.planning.size_text import count_text, seconds_text, size_text, unit_of
from tests.support.libraries.python_names import html_of
from tests.unit.planning.made import memory, plan

GOLDEN = Path(__file__).with_name("report.txt")


def test_the_whole_text() -> None:
    """To write it again after a change that is meant: GOLDEN.write_text(plan().text() + "\\n")."""
    assert plan().text() + "\n" == GOLDEN.read_text()


def test_small_models_are_shown_in_small_units() -> None:
    phases = (
        PhaseMemory("update", (Share("actor", 2_500_000, ""), Share("optimizer", 1_000, ""))),
        PhaseMemory("generate", (Share("actor", 2_500_000, ""),)),
    )
    file = io.StringIO()
    Console(file=file, width=120).print(memory_table(replace(memory(None, None), phases=phases)))
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert ["actor", "2.50", "2.50"] in lines and ["optimizer", "<0.01", "-"] in lines
    assert ["total", "2.50", "2.50"] in lines and not any(line[:1] == ["left"] for line in lines)


def test_narrow_consoles_get_tables_in_parts() -> None:
    """Every number is there whatever the width, and none is cut."""
    wide, narrow = plan().text(200), plan().text(44)
    assert "…" not in narrow and max(map(len, narrow.splitlines()[3:40])) <= 44
    numbers = [word for line in wide.splitlines() if line.startswith("total") for word in line.split()[1:]]
    found = [word for line in narrow.splitlines() if line.startswith("total") for word in line.split()[1:]]
    assert found == numbers and narrow.count("^ peak") == 1


@pytest.mark.parametrize(
    ("device", "host", "line"),
    [
        (40.0, 100.0, "fits: peak 32.0 GB of 40.0 GB in update: backward, 8.00 GB left; 32.0 GB of 100 GB on the host"),
        (32.5, 100.0, "fits barely: peak 32.0 GB of 32.5 GB in update: backward, 500 MB left"),
        (30.0, 100.0, "does not fit: a rank needs 32.0 GB of 30.0 GB in update: backward: 2.00 GB too much"),
        (40.0, 31.0, "does not fit: a host needs 32.0 GB for its 4 ranks, in publish; it has 31.0 GB"),
        (None, None, "peak 32.0 GB per rank, in update: backward; the memory of the machine is not known"),
    ],
)
def test_the_verdict(device: float | None, host: float | None, line: str) -> None:
    shown = plan(memory(device, host))
    assert shown.text().splitlines()[2 if device is None else 3].startswith(line)
    assert shown.fits == (not line.startswith("does not"))


def test_remedies_come_right_after_a_refusal_which_says_if_there_are_none() -> None:
    lines = plan(memory(30.0), ("gradient_checkpointing=true: 12 GB less",)).text().splitlines()
    assert lines[4:7] == ["", "What would make it fit", " - gradient_checkpointing=true: 12 GB less"]

    assert plan(memory(30.0)).text().splitlines()[4].startswith("no keys of memory, micro-batches, the engine")
    assert "no keys" not in plan().text()


def test_what_the_plan_is_for_comes_first() -> None:
    planned = memory()
    planned = replace(planned, budget=replace(planned.budget, device="--gpu-memory 40GB", host="--host-memory 100GB"))
    shown = plan(planned)
    assert shown.text().splitlines()[1:3] == [
        "16 prompts x 8 completions a step, up to 1,024 + 512 tokens",
        "memory: 40.0 GB of a GPU (--gpu-memory 40GB), 100 GB of a host (--host-memory 100GB)",
    ]
    found = shown.to_dict()
    assert found["workload"].startswith("16 prompts") and found["memory"]["budget"]["device"] == "--gpu-memory 40GB"


def test_a_handoff_that_is_not_known_is_not_shown_as_nothing() -> None:
    known = plan()
    assert known.time is not None
    seconds = {**known.time.seconds, "handoff": None}
    handoff = HandoffPlan("vllm gets each element once", {}, missing="no folder was given; give --layouts traces")
    unknown = replace(known, handoff=handoff, time=replace(known.time, seconds=seconds))
    found = unknown.to_dict()
    assert found["handoff"]["bytes_by_link"] is None and found["time"]["seconds"]["handoff"] is None
    assert found["time"]["total"] == 99
    lines = unknown.text().splitlines()
    assert "bytes by link: not known, because no folder was given; give --layouts traces" in lines
    assert [line.split() for line in lines if line.startswith("handoff  ")][-1] == ["handoff", "not", "known"]
    assert any(line.split()[:2] == ["step", "~99"] and line.endswith("and what is not known") for line in lines)


def test_json_holds_the_numbers() -> None:
    found = json.loads(plan().to_json())
    assert found["fits"] is True and found["memory"]["peak"] == "update: backward"
    assert found["memory"]["phases"][3]["device_bytes"] == 32 * 10**9
    assert found["memory"]["phases"][0]["device"][0] == {
        "resident": "actor",
        "num_bytes": 4 * 10**9,
        "formula": "1,000,000,000 parameters x 4 B",
    }
    assert found["cycle"]["update"] == ["actor", "optimizer"] and "reward" not in found["cycle"]
    assert found["handoff"]["bytes_by_link"] == {"local": 6 * 10**9, "host": 12 * 10**9, "remote": 0}
    assert found["time"]["total"] == 100


def test_notebooks_and_consoles_show_the_same_words() -> None:
    shown = plan()
    html = html_of(shown)
    assert html.startswith("<pre") and "needed" in html and "style=" in html
    assert repr(shown) == shown.text()
    file = io.StringIO()
    Console(file=file, width=120, force_terminal=True).print(shown)
    assert "\x1b[" in file.getvalue() and "\x1b[" not in shown.text()


def test_sizes_and_seconds() -> None:
    assert [size_text(n) for n in (0, 999, 1_500, 12_340_000)] == ["0 B", "999 B", "1.50 kB", "12.3 MB"]
    assert [size_text(n) for n in (123_400_000, 1_600_000_000, 2 * 10**12)] == ["123 MB", "1.60 GB", "2.00 TB"]
    assert [seconds_text(s) for s in (0, 0.0001, 0.0423, 3.14, 95.2)] == ["0 s", "<0.001 s", "0.042 s", "3.1 s", "95 s"]
    assert [count_text(n) for n in (5_472, 494_032_768, 7_615_616_512)] == ["5,472", "494 M", "7.62 B"]
    assert unit_of([]).name == "B" and unit_of([5 * 10**13]).name == "GB" and unit_of([-5_000]).name == "kB"
    assert unit_of([10**9]).number(123.4e9) == "123.4" and unit_of([10]).number(7) == "7"
