"""The run folder: nothing lost on a full disk, no half line, no other run's results overwritten, and a picture."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from pathlib import Path

import pytest
from PIL import Image

from hybrid_rl.errors import ConfigError, HybridRLError, StorageError
from hybrid_rl.logging.run_folder import JsonLines, RunFolder, read_jsonl
from tests.support.inside.logs import num_waiting
from tests.support.kills.forked import Forked

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs the device of a full disk")
# Characters at which str.splitlines cuts and JSON does not escape, an astral one and half of one.
ODD_TEXT = "a\u2028b\u2029c\x85d\r\ne\x0bf\x1cg 😀 \ud83d"

# A disk that is full after 1000 bytes, in a process of its own: the limit also holds for files that exist.
FULL_AFTER_1000 = """
import json, resource, signal, sys
from pathlib import Path
from hybrid_rl.logging.run_folder import JsonLines
from tests.support.inside.logs import num_waiting
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
file = JsonLines(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
seen = []
for step in range(10):
    file.write([{"step": step, "part": part, "text": "x" * 70} for part in range(2)])
    seen.append((path.stat().st_size, num_waiting(file)))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps({"seen": seen, "full": path.read_text(), "flushed": file.flush(), "left": num_waiting(file)}))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run", "grpo")


# --------------------------------------------------------------------------------------------------------- JsonLines


def test_what_json_cannot_hold_costs_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise ZeroDivisionError("no text")

    file = JsonLines(tmp_path / "samples.jsonl")
    file.write([{"step": 1, "odd": {("a", 1): 2}, "kind": Path("x")}, {"step": 1, "odd": Unprintable()}, {"step": 2}])
    first, second, third = read_jsonl(file.path)
    assert (
        first["step"] == 1 and first["kind"] == "x" and first["odd"].startswith("(cannot be written: TypeError: keys")
    )
    assert second == {"step": 1, "odd": "(cannot be written: ZeroDivisionError: no text)"} and third == {"step": 2}
    assert caplog.text.count("the column 'odd' of a record cannot be written") == 2


def test_metrics_are_finite_json_and_the_step_of_a_record_is_the_step(run: RunFolder) -> None:
    run.log_metrics(3, {"step": 7.0, "reward": 0.1, "kl": math.nan, "grad_norm": math.inf})
    assert run.metrics.path.read_text() == '{"step": 3, "reward": 0.1}\n'
    assert run.keep_until(3) == (0, {}) and run.keep_until(2) == (1, {})


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of files")
def test_a_disk_that_fills_up_and_is_freed_again(forked: Forked, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    result = forked.run("-c", FULL_AFTER_1000, str(path), environment=os.environ)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    size = len(json.dumps({"step": 0, "part": 0, "text": "x" * 70})) + 1
    whole = 1000 // (2 * size)  # calls that fit: each writes its two records or neither
    assert told["seen"] == [[2 * size * min(call, whole), 2 * max(0, call - whole)] for call in range(1, 11)]
    assert told["full"].endswith("\n") and len(told["full"].split("\n")) - 1 == 2 * whole
    assert told["flushed"] is True and told["left"] == 0
    assert [(r["step"], r["part"]) for r in read_jsonl(path)] == [(s, p) for s in range(10) for p in range(2)]
    assert result.stderr.count("cannot write") == 1 and "only" in result.stderr


@needs_full
def test_records_wait_in_memory_and_the_log_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = JsonLines(FULL)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            file.write([{"step": step}])
        assert not file.flush() and num_waiting(file) == 3
        file.path = tmp_path / "metrics.jsonl"
        assert file.flush()
    assert [r["step"] for r in read_jsonl(file.path)] == [0, 1, 2]
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "cannot write /dev/full",
        f"{file.path} is writable again; nothing was lost",
    ]


@needs_full
def test_records_that_wait_have_a_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """Three lines of 12 bytes fit into 40."""
    monkeypatch.setattr("hybrid_rl.logging.run_folder.MAX_PENDING_BYTES", 40)
    file = JsonLines(FULL)
    for step in range(10, 16):
        file.write([{"step": step}])
    assert num_waiting(file) == 3
    file.path = tmp_path / "metrics.jsonl"
    assert file.flush()
    assert [r["step"] for r in read_jsonl(file.path)] == [13, 14, 15]
    assert len(caplog.messages) == 3 and "the oldest are dropped from now on" in caplog.messages[1]
    assert caplog.messages[2].endswith("writable again; 3 records did not fit into memory and were dropped")


def test_records_of_a_folder_that_was_removed_are_not_called_safe(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = JsonLines(folder / "metrics.jsonl")
    file.write([{"step": 0}])
    file.path.unlink()
    folder.rmdir()
    file.write([{"step": 1}])
    folder.mkdir()
    file.write([{"step": 2}])
    assert [r["step"] for r in read_jsonl(file.path)] == [1, 2]
    assert caplog.messages[-1] == f"{file.path} is writable again; its earlier records are gone: it was removed or cut"


def test_nothing_written_makes_no_file(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "m.jsonl")
    file.write([])
    assert file.flush() and not file.path.exists() and read_jsonl(file.path) == []
    run = RunFolder(str(tmp_path), "run", "grpo")
    run.keep_until(3)
    assert list(run.path.iterdir()) == []


def test_any_text_of_a_model_comes_back(tmp_path: Path) -> None:
    """One record, one line, whatever it holds; objects that JSON does not know go as text."""
    file = JsonLines(tmp_path / "samples.jsonl")
    file.write([{"completion": ODD_TEXT, "folder": Path("a")}, {"completion": ""}])
    assert file.path.read_bytes().count(b"\n") == 2
    assert read_jsonl(file.path) == [{"completion": ODD_TEXT, "folder": "a"}, {"completion": ""}]


# --------------------------------------------------------------------------------------------------------- RunFolder


def test_a_folder_with_results_is_never_taken(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        folder = RunFolder(str(tmp_path / "new" / "runs"), "mine", "grpo")
        folder.log_metrics(1, {"reward": 1.0})
        paths.append(folder.path.name)
    assert paths == ["mine", "mine-2", "mine-3"]


def test_an_empty_folder_is_taken_and_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert RunFolder(str(tmp_path), "empty", "grpo").path == tmp_path / "empty"
    assert RunFolder(str(tmp_path), "file", "grpo").path == tmp_path / "file-2"


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("time.strftime", {"%Y%m%d-%H%M%S": "20300102-030405"}.__getitem__)
    names = [RunFolder(str(tmp_path), None, "grpo").path.name for _ in range(2)]  # nothing is written in between
    assert names == ["grpo-20300102-030405", "grpo-20300102-030405-2"]


def test_a_run_that_goes_on_keeps_its_folder(run: RunFolder) -> None:
    run.log_metrics(1, {"reward": 0.5})
    again = RunFolder(str(run.path.parent), "run", "", keep=True)
    again.log_metrics(2, {"reward": 0.75})
    assert again.path == run.path and len(read_jsonl(run.metrics.path)) == 2


@pytest.mark.parametrize("keep", [False, True])
def test_a_place_that_cannot_be_written(tmp_path: Path, keep: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the run folder .*set output_dir to a writable folder"):
        RunFolder(str(tmp_path / "file"), "run", "grpo", keep=keep)


def test_small_files_are_whole_or_not_there(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_text("config.yaml", "seed: 1\n")
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]

    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(StorageError, match=r"cannot write .*config.yaml: .*No space left.*; free space"):
        run.write_text("config.yaml", "seed: 2\n")
    assert run.path.joinpath("config.yaml").read_text() == "seed: 1\n"
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "names", [["samples.jsonl"], ["samples-rank0.jsonl", "samples-rank11.jsonl"]], ids=["one", "many"]
)
def test_keep_until_drops_later_steps_and_cut_lines(run: RunFolder, names: list[str]) -> None:
    """Of the metrics and of every rank's samples; everything else stays byte for byte, lines with odd characters
    included."""
    samples = [JsonLines(run.path / name) for name in names]
    for step in range(5):
        run.log_metrics(step, {"reward": float(step)})
        for file in samples:
            file.write([{"step": step, "completion": ODD_TEXT}] * 2)
    (run.path / "notes.jsonl").write_text('{"step": 4}\n')
    files = [run.metrics.path, *(file.path for file in samples)]
    kept = [4, *(8 for _ in samples)]
    expected = [b"".join(file.read_bytes().splitlines(keepends=True)[:n]) for file, n in zip(files, kept, strict=True)]
    cuts = [b'{"step": 3, "rew', *('{"step": 1, "completion": "é'.encode()[:-1] for _ in samples)]
    for file, cut in zip(files, cuts, strict=True):
        file.write_bytes(file.read_bytes() + cut)
    rest = [file.read_bytes().removeprefix(kept) + b"\n" for file, kept in zip(files, expected, strict=True)]
    assert run.keep_until(3) == (1, {file.name: 1 for file in files})  # step 4, and the line that was cut
    assert [file.read_bytes() for file in files] == expected
    aside = [file.with_name(f"{file.name}.dropped") for file in files]
    assert [file.read_bytes() for file in aside] == rest
    run.keep_until(3)
    assert [file.read_bytes() for file in aside] == rest
    run.log_metrics(4, {"reward": 9.0})
    assert [r["step"] for r in read_jsonl(run.metrics.path)] == [0, 1, 2, 3, 4]
    assert (run.path / "notes.jsonl").read_text() == '{"step": 4}\n'  # somebody else's


def test_what_is_dropped_is_kept_once_though_a_killed_process_had_kept_it(run: RunFolder) -> None:
    """It had written what goes, and not yet the log without it; later ones come after, on lines of their own."""
    for step in range(3):
        run.log_metrics(step, {"reward": float(step)})
    lines = run.metrics.path.read_bytes().splitlines(keepends=True)
    aside = run.path / "metrics.jsonl.dropped"
    aside.write_bytes(b"".join(lines[1:]))
    assert run.keep_until(0).num_steps == 2
    assert aside.read_bytes() == b"".join(lines[1:])
    aside.write_bytes(b"cut")
    run.metrics.path.write_bytes(b'[1]\n{"step": null}\n' + lines[0] + lines[2])
    assert run.keep_until(0) == (1, {"metrics.jsonl": 2})
    assert aside.read_bytes() == b'cut\n[1]\n{"step": null}\n' + lines[2]
    assert run.metrics.path.read_bytes() == lines[0]


def test_keep_until_drops_later_steps_that_wait_for_the_disk(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    """A restart goes on from step 2 while the records of 2 and 3 could not be written yet: 3 is made again."""
    run.log_metrics(1, {"reward": 1.0})
    path, run.metrics.path = run.metrics.path, run.path / "no such folder" / "metrics.jsonl"
    run.log_metrics(2, {"reward": 2.0})
    run.log_metrics(3, {"reward": 3.0})
    run.metrics.path = path
    assert run.keep_until(2).num_steps == 1
    run.log_metrics(3, {"reward": 4.0})
    assert [(record["step"], record["reward"]) for record in read_jsonl(path)] == [(1, 1.0), (2, 2.0), (3, 4.0)]
    assert "nothing was lost" in caplog.text and "removed or cut" not in caplog.text


# ------------------------------------------------------------------------------------------------------- the last word


@pytest.mark.usefixtures("pictures")
def test_finish_draws_the_curves(run: RunFolder) -> None:
    for step in range(4):
        run.log_metrics(step, {"reward": step / 4, "entropy": 2.0, "timing/step": 1.0})
    run.log_metrics(4, {"eval/accuracy": 0.5, "eval/reward": 0.4})
    run.finish()
    with Image.open(run.path / "curves.png") as picture:
        picture.load()
        assert picture.format == "PNG" and picture.size == (1419, 770)  # two rows of three pictures
        assert len(set(picture.convert("L").tobytes())) > 10


@needs_full
@pytest.mark.usefixtures("pictures")
def test_finish_writes_what_waited(run: RunFolder) -> None:
    there, run.metrics.path = run.metrics.path, FULL
    run.log_metrics(1, {"reward": 1.0})
    with pytest.raises(HybridRLError, match=r"/dev/full: the disk is full .* call trainer.save\(\)"):
        run.finish()
    run.metrics.path = there
    run.finish()
    assert read_jsonl(there) == [{"step": 1, "reward": 1.0}] and (run.path / "curves.png").exists()


def test_files_that_others_could_not_write_are_named_too(run: RunFolder) -> None:
    """The ranks write the samples; what they lost is told with the driver's own."""
    lost = [run.path / "samples-rank1.jsonl", run.path / "samples-rank3.jsonl"]
    run.log_metrics(1, {"reward": 1.0})
    with pytest.raises(HybridRLError, match=rf"^{lost[0]}, {lost[1]}: the disk is full"):
        run.finish(iter(lost))
    run.finish([])
    assert read_jsonl(run.metrics.path) == [{"step": 1, "reward": 1.0}]


@pytest.mark.usefixtures("pictures")
def test_a_picture_that_cannot_be_drawn_ends_no_run(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    (run.path / "curves.png").mkdir()
    run.log_metrics(1, {"reward": 1.0})
    run.finish()
    assert "cannot draw" in caplog.text
