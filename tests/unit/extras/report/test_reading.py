"""Files of runs that are under way, cut off or broken."""

from pathlib import Path

import pytest

from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.report import run_files as reading
from hybrid_rl.extras.report import write_report
from hybrid_rl.extras.report.runs import load, names_of
from hybrid_rl.extras.report.write import report_data
from tests.support.run_case import write_run


def test_a_line_that_is_cut_short_is_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "reward": NaN}\n{"step": 2, "reward": 0.5}\nrubbish\n[1]\n{"step": 3, "rew')
    assert reading.records(path) == ([{"step": 1, "reward": None}, {"step": 2, "reward": 0.5}], 3)


def test_a_step_that_was_made_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 1}\n{"step": 1, "a": 2}\n{"step": 2, "a": 3}\n')
    assert reading.records(path) == ([{"step": 1, "a": 2}, {"step": 2, "a": 3}], 0)


def test_places_are_those_of_the_records(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    lines = ['{"step": 7, "completion": "\u2028\u0085"}', '{"completion": "x", "step": 8}', '{"step": 9, "comp']
    path.write_text("\n".join(lines), encoding="utf-8")
    places = list(reading.places(path))
    assert [place.step for place in places] == [7, 8, None]
    assert reading.at(places[0]) == {"step": 7, "completion": "\u2028\u0085"}
    assert reading.at(places[1]) == {"step": 8, "completion": "x"}


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("metrics.jsonl", "", "no training step is recorded yet"),
        ("metrics.jsonl", '{"step": 1}\n{"st', "metrics.jsonl: 1 line left out, because"),
        ("timeline.jsonl", '{"step": 1, "start": "x"}\n', "timeline.jsonl: 1 line left out, because"),
        ("samples.jsonl", "\n\n", "samples*.jsonl: 2 lines left out, because"),
        ("config.yaml", "a: [", "config.yaml cannot be read"),
        ("config.yaml", "just text", "config.yaml cannot be read"),
    ],
)
def test_what_is_broken_is_left_out_and_said(tmp_path: Path, name: str, content: str, note: str) -> None:
    run = write_run(tmp_path / "run", 3)
    assert load(run, "run").shown["notes"] == []
    (run / name).write_text(content)
    assert any(said.startswith(note) for said in load(run, "run").shown["notes"])


def test_numbers_beyond_those_of_a_float_are_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)
    huge = "9" * 400
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run / name, "a") as file:
            file.write(f'{{"step": 1e400}}\n{{"step": {huge}}}\n{{"step": 2, "reward": {huge}}}\n')
    shown = load(run, "run").shown
    assert [note for note in shown["notes"] if note.startswith("metrics.jsonl: 2 lines left out")]
    place, values = shown["curves"]["metrics"]["reward"]
    assert shown["curves"]["axes"][place] == [1] and len(values) == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "timeline.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", 1)
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(ConfigError, match=f"cannot read .*{name}: Is a directory"):
        write_report(run)


def test_a_page_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path, monkeypatch) -> None:
    page = write_report(write_run(tmp_path / "run", 1))
    good = page.read_bytes()

    def half(path: Path, text: str, **_: str) -> None:
        with open(path, "w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(ConfigError, match="No space left"):
            write_report(page.parent)
    assert page.read_bytes() == good and not list(page.parent.glob(".report*"))


@pytest.mark.parametrize("name", ["environment.json", "memory.json"])
@pytest.mark.parametrize("content", ["", "[1]", '{"moments": [1], "bytes": {"a": []}, "phases": []}', "\x00"])
def test_broken_details_are_as_missing_ones(tmp_path: Path, name: str, content: str) -> None:
    run = write_run(tmp_path / "run", 2)
    (run / name).write_text(content)
    shown = load(run, "run").shown
    assert shown["memory"] == {} if name == "memory.json" else shown["summary"]["model"] is None


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "grpo", 1) for folder in ("a", "b")]
    assert names_of(runs) == ["a/grpo", "b/grpo"]
    assert names_of(runs[:1]) == ["grpo"]
    assert [run["name"] for run in report_data(runs)["runs"]] == ["a/grpo", "b/grpo"]


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", 1)
    with pytest.raises(ConfigError, match="is not a run folder: .*; runs in it: mine"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="missing is not a folder; give run folders"):
        write_report([tmp_path / "mine", tmp_path / "missing"])
    with pytest.raises(ConfigError, match="at least one"):
        write_report([])
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "mine", tmp_path / "mine" / "config.yaml" / "report.html")
