"""Progress for a person: plain lines if nobody watches live, a live line on a terminal, and text exactly as it is."""

from __future__ import annotations

import io
import math
import re
import threading
import time

import pytest

from hybrid_rl.logging import progress
from hybrid_rl.logging.progress import NUM_LINES, ProgressDisplay, handoff_line, still

HANDOFF = {"handoff/version": 3.0, "handoff/bytes": 1234567.0, "timing/handoff": 0.0042}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def file() -> io.StringIO:
    return io.StringIO()


def test_handoff_line() -> None:
    assert handoff_line({}) == ""
    assert handoff_line(HANDOFF) == "handoff v3: 1,234,567 B in 4.2 ms"
    probed = {**HANDOFF, "handoff/probe_gap": 4.8e-7}
    assert handoff_line(probed) == "handoff v3: 1,234,567 B in 4.2 ms, probe gap 4.8e-07"


def test_a_line_shows_what_its_step_brought(file: io.StringIO) -> None:
    """Accuracy is not there at every step: an old value is not shown again as if it were new."""
    display = ProgressDisplay(2, file=file)
    display.start(0)
    display.step(1, {"reward": 0.12345, "eval/accuracy": 0.5, "completions/mean_length": 7.25, "grad_norm": 1.0})
    display.step(2, {"reward": 0.5, "step_time": 0.25, "entropy": 2.0, **HANDOFF})
    display.stop()
    first, second = file.getvalue().splitlines()
    assert first.rstrip() == "step 1/2  reward 0.123  eval accuracy 50.0%  len 7.2  |g| 1.00"
    assert second == ("step 2/2  reward 0.500  entropy 2.00  s/step 0.25  handoff v3: 1,234,567 B in 4.2 ms")


@pytest.mark.parametrize(("max_steps", "shown"), [(1, [1]), (3, [1, 2, 3]), (40, list(range(1, 41)))])
def test_short_runs_show_every_step(file: io.StringIO, max_steps: int, shown: list[int]) -> None:
    assert shown_steps(file, max_steps) == shown


def test_long_runs_show_first_last_and_forty_between(file: io.StringIO) -> None:
    shown = shown_steps(file, 1005)
    assert shown == [1, *range(25, 1001, 25), 1005] and len(shown) == NUM_LINES + 2


def shown_steps(file: io.StringIO, max_steps: int) -> list[int]:
    display = ProgressDisplay(max_steps, file=file)
    for step in range(1, max_steps + 1):
        display.step(step, {"reward": 0.0})
    return [int(number) for number in re.findall(r"^step (\d+)/", file.getvalue(), re.MULTILINE)]


@pytest.mark.parametrize("text", ["[red]not a colour[/red] [/]", "a\\", "x" * 500, "[link=http://a]b", ":smile:"])
def test_text_is_never_markup(file: io.StringIO, text: str) -> None:
    display = ProgressDisplay(1, file=file)
    display.message(text)
    assert file.getvalue() == text + "\n"


def test_completions_as_they_are(file: io.StringIO) -> None:
    ProgressDisplay(1, file=file).completions(
        5, [((0, 0), "[b]2+2=", "[/b]4\\", 0.5), ((1, 0), "3+3=", ":smile:", math.nan)]
    )
    text = file.getvalue()
    assert "completions of step 5" in text
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines() if "=" in line]
    assert rows == [["[b]2+2=", "[/b]4\\", "0.500"], ["3+3=", ":smile:", "masked"]]


def test_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    display = ProgressDisplay(10, file=file)
    display.start(2)
    display.step(3, {"reward": 0.25})
    display.message("saved [here]")
    display.stop()
    display.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "2/10" in text and "3/10" in text and "reward 0.250" in text and "saved [here]" in text
    assert "step 3/10" not in text


def test_what_takes_long_is_told_again_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "STILL_SECONDS", 0.001)
    told: list[str] = []
    came = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            came.set()

    with pytest.raises(ZeroDivisionError), still(tell, "starting 2 ranks", "see logs"):
        assert told[0] == "starting 2 ranks" and came.wait(30)
        raise ZeroDivisionError
    assert {re.sub(r"\d+", "n", text) for text in told[1:]} == {"still starting n ranks, for n s: see logs"}
    num_told = len(told)
    time.sleep(0.02)
    assert len(told) == num_told


def test_what_is_quick_is_told_once() -> None:
    told: list[str] = []
    with still(told.append, "starting 2 ranks", "see logs"):
        pass
    assert told == ["starting 2 ranks"] and progress.STILL_SECONDS == 20


def test_stop_without_start(file: io.StringIO) -> None:
    ProgressDisplay(1, file=file).stop()
    assert file.getvalue() == ""


def test_a_number_without_end_is_shown_by_its_exponent(file: io.StringIO) -> None:
    display = ProgressDisplay(1, file=file)
    display.step(1, {"reward": 1e299, "eval/reward": -2.5e6, "grad_norm": 999999.0})
    display.completions(1, [((0, 0), "p", "c", 1e299)])
    lines = file.getvalue().splitlines()
    assert lines[0].rstrip() == "step 1/1  reward 1e+299  eval reward -2.5e+06  |g| 999999.00"
    assert max(map(len, lines)) < 80 and "1e+299" in lines[-2]
