"""The driver of `make gpu`, on trees of a few files: what it counts and writes, what it starts, how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from tests.gpu import machine, parts, run

MACHINE = {"device": "NVIDIA H200 (test)", "driver": "1"}
JUNIT = """<testsuites><testsuite>
<properties><property name="peak_tensor_bytes" value="4096"/></properties>
<testcase name="a"/><testcase name="b[1]"><failure message="x"/></testcase><testcase name="c"><error/></testcase>
<testcase name="d"><skipped message="needs vllm"/></testcase>
<testcase name="e"><skipped message="needs vllm"/></testcase>
</testsuite></testsuites>"""
BUILDS = (
    "import pathlib\n"
    "for name in ('_native.so', '_native_cuda.so', '_cuda_region.so'): pathlib.Path('hybrid_rl', name).touch()"
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Test files and benchmarks, some of them broken, and a setup.py that builds."""
    # Importing all that is installed beside pytest takes four times as long as one of these files.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    files = {
        "tests/gpu/test_good.py": "import pytest\ndef test_a(): 1\n@pytest.mark.skip(reason='why')\ndef test_b(): 1",
        "tests/gpu/test_bad.py": "def test_wrong(): assert 1 == 2",
        "tests/gpu/test_broken.py": "import nothing_of_that_name",
        "tests/gpu/test_skipped.py": "import pytest\npytest.skip('needs vllm', allow_module_level=True)",
        "benchmarks/gpu_a.py": 'print(\'talk\'); print(\'{"benchmark": "a", "ours": 2.0, "ratio": 0.5}\')',
        "benchmarks/gpu_b.py": 'print(\'{"benchmark": "b", "ours": 1}\', flush=True); raise SystemExit(\'no memory\')',
        "benchmarks/gpu_c.py": "print('not a number')",
        "benchmarks/other.py": "raise SystemExit('not to be run')",
        "hybrid_rl/_native_cuda.so": "of an earlier build",
        "setup.py": BUILDS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def go(tree: Path, *only: str, report: dict | None = None, budget: float | None = None) -> dict[str, dict]:
    """Run parts of the tree; entries of the report by name."""
    report = run.new_report(MACHINE) if report is None else report
    run.run_parts(tree, sys.executable, parts.parts_of(tree, only), report, tree / "report.json", budget)
    assert json.loads((tree / "report.json").read_text()) == report
    assert not list(tree.glob("*.partial"))
    return {entry["name"]: entry for entry in report["parts"]}


def test_a_run_reports_every_part_whatever_the_others_do(tree: Path) -> None:
    report = run.new_report(MACHINE)
    found = go(tree, report=report)
    assert " ".join(found) == "build test_bad test_broken test_good test_skipped gpu_a gpu_b gpu_c"
    assert found["build"]["status"] == "passed"
    good = found["test_good"]
    assert (good["status"], good["passed"], good["failed"], good["skipped"]) == ("passed", 1, 0, 1)
    assert good["skip_reasons"] == ["why"] and "1 passed" in good["output"]  # of what passed, too
    bad = found["test_bad"]
    assert (bad["status"], bad["passed"], bad["failures"]) == ("failed", 0, ["test_wrong"])
    assert "assert 1 == 2" in bad["output"]
    assert found["test_broken"]["status"] == "failed" and "nothing_of_that_name" in found["test_broken"]["output"]
    # A file all of whose tests are skipped has shown nothing.
    assert found["test_skipped"]["status"] == "failed" and "needs vllm" in found["test_skipped"]["output"]
    a, b, c = (found[name] for name in ("gpu_a", "gpu_b", "gpu_c"))
    assert (a["status"], a["output"]) == ("passed", "talk")
    assert a["lines"] == [{"benchmark": "a", "ours": 2.0, "ratio": 0.5}]
    assert (b["status"], b["lines"], b["output"]) == ("failed", [{"benchmark": "b", "ours": 1}], "no memory")
    assert (c["status"], c["lines"]) == ("failed", []) and "nothing was measured" in c["output"]
    assert report["runs"][0]["commit"] is None and report["runs"][0]["changed"] is None
    assert run.exit_status(report) == run.FAILED


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("import pathlib; pathlib.Path('hybrid_rl/_native.so').touch()", "not built: _native_cuda.so, _cuda_region.so"),
        ("raise SystemExit('strided_copy.cu(7): error')", "strided_copy.cu(7): error"),
    ],
)
def test_a_library_that_is_not_built_is_a_failure(tree: Path, setup: str, message: str) -> None:
    (tree / "setup.py").write_text(setup)
    report = run.new_report(MACHINE)
    build = go(tree, "test_good", report=report)["build"]
    assert build["status"] == "failed" and message in build["output"]
    assert run.exit_status(report) == run.FAILED


def test_only_what_is_named_is_run(tree: Path) -> None:
    def named(*only: str) -> list[str]:
        return [part.name for part in parts.parts_of(tree, only)]

    assert named("test_good", "gpu_a") == ["build", "test_good", "gpu_a"]
    assert named("benchmarks") == ["build", "gpu_a", "gpu_b", "gpu_c"]
    with pytest.raises(ValueError, match=r"nonsense: no such part or stage; there are build, smoke, tests, benchmarks"):
        parts.parts_of(tree, ["nonsense"])


def test_a_budget_starts_only_what_can_end_and_a_later_run_goes_on(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(name: str, seconds: float) -> parts.Part:
        return parts.Part(name, parts.TESTS, f"tests/gpu/{name}.py", seconds)

    build = parts.Part("build", parts.BUILD, "setup.py", 1.0)
    monkeypatch.setattr(parts, "LISTED", (build, listed("test_bad", 10.0), listed("test_good", 9999.0)))
    report = run.new_report(MACHINE)
    found = go(tree, "test_bad", "test_good", report=report, budget=120.0)
    assert found["test_bad"]["status"] == "failed"
    assert found["test_good"]["status"] == run.NOT_RUN
    assert found["test_good"]["why"].startswith("needs some 9999 s, ")
    assert run.exit_status(report) == run.FAILED
    (tree / "tests/gpu/test_bad.py").write_text("def test_mended(): pass")
    again = run.read_report(tree / "report.json", MACHINE)
    found = go(tree, "test_bad", "test_good", report=again)
    assert {name: entry["status"] for name, entry in found.items()} == dict.fromkeys(found, "passed")
    assert (found["test_good"]["run"], found["test_bad"]["run"], len(again["runs"])) == (1, 1, 2)
    third = go(tree, "test_bad", "test_good", report=again)
    assert third["test_good"]["run"] == 1 and third["build"]["run"] == 2  # what passed is not run again, but built
    assert run.exit_status(again) == 0


def test_without_a_build_of_its_own_a_run_starts_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = parts.Part("test_good", parts.TESTS, "tests/gpu/test_good.py", 2.0)
    monkeypatch.setattr(parts, "LISTED", (parts.Part("build", parts.BUILD, "setup.py", 9999.0), listed))
    found = go(tree, "test_good", budget=100.0)
    assert (found["build"]["status"], found["test_good"]["status"]) == (run.NOT_RUN, run.NOT_RUN)
    assert found["test_good"]["why"] == "csrc was not built in this run"


def test_a_termination_ends_the_part_that_is_running(tree: Path) -> None:
    (tree / "benchmarks" / "gpu_a.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    script = (
        "import signal, sys; from pathlib import Path; from tests.gpu import parts, run\n"
        "signal.signal(signal.SIGTERM, run.end)\n"
        f"run.run_part(Path({str(tree)!r}), sys.executable, parts.parts_of(Path({str(tree)!r}), ['gpu_a'])[-1], 300.0)"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], cwd=run.ROOT, env=machine.child_environment(run.ROOT))
    while not (tree / "pid").exists() or not (tree / "pid").read_text():
        assert driver.poll() is None
        time.sleep(0.1)
    driver.terminate()
    assert driver.wait(60) == 128 + signal.SIGTERM
    assert is_gone(int((tree / "pid").read_text()))


def test_what_was_never_run_goes_before_what_failed_and_that_before_what_hung(tree: Path) -> None:
    before = {"test_bad": "timeout", "test_broken": "failed", "test_good": "passed"}
    report = {"parts": [{"name": name, "status": status} for name, status in before.items()]}
    turns = run.in_turn(parts.parts_of(tree, ["tests"]), report)
    assert [part.name for part in turns] == ["build", "test_skipped", "test_broken", "test_bad"]


def test_nothing_outlives_the_budget(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "tests/gpu/test_good.py").write_text("import time\ndef test_a(): time.sleep(600)")
    listed = parts.Part("test_good", parts.TESTS, "tests/gpu/test_good.py", 2.0)
    monkeypatch.setattr(parts, "LISTED", (parts.Part("build", parts.BUILD, "setup.py", 1.0), listed))
    start = time.monotonic()
    found = go(tree, "test_good", budget=run.MARGIN_SECONDS + 6)
    assert found["test_good"]["status"] in ("timeout", run.NOT_RUN)  # not begun, if the machine was slow to build
    assert time.monotonic() - start < 60


def test_a_report_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="no report of make gpu"):
        run.read_report(path, MACHINE)
    report = run.new_report(MACHINE)
    for broken in (
        {"parts": {}},
        {"runs": None},
        {"missing": "ray"},
        {"parts": [{"name": "a", "stage": "tests"}]},
        {"parts": [{"name": "a", "stage": "tests", "status": "odd", "output": ""}]},
        {"parts": [{"name": "a", "stage": "tests", "status": "failed"}]},
    ):
        path.write_text(json.dumps(report | broken))
        with pytest.raises(ValueError, match="no report of make gpu"):
            run.read_report(path, MACHINE)
    path.write_text(json.dumps(run.new_report({"device": "NVIDIA H100"})))
    with pytest.raises(ValueError, match=r"is of NVIDIA H100, this machine has NVIDIA H200 \(test\)"):
        run.read_report(path, MACHINE)


def test_what_hangs_is_killed_with_its_children_and_its_lines_are_kept(tree: Path) -> None:
    child = "import time; time.sleep(600)"
    (tree / "benchmarks" / "gpu_a.py").write_text(
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', '{child}'])\n"
        'print(\'{"benchmark": "a", "ours": %d}\' % child.pid, flush=True)\nchild.wait()'
    )
    entry = run.run_part(tree, sys.executable, parts.parts_of(tree, ["gpu_a"])[-1], 5.0)
    assert entry["status"] == "timeout" and entry["seconds"] < 60
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


def test_memory_is_watched_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an nvidia-smi that says 100, 300 and 200 MiB, and then goes on."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 100; echo 300; echo 200; exec sleep 60")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    outcome = run.run_limited(["sleep", "1"], tmp_path, 30.0, os.environ)
    assert (outcome.status, outcome.peak_bytes) == ("passed", 300 << 20)


def test_counts_of_a_junit_report() -> None:
    counts = {"passed": 1, "failed": 2, "skipped": 2, "failures": ["b[1]", "c"], "skip_reasons": ["needs vllm"]}
    assert run.count_tests(JUNIT) == counts | {"peak_tensor_bytes": 4096}


def test_lines_of_a_benchmark_are_told_from_its_talk() -> None:
    output = 'x\n{"other": 1}\n{not json\n  {"benchmark": "indented"}\n{"benchmark": "a"}\n[1]\n{"benchmark": "b"} tail'
    assert run.benchmark_lines(output) == [{"benchmark": "a"}]


def test_the_name_of_a_report_has_date_and_device() -> None:
    started = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    path = run.report_path(Path("results"), started, "NVIDIA H200 NVL")
    assert path.as_posix() == "results/gpu-20260304T050607Z-nvidia-h200-nvl.json"


def test_the_table_has_a_line_per_part_and_measurement() -> None:
    line = {"benchmark": "y", "ours": 1234.56, "peer": None, "ratio": None, "unit": "tokens/s"}
    report = {
        "parts": [
            {"name": "build", "stage": "build", "status": "passed", "seconds": 61.2},
            {"name": "test_a", "stage": "tests", "status": "passed", "passed": 7, "failed": 0, "skipped": 2},
            {"name": "test_bc", "stage": "tests", "status": "timeout", "seconds": 90.0},
            {"name": "test_d", "stage": "tests", "status": "not run", "why": "needs some 60 s, 5 s were left"},
            {"name": "gpu_x", "stage": "benchmarks", "status": "failed", "lines": []},
            {"name": "gpu_y", "stage": "benchmarks", "status": "passed", "lines": [line]},
        ],
    }
    assert run.table(report) == [
        "build    passed   61 s",
        "test_a   passed   7 passed, 2 skipped",
        "test_bc  timeout  90 s",
        "test_d   not run  needs some 60 s, 5 s were left",
        "gpu_x    failed   no measurement",
        "y        passed   1235 tokens/s, peer -, ratio -",
    ]


def test_pieces_hold_every_part_once_and_are_about_equally_long() -> None:
    whole = parts.parts_of(run.ROOT)
    pieces = [parts.piece_of(whole, number, 4) for number in (1, 2, 3, 4)]
    assert [part for piece in pieces for part in piece if part.stage != parts.BUILD] == whole[1:]
    assert all(piece[0].stage == parts.BUILD for piece in pieces)
    seconds = [sum(part.seconds for part in piece[1:]) for piece in pieces]
    assert max(seconds) - min(seconds) <= 2 * max(part.seconds for part in whole)


def test_the_smoke_stage_takes_at_most_its_time_and_comes_first() -> None:
    whole = parts.parts_of(run.ROOT)
    assert [part.stage for part in whole] == sorted((part.stage for part in whole), key=parts.STAGES.index)
    assert sum(part.seconds for part in whole if part.stage == parts.SMOKE) <= 120


def test_every_file_has_its_place_in_the_order() -> None:
    listed = {part.file for part in parts.LISTED if part.stage in (parts.TESTS, parts.BENCHMARKS)}
    there = {f"tests/gpu/{path.name}" for path in (run.ROOT / "tests/gpu").glob("test_*.py")}
    there |= {f"benchmarks/{path.name}" for path in (run.ROOT / "benchmarks").glob("gpu_*.py")}
    assert listed == there
    names = [part.name for part in parts.LISTED]
    assert len(names) == len(set(names))


@pytest.mark.sweep
def test_every_part_of_the_smoke_stage_selects_a_test() -> None:
    smoke = [part for part in parts.LISTED if part.stage == parts.SMOKE]
    arguments = [["--collect-only", "-q", "-p", "no:cacheprovider", part.file, *part.arguments] for part in smoke]
    script = f"import pytest; print([int(pytest.main(given)) for given in {arguments!r}])"
    environment = machine.child_environment(run.ROOT) | {"HYBRID_RL_TEST_DEVICE": "cpu"}
    outcome = machine.run_limited([sys.executable, "-c", script], run.ROOT, 240.0, environment)
    assert outcome.output.strip().splitlines()[-1] == str([0] * len(smoke)), outcome.output


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("--budget", ["0", "-3", "nan"], "give a number of seconds above 0"),
        ("--part", ["0/3", "4/3", "1", "a/b", "1/0"], "give K/N"),
    ],
)
def test_options_that_cannot_be_are_refused(
    option: str, values: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        assert run.main([option, value]) == run.CANNOT_RUN
        assert message in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "obstacles", list)
    monkeypatch.setattr(machine, "describe_machine", lambda: MACHINE)
    (tmp_path / "file").touch()
    assert run.main(["--output", str(tmp_path / "file" / "folder")]) == run.CANNOT_RUN
    assert "name a folder with --output" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_machine_without_cuda_is_told_so_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run.main(["--output", str(tmp_path)]) == run.CANNOT_RUN
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("make gpu cannot run here: torch ")
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_named_with_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.REQUIRED, "nothing_of_that_name", "a test")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (line,) = machine.obstacles()
    assert line.startswith(f"{sys.executable} cannot import nothing_of_that_name (a test); name another Python")
