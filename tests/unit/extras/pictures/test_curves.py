"""The picture of a run's curves: of any metrics, without warnings, or none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hybrid_rl.extras.pictures.curves import draw
from hybrid_rl.logging.run_folder import JsonLines, read_jsonl


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of earlier tests, whenever they are collected
@pytest.mark.parametrize(
    "extra",
    [
        {"mismatch/prob_difference_mean": 1e-7},
        {"mismatch/prob_difference_mean": 0.0},
        {"eval/hard/accuracy": 0.5, "completions/mean_length": 3.0, "pass@1": 0.5},
    ],
)
def test_runs_of_all_kinds_are_drawn_without_a_warning(tmp_path: Path, extra: dict[str, float]) -> None:
    JsonLines(tmp_path / "m.jsonl").write([{"step": step, **extra} for step in range(1, 31)])
    (tmp_path / "config.yaml").write_text("algorithm: {name: a$b$c}\neval: {eval_temperature: 0.0}\n")
    draw(read_jsonl(tmp_path / "m.jsonl"), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("records", [[], [{"step": 1, "num_tokens": 3.0}]])
def test_nothing_to_draw_draws_nothing(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    JsonLines(tmp_path / "m.jsonl").write(records)
    draw(read_jsonl(tmp_path / "m.jsonl"), tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_one_point_is_enough_for_a_picture(tmp_path: Path) -> None:
    JsonLines(tmp_path / "m.jsonl").write([{"step": 1, "reward": 3.0}])
    draw(read_jsonl(tmp_path / "m.jsonl"), tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        picture.verify()
