"""The driver of `make gpu`, on trees of a few files: what it counts and writes, and that nothing hides the rest."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from tests.gpu import run

MACHINE = {"device": "NVIDIA H200 (test)", "driver": "1"}
LIMITS = {"tests": 60.0, "benchmarks": 60.0}
JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b[1]"><failure message="x"/></testcase><testcase name="c"><error/></testcase>
<testcase name="d"><skipped message="needs vllm"/></testcase>
<testcase name="e"><skipped message="needs vllm"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two test files and three benchmarks, some of them broken."""
    files = {
        "tests/gpu/test_good.py": "import pytest\ndef test_a(): 1\n@pytest.mark.skip(reason='why')\ndef test_b(): 1",
        "tests/gpu/test_bad.py": "def test_wrong(): assert 1 == 2",
        "tests/gpu/test_broken.py": "import nothing_of_that_name",
        "benchmarks/gpu_a.py": 'print(\'talk\'); print(\'{"benchmark": "a", "ours": 2.0, "ratio": 0.5}\')',
        "benchmarks/gpu_b.py": 'print(\'{"benchmark": "b", "ours": 1}\', flush=True); raise SystemExit(\'no memory\')',
        "benchmarks/gpu_c.py": "print('nothing measured')",
        "benchmarks/other.py": "raise SystemExit('not to be run')",
        "setup.py": "raise SystemExit('hybrid_rl: built without the compiled extension (none); PyTorch stands in')",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def everything(tree: Path, *only: str, **limits: float) -> tuple[Path, dict]:
    return run.run_everything(tree, sys.executable, MACHINE, tree / "out", list(only), LIMITS | limits)


def test_a_run_reports_every_file_whatever_the_others_do(tree: Path) -> None:
    path, report = everything(tree)
    assert json.loads(path.read_text()) == report
    assert path.parent == tree / "out" and path.name.endswith("Z-nvidia-h200-test.json")
    tests = {entry["file"]: entry for entry in report["tests"]}
    good = tests["tests/gpu/test_good.py"]
    assert (good["status"], good["passed"], good["failed"], good["skipped"]) == ("passed", 1, 0, 1)
    assert good["skip_reasons"] == ["why"] and "output" not in good
    bad = tests["tests/gpu/test_bad.py"]
    assert (bad["status"], bad["passed"], bad["failures"]) == ("failed", 0, ["test_wrong"])
    assert "assert 1 == 2" in bad["output"]
    assert tests["tests/gpu/test_broken.py"]["status"] == "failed"
    assert "nothing_of_that_name" in tests["tests/gpu/test_broken.py"]["output"]
    a, b, c = report["benchmarks"]
    assert (a["status"], a["lines"]) == ("passed", [{"benchmark": "a", "ours": 2.0, "ratio": 0.5}])
    assert (b["status"], b["lines"], b["output"].splitlines()[-1]) == (
        "failed",
        [{"benchmark": "b", "ours": 1}],
        "no memory",
    )
    assert (c["status"], c["lines"], c["output"]) == ("failed", [], "nothing measured")
    assert report["extension"]["built"] is False and "(none)" in report["extension"]["why"]
    assert report["commit"] is None and report["changed"] is None
    assert not run.all_passed(report)
    assert not list(path.parent.glob("*.partial"))


def test_only_what_is_named_is_run(tree: Path) -> None:
    _, report = everything(tree, "test_good", "gpu_a")
    assert [entry["file"] for entry in report["tests"]] == ["tests/gpu/test_good.py"]
    assert [entry["file"] for entry in report["benchmarks"]] == ["benchmarks/gpu_a.py"]
    assert run.all_passed(report)


def test_what_hangs_is_killed_with_its_children_and_its_lines_are_kept(tree: Path) -> None:
    child = "import time; time.sleep(600)"
    (tree / "benchmarks" / "gpu_a.py").write_text(
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', '{child}'])\n"
        'print(\'{"benchmark": "a", "ours": %d}\' % child.pid, flush=True)\nchild.wait()'
    )
    _, report = everything(tree, "gpu_a", "gpu_b", benchmarks=5.0)
    entry, other = report["benchmarks"]
    assert entry["status"] == "timeout" and other["status"] == "failed"
    assert entry["seconds"] < 60
    assert is_gone(entry["lines"][0]["ours"])


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # dead, waiting for whoever inherited it
        time.sleep(0.05)
    return False


def test_counts_of_a_junit_report() -> None:
    counts = run.count_tests(JUNIT)
    assert counts == {
        "passed": 1,
        "failed": 2,
        "skipped": 2,
        "failures": ["b[1]", "c"],
        "skip_reasons": ["needs vllm"],
    }


def test_lines_of_a_benchmark_are_told_from_its_talk() -> None:
    output = 'x\n{"other": 1}\n{not json\n  {"benchmark": "indented"}\n{"benchmark": "a"}\n[1]\n{"benchmark": "b"} tail'
    assert run.benchmark_lines(output) == [{"benchmark": "a"}]


def test_the_name_of_a_report_has_date_and_device() -> None:
    started = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    path = run.report_path(Path("results"), started, "NVIDIA H200 NVL")
    assert path.as_posix() == "results/gpu-20260304T050607Z-nvidia-h200-nvl.json"


def test_the_table_has_a_line_per_test_file_and_measurement() -> None:
    report = {
        "tests": [
            {"file": "tests/gpu/test_a.py", "status": "passed", "passed": 7, "failed": 0, "skipped": 2},
            {"file": "tests/gpu/test_bc.py", "status": "timeout"},
        ],
        "benchmarks": [
            {"file": "benchmarks/gpu_x.py", "status": "failed", "lines": []},
            {
                "file": "benchmarks/gpu_y.py",
                "status": "passed",
                "lines": [{"benchmark": "y", "ours": 1234.56, "peer": None, "ratio": None, "unit": "tokens/s"}],
            },
        ],
    }
    assert run.table(report) == [
        "tests/gpu/test_a.py   passed   7 passed, 2 skipped",
        "tests/gpu/test_bc.py  timeout  no tests were counted",
        "benchmarks/gpu_x.py   failed   no measurement",
        "y                     passed   1235 tokens/s, peer -, ratio -",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_machine_without_cuda_is_told_so_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run.main(["--output", str(tmp_path)]) == run.CANNOT_RUN
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("make gpu cannot run here: torch ")
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_named_with_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.REQUIRED, "nothing_of_that_name", "a test")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (line,) = run.obstacles()
    assert line.startswith(f"{sys.executable} cannot import nothing_of_that_name (a test); name another Python")
