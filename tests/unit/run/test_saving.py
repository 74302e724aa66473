"""What a run tells of checkpoints that failed in the background."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.checkpoint.background import GIVEN_UP, Progress
from hybrid_rl.run.saving import Saving

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
def test_the_rank_is_named_that_failed_by_itself(errors: tuple[str, str], told: str, tmp_path: Path) -> None:
    ended, failures = list[bool](), list[Exception]()
    policy = SimpleNamespace(
        has_ended=False,
        save_progress=lambda _: [Progress(is_done=bool(error), error=error, seconds=1.0) for error in errors],
        end_save=lambda *, is_given_up: ended.append(is_given_up),
    )
    run: Any = SimpleNamespace(policy=policy, _saving=tmp_path / "checkpoint-5", _save_due=False)
    run._cleared_up, run._note_failure = lambda *_, **__: nullcontext(), failures.append
    Saving._look_at_save(run)
    assert ended == [True] and run._saving is None and run._save_due
    (failure,) = failures
    assert told in str(failure) and "checkpoint-5" in str(failure)
