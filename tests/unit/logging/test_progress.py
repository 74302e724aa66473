"""The console of a run: lines that stay, live lines that fit, signs of life, and warnings once."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from hybrid_rl.logging import progress_display as module
from hybrid_rl.logging.lines import (
    History,
    bar_line,
    binned,
    clock,
    detail_lines,
    handoff_line,
    line_of,
    sparkline,
    step_line,
    work_line,
)
from hybrid_rl.logging.progress_display import ProgressDisplay
from hybrid_rl.logging.warned import AGAIN
from hybrid_rl.process import progress
from hybrid_rl.process.progress import Progress
from tests.support.inside.logs import begin_at, refresh, seconds_left

HANDOFF = {"handoff/version": 3.0, "handoff/bytes": 1234567.0, "timing/handoff": 0.0042}
METRICS = {
    "reward": 0.68,
    "completions/mean_length": 16.0,
    "entropy": 7.28,
    "grad_norm": 1.29,
    "step_time": 1.19,
    "eval/reward": 0.5,
    "eval/accuracy": 0.36,
    **HANDOFF,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def file() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_line_shows_what_its_step_brought(file: io.StringIO) -> None:
    """Accuracy is not there at every step: an old value is not shown again as if it were new."""
    display = ProgressDisplay(2, file=file)
    display.start(0)
    display.step(1, {"reward": 0.12345, "eval/accuracy": 0.5, "completions/mean_length": 7.25, "grad_norm": 1.0})
    display.step(2, {"reward": 0.5, "step_time": 0.25, "entropy": 2.0, **HANDOFF, "handoff/probe_gap": 4.8e-7})
    display.stop()
    first, second = file.getvalue().splitlines()
    assert first == "step 1/2  reward 0.123  len 7.2  |g| 1.00  eval accuracy 50.0%"
    handoff = "handoff v3: 1,234,567 B in 4.2 ms, probe gap 4.8e-07"
    assert second == f"step 2/2  reward 0.500  entropy 2.00  s/step 0.25  {handoff}"


@pytest.mark.parametrize(
    ("max_steps", "shown"),
    [
        *((short, list(range(1, short + 1))) for short in (1, 3, 40)),
        (1005, [1, *range(25, 1001, 25), 1005]),  # the first, the last and forty between
    ],
)
def test_short_runs_show_every_step_and_long_ones_some(file: io.StringIO, max_steps: int, shown: list[int]) -> None:
    display = ProgressDisplay(max_steps, file=file)
    for step in range(1, max_steps + 1):
        display.step(step, {"reward": 0.0})
    assert [int(number) for number in re.findall(r"^step +(\d+)/", file.getvalue(), re.MULTILINE)] == shown


@pytest.mark.parametrize("width", [30, 40, 60, 80, 180])
def test_lines_fit_and_keep_step_and_reward(width: int) -> None:
    line = step_line(9, 120, METRICS, width).plain
    assert len(line) <= width and line.startswith("step   9/120  reward 0.680")
    assert ("eval accuracy 36.0%" in line) == (width >= 60) and ("handoff" in line) == (width == 180)
    assert step_line(9, 120, METRICS, None).plain == step_line(9, 120, METRICS, 1000).plain


def test_a_step_that_holds_groups_says_how_many_how_old_and_how_full_the_engine_was() -> None:
    found = {"staleness/mean_age": 0.75, "engine/idle_share": 0.42}
    held = {"reward": 0.68, "buffer/held_share": 0.251, **found}
    assert step_line(1, 1, held, None).plain == "step 1/1  reward 0.680  held 25%  age 0.75  idle 42%"
    assert step_line(1, 1, held, 40).plain == "step 1/1  reward 0.680  held 25%"
    assert step_line(1, 1, {"reward": 0.68, **found}, None).plain == "step 1/1  reward 0.680"


def test_each_set_of_an_evaluation_has_its_accuracy_or_reward_and_the_last_ones_go_first() -> None:
    """Metrics of reward functions are no sets."""
    sets = {"eval/math/reward": 0.5, "eval/math/accuracy": 0.25, "eval/chat/reward": 0.75}
    metrics = {"reward": 0.68, **sets, "eval/chat/rewards/r/mean": 1.0, "eval/rewards/r/mean": 0.9}
    assert line_of(metrics) == "reward 0.680  eval math 25.0%  eval chat 0.750"
    assert step_line(1, 1, metrics, 40).plain == "step 1/1  reward 0.680  eval math 25.0%"
    assert step_line(1, 1, metrics, 8).plain == "step 1/1  reward 0.680"
    history = History()
    history.add(1, metrics)
    assert [title for title, _, _ in history.rows(is_plain=True)] == ["reward", "eval math", "eval chat"]


@pytest.mark.parametrize("width", [20, 36, 40, 76, 176])
@pytest.mark.parametrize("is_plain", [False, True])
def test_the_live_line_always_has_steps_and_times(width: int, is_plain: bool) -> None:
    """In 80 columns a bar with metrics beside it once showed neither."""
    line = bar_line(9, 120, 7.4, 86.0, width, is_plain=is_plain).plain
    assert re.search(r"9/120 .*0:00:07.*0:01:26", line) and (len(line) <= width or width == 20)
    assert line.isascii() == (is_plain or width < 60)
    assert "-:--:--" in bar_line(0, 120, 0.0, None, width, is_plain=is_plain).plain


def test_what_is_done_now() -> None:
    assert work_line(Progress()) == ""
    assert work_line(Progress(("update weights",))) == "weights to the engine"
    assert work_line(Progress(("update",), 3, 8, "optimizer steps", True)) == "update 3/8 optimizer steps"
    rollout = Progress(("evaluation", "rollout"), 24, 1064, "samples", False, 1536.0, 3.0)
    assert work_line(rollout) == "evaluation: rollout 24/1,064 samples, 512 tokens/s"


def test_detail_of_a_step() -> None:
    metrics = {"timing/update": 0.5, "timing/rollout": 0.25, "memory/actor_bytes": 2.5e6, "memory/kv_cache_bytes": 10.0}
    assert detail_lines({**metrics, "memory/moved": 1.0}) == [
        "seconds: rollout 0.250, update 0.500",
        "memory: actor 2.5 MB, kv cache 10 B",
    ]
    assert detail_lines(HANDOFF)[-1] == handoff_line(HANDOFF) and detail_lines({}) == []


@pytest.mark.parametrize("text", ["[red]not a colour[/red] [/]", "a\\", "x" * 500, "[link=http://a]b", ":smile:"])
def test_text_is_never_markup(file: io.StringIO, text: str) -> None:
    display = ProgressDisplay(1, file=file)
    display.message(text)
    assert file.getvalue() == text + "\n"


def test_live_lines_on_a_terminal_leave_only_lines_of_steps(terminal: Terminal) -> None:
    display = ProgressDisplay(10, file=terminal)
    with progress.doing("rollout", 64, "samples"):
        display.start(2)
        refresh(display)
        progress.advance(24)
        display.step(3, {"reward": 0.25})
        display.message("saved [here]")
        refresh(display)
        display.stop()
    display.stop()
    text = plain(terminal.getvalue())
    assert "2/10" in text and "3/10" in text and "reward 0.250" in text and "saved [here]" in text
    assert "rollout 24/64 samples" in text
    # The last thing written clears both live lines.
    assert terminal.getvalue().rstrip().endswith("\x1b[2K") and terminal.getvalue().count("\x1b[1A") >= 2


def test_live_lines_leave_room_for_an_interrupt(terminal: Terminal) -> None:
    """A terminal echoes ^C at their end; if that began a line, the live lines would stay in the scrollback."""
    display = ProgressDisplay(10, file=terminal)
    with progress.doing("x" * 200):
        display.start(2)
        display.stop()
    rows = plain(terminal.getvalue()).replace("\r", "\n").split("\n")
    assert any("xxx" in row for row in rows) and max(map(cell_len, rows)) <= 76


def test_no_colour_where_none_is_wanted(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    display = ProgressDisplay(1, file=terminal)
    display.step(1, METRICS)
    assert not re.search(r"\x1b\[(3|4|9)\d", terminal.getvalue()) and "reward 0.680" in plain(terminal.getvalue())


# ------------------------------------------------------------------------------------------------- signs of life


def test_a_start_tells_again_what_it_does_until_it_is_over(file: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.01)
    display = ProgressDisplay(1, file=file)
    with pytest.raises(ZeroDivisionError), display.starting("starting 2 ranks", "see logs", is_long=True):
        assert progress.is_watched()
        with progress.doing("loading the model"):
            wait_for(lambda: file.getvalue().count("\n") >= 3)
        raise ZeroDivisionError
    first, *told = file.getvalue().splitlines()
    assert first == "starting 2 ranks" and not progress.is_watched()
    said = {re.sub(r"\d+", "n", line) for line in told}
    assert "still starting n ranks: loading the model, for n s (see logs)" in said
    length = len(file.getvalue())
    time.sleep(0.03)
    assert len(file.getvalue()) == length


def wait_for(is_there: object, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not is_there():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_quick_start_says_nothing(file: io.StringIO) -> None:
    with ProgressDisplay(1, file=file).starting("starting"):
        pass
    assert file.getvalue() == ""


def test_a_long_step_gives_a_sign_without_a_terminal(file: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_SECONDS", 0.01)
    display = ProgressDisplay(9, file=file)
    display.start(4)
    with progress.doing("rollout", 64, "samples"):
        progress.advance(24)
        wait_for(lambda: "\n" in file.getvalue())
    display.stop()
    assert file.getvalue().splitlines()[0] == "step 5/9: rollout 24/64 samples, for 0 s"


def test_the_time_left_is_that_of_recent_steps(monkeypatch: pytest.MonkeyPatch, file: io.StringIO) -> None:
    clock_now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock_now[0])
    display = ProgressDisplay(100, "quiet", file=file)
    begin_at(display, 0.0)
    assert seconds_left(display) is None
    for step in range(1, 31):
        clock_now[0] += 10.0 if step <= 5 else 2.0
        display.step(step, {})
    # The last 20 intervals took 2 s each; 70 steps are left, of which half a second is over.
    clock_now[0] += 0.5
    assert seconds_left(display) == pytest.approx(139.5)


# ------------------------------------------------------------------------------------------------- levels


def test_quiet_shows_warnings_only(file: io.StringIO) -> None:
    display = ProgressDisplay(1, "quiet", file=file)
    display.message("saved")
    display.step(1, METRICS)
    display.completions(1, [sample()])
    display.summary(Path("runs/a"))
    assert file.getvalue() == ""


def test_debug_adds_what_a_step_spent(file: io.StringIO) -> None:
    ProgressDisplay(1, "debug", file=file).step(1, {"reward": 1.0, "timing/update": 0.5})
    assert file.getvalue().splitlines() == ["step 1/1  reward 1.000", "  seconds: update 0.500"]


def test_json_is_one_object_a_line(file: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    lone_logger = lone(monkeypatch)
    display = ProgressDisplay(500, "json", file=file)
    display.start(0)
    display.message('saved "here"\nnow')
    display.step(2, {"reward": 0.5, "broken": math.nan})
    lone_logger.warning("look: %d", 3)
    display.completions(2, [sample()])
    display.stop()
    display.summary(Path("runs/a"))
    records = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [record["kind"] for record in records] == ["message", "step", "warning", "completions", "summary"]
    assert records[0]["text"] == 'saved "here"\nnow' and records[1]["metrics"] == {"reward": 0.5}
    assert records[1]["step"] == 2 and records[1]["max_steps"] == 500
    assert records[2]["text"] == "look: 3" and records[3]["sample"]["reward"] == 0.5
    assert records[4]["steps"] == 1 and records[4]["folder"] == "runs/a"
    display.close()


def lone(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return the library's logger as in a program that has not set up logging; pytest has its handlers on both."""
    library = logging.getLogger("hybrid_rl")
    monkeypatch.setattr(library, "propagate", False)
    monkeypatch.setattr(library, "handlers", [])
    monkeypatch.setattr(library, "filters", [])
    return library


def test_a_warning_is_shown_once(file: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    lone_logger = lone(monkeypatch)
    display = ProgressDisplay(1, file=file)
    for text in ("full disk", "full disk", "other [b]"):
        lone_logger.warning(text)
    lone_logger.warning("full disk", extra=AGAIN)
    lone_logger.error("full disk")
    lone_logger.info("nothing")
    display.close()
    lone_logger.warning("after the end")
    assert file.getvalue().splitlines() == ["warning: full disk", "warning: other [b]", "warning: full disk"]
    later = ProgressDisplay(1, file=file)
    lone_logger.warning("full disk")
    later.close()
    assert file.getvalue().splitlines()[-1] == "warning: full disk"


def test_a_new_run_warns_though_an_earlier_one_is_still_open(
    file: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone_logger = lone(monkeypatch)
    first = ProgressDisplay(1, file=file)
    lone_logger.warning("look")
    second = ProgressDisplay(1, file=file)
    lone_logger.warning("look")
    lone_logger.warning("look")
    second.close()
    first.close()
    assert file.getvalue().splitlines() == ["warning: look"] * 2


def test_handlers_of_the_program_show_warnings_instead(file: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    lone_logger, theirs = lone(monkeypatch), io.StringIO()
    lone_logger.addHandler(logging.StreamHandler(theirs))
    display = ProgressDisplay(1, file=file)
    lone_logger.warning("look")
    lone_logger.warning("look")
    display.close()
    assert (file.getvalue(), theirs.getvalue()) == ("", "look\n")


def test_a_dropped_display_takes_its_handler_along(monkeypatch: pytest.MonkeyPatch, file: io.StringIO) -> None:
    lone_logger = lone(monkeypatch)
    display = ProgressDisplay(1, file=file)
    assert len(lone_logger.handlers) == 1
    del display
    assert lone_logger.handlers == [] and lone_logger.filters == []


# ------------------------------------------------------------------------------------------------- completions


def sample(**changes: object) -> dict[str, object]:
    return {
        "step": 5,
        "group": 0,
        "trajectory": 1,
        "turn": 0,
        "prompt": [{"role": "system", "content": "Be [b]brief[/b]."}, {"role": "user", "content": "3+4="}],
        "completion": "7 :smile:",
        "reward": 0.5,
        "rewards": {"right": 1.0, "digits": None},
        "finish_reason": "length",
        "row": {"answer": "7"},
        "advantage": -0.707,
        **changes,
    }


def test_completions_as_roles_and_text(file: io.StringIO) -> None:
    ProgressDisplay(1, file=file).completions(5, [sample()])
    assert file.getvalue().splitlines() == [
        "-- step 5, prompt 0, sample 1  reward 0.500 (right 1, digits none)  advantage -0.71  ended by length",
        "system      Be [b]brief[/b].",
        "user        3+4=",
        "assistant   7 :smile:",
        "answer      7",
    ]


@pytest.mark.parametrize("width", [20, 40, 80, 180])
def test_completions_fit(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = sample(prompt="two\n\nlines " + "long " * 50, completion="漢字" * 90, reward=None, rewards={"r": 1.0})
    ProgressDisplay(1, file=terminal).completions(5, [long, sample(row={}, advantage=None, finish_reason="stop")])
    lines = plain(terminal.getvalue()).splitlines()
    assert max(map(cell_len, lines)) <= width and "masked" in " ".join(lines)
    together = "".join(line.strip().removeprefix("completion").strip() for line in lines)
    assert "漢字" * 90 in together
    assert any(line.strip() == "user" for line in lines) == (width < 60)


def test_conversations_of_agents_and_long_texts(file: io.StringIO) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 3, "b": [1]}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "7"}]},
    ]
    long = sample(prompt="p" * 5000, messages=messages, error="ToolError: x", row={})
    ProgressDisplay(1, file=file).completions(5, [long])
    text = file.getvalue()
    assert "assistant   add(a=3, b=[1])" in text and "tool        7" in text and "error       ToolError: x" in text
    assert "... (3,200 characters; samples.jsonl has them) ..." in text


# ------------------------------------------------------------------------------------------------- the summary


def test_sparkline_bins_and_clock() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == "" and sparkline([math.nan, 0, 1]) == " ▁█"
    assert binned([1, 2, 3], 3) == [1, 2, 3] and binned([1, 3, 5, 7], 2) == [2, 6]
    assert sum(binned(list(range(100)), 24)) / 24 == pytest.approx(49.5, abs=0.5)
    assert [clock(s) for s in (0, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]


def test_summary_tells_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: io.StringIO) -> None:
    monkeypatch.chdir(tmp_path)
    display = ProgressDisplay(2, file=Console(file=file, width=80).file)  # type: ignore[arg-type]
    display.start(0)
    display.step(0, {"eval/accuracy": 0.36})
    display.step(1, {"reward": 0.25, "step_time": 1.0})
    display.step(2, {"reward": 0.75, "step_time": 2.0, "eval/accuracy": 0.99})
    display.stop()
    display.summary(tmp_path / "runs" / "a")
    arrow = "→" if "→" in file.getvalue() else "->"
    lines = [re.sub(r" +[▁█]+$", "", line) for line in file.getvalue().splitlines()]
    assert lines[-5:] == [
        "trained 2 steps in 0:00:00, 1.50 s each",
        f"  reward        0.250 {arrow} 0.750",
        f"  eval accuracy 36.0% {arrow} 99.0%",
        "  results       runs/a",
        "  look at them  hybrid-rl report runs/a",
    ]


def test_a_summary_counts_steps_that_come_again_once(tmp_path: Path, file: io.StringIO) -> None:
    """After step 2 a run goes back to step 1, and then to its beginning; what came later is forgotten."""
    display = ProgressDisplay(3, file=file)
    display.start(0)
    for last, reward in ((2, 0.25), (3, 0.5)):
        display.step(0, {"eval/accuracy": reward})
        for step in range(1, last + 1):
            display.step(step, {"reward": reward, "step_time": 2.0})
        display.start(1 if last == 2 else 0, goes_on=True)
    display.step(0, {"eval/accuracy": 0.75})
    display.step(1, {"reward": 0.75, "step_time": 3.0})
    display.step(2, {"reward": 1.0, "step_time": 4.0})
    display.stop()
    display.summary(tmp_path)
    lines = file.getvalue().replace("→", "->").splitlines()
    assert lines[-5].startswith("trained 2 steps in") and lines[-5].endswith(", 3.50 s each")
    assert lines[-4].startswith("  reward        0.750 -> 1.000") and lines[-3].strip() == "eval accuracy 75.0%"


def test_a_long_series_is_shown_by_means() -> None:
    history = History()
    for step in range(1, 97):
        history.add(step, {"reward": float(step)})
    [(title, change, spark)] = history.rows(is_plain=False)
    assert (title, change) == ("reward", "2.500 → 94.500") and spark.endswith("█  (means of 4 steps)")
    assert history.rows(is_plain=True)[0][1:] == ("2.500 -> 94.500", "  (means of 4 steps)")


def test_stop_without_start_and_no_summary_without_steps(file: io.StringIO) -> None:
    display = ProgressDisplay(1, file=file)
    display.stop()
    display.summary(Path("runs/a"))
    assert file.getvalue() == ""


def test_a_number_without_end_is_shown_by_its_exponent(file: io.StringIO) -> None:
    display = ProgressDisplay(1, file=file)
    display.step(1, {"reward": 1e299, "eval/reward": -2.5e6, "grad_norm": 999999.0})
    display.completions(1, [sample(reward=1e299)])
    lines = file.getvalue().splitlines()
    assert lines[0] == "step 1/1  reward 1e+299  |g| 999999.00  eval reward -2.5e+06"
    assert "reward 1e+299" in lines[1]
