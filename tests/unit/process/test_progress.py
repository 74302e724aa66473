"""Progress of this process and of ranks: what is counted belongs to the innermost work, and ranks are joined."""

from __future__ import annotations

import io
import sys
import time

import pytest

from hybrid_rl.process import importing, progress
from hybrid_rl.process.progress import Progress


def test_work_is_counted_where_it_is_counted() -> None:
    assert progress.here() == Progress()
    progress.advance()  # of nothing
    with progress.doing("evaluation"), progress.doing("rollout"):
        progress.count(8, "samples")
        progress.advance(3)
        progress.add_tokens(10)
        with progress.doing("rewards"):
            progress.advance()
            found = progress.here()
        assert (found.names, found.done, found.total, found.unit, found.tokens) == (
            ("evaluation", "rollout", "rewards"),
            4,
            8,
            "samples",
            10,
        )
        progress.count(2, "samples")
        assert progress.here().done == 0
    assert progress.here() == Progress()


def test_an_error_ends_the_work() -> None:
    with pytest.raises(ZeroDivisionError), progress.doing("rollout"):
        raise ZeroDivisionError
    assert progress.here().names == ()


def test_calls_that_overlap_end_their_own_work() -> None:
    """As those of ranks that generate and ranks that train."""
    ahead, update = progress.doing("go ahead"), progress.doing("update")
    ahead.__enter__()
    update.__enter__()
    ahead.__exit__(None, None, None)
    assert progress.here().names == ("update",)
    update.__exit__(None, None, None)
    assert progress.here().names == ()


def test_shares_of_ranks_are_added_and_common_work_is_as_far_as_the_slowest() -> None:
    shares = [
        Progress(("",), 3, 8, "samples", False, 30.0, 2.0),
        Progress(("",), 5, 8, "samples", False, 50.0, 3.0),
        Progress(("", "rewards"), 8, 8, "samples", False, 9.0, 9.0),
    ]
    assert progress.joined(shares) == Progress(("",), 8, 16, "samples", False, 80.0, 3.0)
    common = [Progress((), done, 4, "optimizer steps", True) for done in (3, 2, 4)]
    assert progress.joined(common) == Progress((), 2, 4, "optimizer steps", True)
    assert progress.joined([]) == Progress()


def test_what_ranks_say_stands_within_what_the_driver_does() -> None:
    with progress.doing("evaluation"), progress.doing("rollout"):
        progress.hear("policy", {0: Progress((), 3, 8, "samples"), 1: Progress((), 4, 8, "samples")})
        found = progress.everywhere()
        assert (found.names, found.done, found.total) == (("evaluation", "rollout"), 7, 16)
        progress.hear("policy", {0: Progress(("loading the model",)), 1: Progress(("loading the model",))})
        assert progress.everywhere().names == ("evaluation", "rollout", "loading the model")
        progress.forget("reference")
        assert len(progress.everywhere().names) == 3
        progress.forget("policy")
        assert progress.everywhere() == progress.here()


def test_who_watches() -> None:
    assert not progress.is_watched()
    with progress.watching():
        with progress.watching():
            pass
        assert progress.is_watched()
    assert not progress.is_watched()


def test_a_long_import_is_told_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        is_terminal = True

        def isatty(self) -> bool:
            return self.is_terminal

    monkeypatch.setattr(importing, "SOON_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    with importing.told("PyTorch"):
        while not stderr.getvalue():
            time.sleep(0.001)
    assert stderr.getvalue() == "importing PyTorch ...\r\x1b[K"
    monkeypatch.setattr(Terminal, "is_terminal", False)
    with importing.told("PyTorch"):
        time.sleep(0.02)
    assert stderr.getvalue() == "importing PyTorch ...\r\x1b[K"
