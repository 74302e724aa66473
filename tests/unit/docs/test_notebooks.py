"""The notebooks run in a kernel, with fewer steps, and are kept with outputs that can be read."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.layers import MACHINE_PATH

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from docs.notebooks import FOLDER, Runner, tags_of, tidied  # noqa: E402

NAMES = ("quickstart", "eight_gpus", "replay")
MAX_BYTES = 400_000
# What is shorter here than as readers run it: numbers of steps and samples, on which nothing that is checked depends.
SHORTER = {
    "quickstart": {
        "range(11)": "range(2)",
        "range(12)": "range(2)",
        "max_steps=12": "max_steps=2",
        "fit(steps=5)": "fit(steps=2)",
        "prompts_per_step=8": "prompts_per_step=2",
        "num_generations=8": "num_generations=4",
    },
    "replay": {"num_generations=8": "num_generations=2"},
    "eight_gpus": {"prompts_per_step=8": "prompts_per_step=2", "num_generations=8": "num_generations=4"},
}
# Before the first cell: the files of pictures in run folders, which no cell shows, are not drawn.
START = """
from unittest import mock
from tests.support.plugins.no_pictures import DRAWING, nothing
for name in DRAWING:
    mock.patch(name, nothing).start()
"""


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def texts(cell: Any) -> str:
    """All outputs of a cell as one text."""
    shown = [out.get("text", "") + "".join(out.get("traceback", [])) for out in cell.get("outputs", [])]
    return "\n".join(shown + [str(out.get("data", {}).get("text/plain", "")) for out in cell.get("outputs", [])])


def cell_with(notebook: Any, text: str) -> Any:
    (found,) = (cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source)
    return found


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))  # of the kernel, which runs in another folder
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = copy.deepcopy(read(name))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for long, short in SHORTER[name].items():
        assert any(long in cell.source for cell in cells), long
        for cell in cells:
            cell.source = cell.source.replace(long, short)
    cells[0].source = START + cells[0].source
    for cell in cells:
        cell.outputs = []
    return Runner(notebook, folder).run()


def check_interrupt(notebook: Any) -> None:
    """The interrupted cell ends with a line, not with frames of the package, and the next one goes on."""
    (stopped,) = (cell for cell in notebook.cells if "interrupt" in tags_of(cell))
    (error,) = (out for out in stopped.outputs if out.output_type == "error")
    assert error.ename == "KeyboardInterrupt", error.traceback
    shown = "".join(error.traceback)
    assert re.search(r"interrupted after training step \d+ of \d+; step\(\) or fit\(\) goes on", shown)
    assert shown.count("\n") <= 2 and "trainer.fit()" in shown


@pytest.mark.slow
def test_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell that makes the Trainer twice, the interrupt a real one."""
    notebook = run("quickstart", tmp_path, monkeypatch)
    check_interrupt(notebook)
    made = [path for path in (tmp_path / "runs").iterdir() if (path / "metrics.jsonl").exists()]
    assert (
        len(made) == 4
    )  # the run, one for each algorithm, and the adapter; the first Trainer of the cell never took a step
    (step,) = cell_with(notebook, "result = trainer.step()").outputs[-1:]
    assert "<table" in step.data["text/html"] and len(step.data["text/html"]) < 100_000
    assert sum("image/png" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", [])) == 3
    adapted = texts(cell_with(notebook, "LoraConfig"))
    assert "adapter r=8, " in adapted and "['adapter_config.json', 'adapter_model.safetensors']" in adapted
    assert "Generation('3+3=' -> " in texts(cell_with(notebook, "trainer.generate"))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 25 s on two idle cores, on a busy machine 300 s were too few
def test_eight_gpus_runs_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step over an interrupt, which the kernel's whole process group gets, to a restart."""
    pytest.importorskip("ray")
    notebook = run("eight_gpus", tmp_path, monkeypatch)
    check_interrupt(notebook)
    assert "the same completions: True" in texts(cell_with(notebook, "as alone"))
    said = texts(cell_with(notebook, "stopped_at"))  # beside notes on the machine, which have numbers too
    (steps,) = re.findall(r"goes on after step (\d+) - the last one was (\d+)\n", said)
    assert int(steps[0]) == int(steps[1]) >= 3, said  # steps before the interrupt
    plan = cell_with(notebook, "trainer.plan()")
    assert len(plan.outputs) == 1  # shown once


@pytest.mark.slow
def test_replay_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = run("replay", tmp_path, monkeypatch)
    told = re.findall(r"(loss|grad_norm) +(\S+) +\(in the run (\S+)\)", texts(cell_with(notebook, "step = replay(")))
    assert [name for name, _, _ in told] == ["loss", "grad_norm"] and all(mine == theirs for _, mine, theirs in told)
    assert "share of the gradient" in cell_with(notebook, "step.show(").outputs[-1].data["text/html"]
    assert "gradient_share" in texts(cell_with(notebook, "step.table(0)"))
    assert "sample " in texts(cell_with(notebook, "longer ="))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_with_its_outputs(name: str) -> None:
    """Every cell ran, in order; no path of a machine, nothing but the interrupt failed, and it stays small."""
    notebook = read(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    failed = [cell for cell in cells if any(out.output_type == "error" for out in cell.outputs)]
    assert [tags_of(cell)[0] for cell in failed] == ["interrupt"] * (name != "replay")
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text.encode()) < MAX_BYTES
    assert not MACHINE_PATH.search(text) and "ipykernel_" not in text


def test_paths_of_the_machine_are_removed(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    data = {"text/plain": f"in {tmp_path}/runs/a", "text/html": [f"<b>{tmp_path}/runs</b>"]}
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", data=data)]
    shown = tidied(notebook, tmp_path).cells[0].outputs[0].data
    assert shown == {"text/plain": "in runs/a", "text/html": ["<b>runs</b>"]}
