"""What a run tells of checkpoints that failed in the background."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.checkpoint.background import GIVEN_UP, Progress
from hybrid_rl.run.position import Position
from hybrid_rl.run.saver import Saver
from tests.support.inside.trainers import is_saving, set_saving

FULL, GONE = "OSError: No space left on device", "FileNotFoundError: the hidden folder"


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ((FULL, GONE), f"rank 0: {FULL}"),  # the leader failed and removed the folder, in which the other was writing
        ((GIVEN_UP, FULL), f"rank 1: {FULL}"),
        (("", FULL), f"rank 1: {FULL}"),
        ((GIVEN_UP, GIVEN_UP), f"rank 0: {GIVEN_UP}"),
    ],
)
def test_the_rank_is_named_that_failed_by_itself(errors: tuple[str, str], told: str, tmp_path: Path, caplog) -> None:
    ended = list[bool]()
    policy = SimpleNamespace(
        has_ended=False,
        save_progress=lambda _: [Progress(is_done=bool(error), error=error, seconds=1.0) for error in errors],
        end_save=lambda *, is_given_up: ended.append(is_given_up),
    )
    position = Position(max_steps=9, step=5)
    crew: Any = SimpleNamespace(policy=policy, position=position, log=None)
    nothing: Any = None
    saver = Saver(crew, nothing, nothing, lambda *_: pytest.fail("it is announced"))
    set_saving(saver, tmp_path / "checkpoint-5")
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        saver.look()
    assert ended == [True] and not is_saving(saver) and position.save_due
    assert told in caplog.text and "checkpoint-5" in caplog.text
