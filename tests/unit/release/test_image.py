"""release/image.py carries out Dockerfiles without Docker; and both Dockerfiles copy only what reaches the build."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.release.test_wheel import ROOT, load

PROGRAM = load("image")
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def test_instructions_are_joined_and_comments_left_out() -> None:
    text = "# base\nFROM a\n\nRUN one \\\n    # why\n    && two\nENV A=1\n"
    found = [(item.word, item.rest, item.line) for item in PROGRAM.instructions(text)]
    assert found == [("FROM", "a", 2), ("RUN", "one && two", 4), ("ENV", "A=1", 7)]


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("secret", True),
        ("dist/a.whl", False),
        ("src/deep/a.py", False),
        ("src/deep/a.so", True),
        ("src/deep/__pycache__/a.pyc", True),
        ("__pycache__", True),
    ],
)
def test_the_last_pattern_that_fits_decides(path: str, ignored: bool) -> None:
    assert PROGRAM.is_ignored(path, ["*", "!dist", "!src", "**/__pycache__", "**/*.so"]) is ignored


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes an image whose context has two files, one of them ignored; without virtual environments, which take
    seconds. Returns the folder of its first stage."""
    context = tmp_path / "context"
    (context / "src").mkdir(parents=True)
    (context / "src" / "a.py").write_text("1")
    (context / "src" / "a.so").write_text("2")
    (context / ".dockerignore").write_text("*\n!src\n**/*.so\n")
    monkeypatch.setattr(PROGRAM.venv, "create", lambda *_, **__: None)

    def make(text: str) -> Path:
        PROGRAM.make(tmp_path, context, list(PROGRAM.instructions(text)), {"WHO": "you"}, ["said again"])
        return tmp_path / "0" / "root"

    return make


def test_files_variables_and_commands_are_those_of_the_image(
    make: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = make(
        "FROM a\nRUN useradd --uid 1000 nobody-here\nWORKDIR /app\nARG WHO=me\nENV HOW=well\nCOPY src ./src\n"
        'RUN echo "$WHO $HOW" > said && cp said again\nENTRYPOINT ["cat"]\nCMD ["said"]\n',
    )
    app = root / "app"
    assert (app / "said").read_text() == "you well\n"
    assert [path.name for path in (app / "src").iterdir()] == ["a.py"]
    told = capsys.readouterr().out
    assert "not carried out: it changes the system" in told
    assert told.splitlines()[-2:] == ["entry point: cat said", "entry point: cat said again"]


@pytest.mark.parametrize(
    ("instruction", "said"),
    [
        ("RUN false && true", "line 2: ended with status 1"),
        ("COPY secret ./", "line 2: COPY secret finds nothing"),
        ("COPY src/a.so ./", "line 2: COPY src/a.so finds nothing that .dockerignore lets into"),
        ("VOLUME /data", "line 2: VOLUME is not known here"),
        ("COPY --from=b /app ./", "line 2: there is no stage b before"),
        ("FROM b\nCOPY --from=0 /src ./", "line 3: stage 0 has no folder /src"),
    ],
)
def test_what_fails_names_its_line(make: Callable[[str], Path], instruction: str, said: str) -> None:
    with pytest.raises(PROGRAM.Failed, match=re.escape(said)):
        make(f'FROM a\n{instruction}\nENTRYPOINT ["true"]\n')


def test_a_stage_has_only_what_is_copied_from_those_before(make: Callable[[str], Path]) -> None:
    root = make(
        "FROM a AS build\nWORKDIR /made\nENV HOW=well\nRUN echo 1 > one && echo 2 > ../two\n"
        'FROM b\nCOPY --from=build /made ./dist\nRUN test -z "$HOW" && echo x > said && cp said again\n'
        'ENTRYPOINT ["cat"]\nCMD ["said"]\n'
    )
    last = root.parents[1] / "1" / "root"
    assert sorted(path.name for path in last.rglob("*")) == ["again", "dist", "one", "said"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_is_there_and_leaves_nothing_to_chance(dockerfile: Path) -> None:
    found = list(PROGRAM.instructions(dockerfile.read_text()))
    patterns = PROGRAM.ignore_patterns(ROOT)
    for item in found:
        if item.word != "COPY" or "--from=" in item.rest:
            continue
        for source in shlex.split(item.rest)[:-1]:
            assert source.startswith("dist/") or (ROOT / source).exists(), f"COPY {source}"
            assert not PROGRAM.is_ignored(source, patterns), f"COPY {source}"
    for item in found:
        if "pip install" in item.rest:  # only of a set of versions that is in the repository
            assert re.search(r"-[cr] (constraints|requirements)[\w-]*\.txt", item.rest), item.rest
        if item.word == "FROM":
            assert re.match(r"[\w/]+:\d\S+", item.rest), f"{item.rest} has no version"
    words = [item.word for item in found]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert [item.rest for item in found if item.word == "ENTRYPOINT"] == ['["hybrid-rl"]']


def test_it_ends_with_the_status_of_the_build(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM a\nVOLUME /b\n")
    command = [sys.executable, str(ROOT / "release" / "image.py"), str(tmp_path / "Dockerfile")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "line 2: VOLUME is not known" in ended.stderr
