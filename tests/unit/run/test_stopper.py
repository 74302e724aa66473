"""Who may end a `fit()` early, without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.errors import DivergedError
from hybrid_rl.run.position import Position
from hybrid_rl.run.stopper import Stopper


def made(folder: Path, *, is_over: bool = False, evaluated_step: int = 0) -> tuple[Stopper, Any, list[str]]:
    """A stopper after step 3 of 9, the parts that it was given, and what it did."""
    done: list[str] = []
    best = SimpleNamespace(is_over=is_over, evaluated_step=evaluated_step, reason=lambda: "enough")
    parts = SimpleNamespace(
        best=best,
        folder=folder,
        policy=SimpleNamespace(has_ended=False),
        guard=SimpleNamespace(is_torn=False),
        run=SimpleNamespace(checkpoint=None),
        display=SimpleNamespace(message=done.append),
        work=["fit()"],
        lost=None,
        is_taken_up=True,
        finish=lambda: done.append("waited"),
        keep_last_step=lambda: done.append("kept"),
    )
    parts.position, parts.log = Position(max_steps=9, step=3), parts
    return Stopper(parts, parts, parts), parts, done


def test_fit_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    stopper, parts, _ = made(tmp_path)
    stopper.begin(is_whole=True)
    assert stopper.has_steps(None) and stopper.has_steps(4) and not stopper.has_steps(3)
    stopper.ask()
    assert not stopper.has_steps(None)
    parts.work = []
    stopper.ask()
    assert not stopper.is_asked  # nothing is under way that could end


def test_only_an_evaluation_of_this_fit_ends_it(tmp_path: Path) -> None:
    stopper, parts, done = made(tmp_path, is_over=True, evaluated_step=3)
    stopper.begin(is_whole=False)
    stopper.look()
    assert stopper.has_steps(5) and done == []
    parts.best.evaluated_step = 4
    stopper.look()
    assert not stopper.has_steps(5) and done == ["enough"]
    stopper.begin(is_whole=True)
    assert not stopper.has_steps(None)  # the run was stopped early before


@pytest.mark.parametrize(
    ("failure", "is_kept"), [(KeyboardInterrupt(), True), (DivergedError(), True), (OSError(), False)]
)
def test_what_ends_a_run_is_raised_after_the_last_step_is_safe(
    tmp_path: Path, failure: BaseException, is_kept: bool
) -> None:
    stopper, _, done = made(tmp_path)
    with pytest.raises(type(failure)) as raised:
        stopper.end(failure)
    assert raised.value is failure and done[0] == "waited" and ("kept" in done) is is_kept


def test_a_signal_keeps_the_last_step_and_names_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    stopper, _, done = made(tmp_path)
    stopper.stop.reason = "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        stopper.end(KeyboardInterrupt())
    assert done[0] == "kept" and f"resume from {tmp_path / 'checkpoint-2'}" in done[1] and stopper.stop.has_checkpoint
