"""save_total_limit: old checkpoints go, those that are needed stay."""

import logging
from pathlib import Path

import pytest

from hybrid_rl.checkpoint.rotation import delete_oldest
from hybrid_rl.resharding.folders import MANIFEST_FILE, write_manifest
from tests.support.tiny import exact, sums


def whole(folder: Path) -> Path:
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "weights").write_text("abc")
    write_manifest(folder, {})
    return folder


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*") if path.name[-1].isdigit())


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, [], [2, 4, 6, 10]),
        (9, [], [2, 4, 6, 10]),
        (2, [], [6, 10]),
        (1, [], [10]),  # by number, not by name: 10 is the newest
        (2, [2], [2, 10]),  # it counts, as the best one does in transformers
        (1, [2, 6], [2, 6, 10]),
        (3, [2], [2, 6, 10]),
    ],
)
def test_what_goes(tmp_path: Path, limit, keep, left) -> None:
    for step in (2, 4, 6, 10):
        whole(tmp_path / f"checkpoint-{step}")
    for other in ("checkpoint-3.abandoned", "checkpoint-best", "mine"):
        (tmp_path / other).mkdir()
    gone = delete_oldest(tmp_path, limit, [tmp_path / f"checkpoint-{step}" for step in keep] + [None])
    assert steps_in(tmp_path) == left
    assert sorted(int(path.name.split("-")[1]) for path in gone) == sorted({2, 4, 6, 10} - set(left))
    assert all((tmp_path / other).exists() for other in ("checkpoint-3.abandoned", "checkpoint-best", "mine"))


@pytest.mark.parametrize("damage", ["cut", "missing", "no manifest", "bad manifest"])
def test_what_is_damaged_never_takes_the_place_of_what_is_whole(tmp_path: Path, damage: str) -> None:
    """Of two that may stay, the older is the only one that a run can go on from."""
    for step in (1, 2, 3):
        whole(tmp_path / f"checkpoint-{step}")
    broken = tmp_path / "checkpoint-3"
    if damage == "cut":
        (broken / "inside" / "weights").write_text("ab")
    elif damage == "missing":
        (broken / "inside" / "weights").unlink()
    elif damage == "no manifest":
        (broken / MANIFEST_FILE).unlink()
    else:
        (broken / MANIFEST_FILE).write_text("{")
    assert delete_oldest(tmp_path, 2, []) == []
    assert delete_oldest(tmp_path, 1, []) == [tmp_path / "checkpoint-1"]
    assert steps_in(tmp_path) == [2, 3]


def test_one_that_cannot_be_deleted_is_told_of(tmp_path: Path, monkeypatch, caplog) -> None:
    for step in (1, 2):
        whole(tmp_path / f"checkpoint-{step}")

    def fails(path):
        raise PermissionError("no")

    monkeypatch.setattr("hybrid_rl.checkpoint.rotation.shutil.rmtree", fails)
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        assert delete_oldest(tmp_path, 1, []) == []
    assert "checkpoint-1 is more than save_total_limit=1, but cannot be deleted: no" in caplog.text


def test_a_run_keeps_what_it_came_from_and_what_is_best(make_trainer, capsys) -> None:
    keys = {"save_steps": 1, "run_name": "run", "save_total_limit": 2}
    first = make_trainer(max_steps=3, **keys)
    first.fit()
    assert steps_in(first.run_folder) == [2, 3]
    first.save(first.run_folder / "elsewhere")
    assert "elsewhere\n" in capsys.readouterr().err
    first.close()
    second = make_trainer(max_steps=6, resume="auto", **keys)
    second.fit()
    assert steps_in(second.run_folder) == [3, 6]
    metric = {"metric_for_best_model": "reward", "greater_is_better": False, "eval_steps": 1}
    third = make_trainer(reward_funcs=exact, eval_dataset=sums(2), max_steps=4, **keys | {"run_name": "best"}, **metric)
    third.fit()
    assert steps_in(third.run_folder) == [1, 4]  # nothing is solved: the first evaluation stays the best
