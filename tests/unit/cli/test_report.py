"""`hybrid-rl report`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid_rl.cli import app, main
from tests.support.run_case import write_run

RUNNER = CliRunner()


def test_a_page_is_written_where_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(write_run(tmp_path / name, 2)) for name in ("a", "b")]
    one = RUNNER.invoke(app, ["report", runs[0]])
    assert one.exit_code == 0 and "report.html (2." in one.output.replace("\n", "")
    assert (tmp_path / "a" / "report.html").exists()
    assert RUNNER.invoke(app, ["report", *runs]).exit_code == 0 and (tmp_path / "report.html").exists()
    assert RUNNER.invoke(app, ["report", *runs, "-o", "new/x.html"]).exit_code == 0
    assert "a, b - hybrid_rl" in (tmp_path / "new" / "x.html").read_text(encoding="utf-8")


def test_a_folder_without_a_run_is_an_error_that_says_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "mine", 1)
    assert main(["report", str(tmp_path)]) == 1
    assert "runs in it: mine" in "".join(capsys.readouterr().err.split("\n"))


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text('[{"prompt": "1"}]')
    write_run(tmp_path / "run", 1)
    assert main(["report", "run", "--to", ""]) == 1 and not (tmp_path / "report.html").exists()
    assert main(["data", ""]) == 1
    said = capsys.readouterr().err
    assert "the file of the report has an empty name" in said and "the path of the data is empty" in said
