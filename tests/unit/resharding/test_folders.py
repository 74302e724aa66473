"""What checkpoints and versions of the disk handoff have in common; see also test_checkpoint.py and test_disk.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.errors import CheckpointError, PeerFailedError
from hybrid_rl.resharding import folders


def other_rank(answer: Any) -> Any:
    """A gather in which rank 1 answers this."""
    return lambda mine: [mine, answer]


def test_all_get_what_all_did() -> None:
    assert folders.agreed(other_rank(("theirs", None)), lambda: "mine") == ["mine", "theirs"]


def test_a_failure_elsewhere_is_raised_here() -> None:
    with pytest.raises(folders.ElsewhereError, match="rank 1: OSError: full"):
        folders.agreed(other_rank((None, ("OSError: full", False))), lambda: 1)
    with pytest.raises(PeerFailedError, match="rank 1: RuntimeError: gone"):
        folders.agreed(other_rank((None, ("RuntimeError: gone", True))), lambda: 1)


def test_a_failure_is_told_before_it_is_raised() -> None:
    """Ctrl-C too: else the others would wait for this rank."""
    told: list[Any] = []

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folders.agreed(lambda value: [told.append(value)], stop)
    assert told == [(None, ("KeyboardInterrupt: ", False))]


def test_a_folder_that_this_rank_does_not_see(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 3 on .* does not see .*/absent, which rank 0 made"):
        folders.write_part(tmp_path / "absent", {"a": torch.ones(2)}, 3)


def test_what_a_file_holds(tmp_path: Path) -> None:
    written = folders.write_part(tmp_path, {"a": torch.ones(2)}, 0)
    ((name, content),) = written.items()
    path = tmp_path / name
    assert content == folders.Content.of(path) and content.problem_of(path) is None
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\1")
    assert content.problem_of(path) == "its content is not what was written"
    assert content.problem_of(path, is_read=False) is None
    path.write_bytes(data[:-1])
    assert content.problem_of(path, is_read=False) == f"it has {len(data) - 1} bytes, but {len(data)} were written"
    path.unlink()
    assert content.problem_of(path) == "it is missing"


def test_a_manifest_tells_of_all_files(tmp_path: Path) -> None:
    """Those that another rank has read are not read again: its word counts."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    told = folders.Content(7, "of another rank")
    folders.write_manifest(tmp_path, {"b": told}, version=3)
    found = folders.read_manifest(tmp_path)
    assert found is not None
    assert found[0] == {"b": told, "inner/a": folders.Content.of(tmp_path / "inner" / "a")}
    assert found[1]["version"] == 3
    text = json.loads((tmp_path / folders.MANIFEST_FILE).read_text())
    text["files"]["b"]["size"] = 8
    (tmp_path / folders.MANIFEST_FILE).write_text(json.dumps(text))
    with pytest.raises(ValueError, match="manifest.json is damaged: ValueError: its content does not match its hash"):
        folders.read_manifest(tmp_path)
    (tmp_path / folders.MANIFEST_FILE).unlink()
    assert folders.read_manifest(tmp_path) is None


@pytest.mark.parametrize("fails", [None, "before", "after"])
def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path, fails: str | None) -> None:
    """Whatever fails, and wherever: the old one or the new one has the name, and nothing else is there."""
    folder, partial, replaced = tmp_path / "x", tmp_path / ".x.new", tmp_path / ".x.old"
    folder.mkdir()
    (folder / "old").touch()

    def write() -> None:
        with folders.replacing(folder, partial, replaced, is_leader=True):
            partial.mkdir()
            (partial / "new").touch()
            if fails == "before":
                folder.rename(replaced)  # killed between the two renames
                raise KeyError
            folders.put_in_place(folder, partial, replaced)
            if fails == "after":
                raise KeyError

    if fails is None:
        write()
    else:
        with pytest.raises(KeyError):
            write()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert [path.name for path in folder.iterdir()] == ["old" if fails == "before" else "new"]
