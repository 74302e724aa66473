"""Pictures of the documentation: `python docs/pictures.py [RUN] [--real RUN]`.

RUN: the folder of a run of the quickstart (`make run`, or `hybrid-rl quickstart`); --real: of one with SmolLM2 (`make
real`). Their numbers are kept in docs/pictures/quickstart.json and smollm2.json, from which the pictures are drawn;
without a run those that are kept are drawn again. With RUN and Chromium the pictures of the report are taken as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

HERE = Path(__file__).resolve().parent / "pictures"
NUMBERS, REAL_NUMBERS = HERE / "quickstart.json", HERE / "smollm2.json"
sys.path.insert(0, str(HERE.parents[1]))

STEPS_SHOWN = 4  # in the strip of phases
PHASES = (("generate", "generate"), ("update", "update"), ("publish", "hand off"))
DARK = {
    "back": "#0d1117",
    "text": "#e6edf3",
    "soft": "#9198a1",
    "grid": "#30363d",
    "blue": "#4493f8",
    "orange": "#f0883e",
}
DARK |= {"green": "#3fb950", "purple": "#ab7df8"}
LIGHT = {
    "back": "#ffffff",
    "text": "#1f2328",
    "soft": "#59636e",
    "grid": "#d1d9e0",
    "blue": "#0969da",
    "orange": "#d9671f",
}
LIGHT |= {"green": "#1a7f37", "purple": "#8250df"}


def main(arguments: Sequence[str]) -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--real", type=Path)
    given = parser.parse_args(arguments)
    HERE.mkdir(exist_ok=True)
    run: Path | None = given.run
    for file, numbers in ((NUMBERS, run and numbers_of(run)), (REAL_NUMBERS, given.real and curves_of(given.real))):
        if numbers:
            file.write_text(json.dumps(numbers, indent=1) + "\n")
    small, real = json.loads(NUMBERS.read_text()), json.loads(REAL_NUMBERS.read_text())
    for name, colors in (("hero.png", LIGHT), ("hero-dark.png", DARK)):
        draw_hero(small, real, colors, HERE / name)
    if run is not None:
        asyncio.run(take_report(run))
    for path in sorted(HERE.glob("*.png")):
        print(f"{path.relative_to(HERE.parents[1])}: {path.stat().st_size / 1000:.0f} kB")


def curves_of(run: Path) -> dict[str, Any]:
    """Return the accuracies of a run on held-out problems, and its rewards; with groups that were dropped, which say
    more of what it can do than those that were kept."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [
        [one["step"], round(one.get("collect/reward_all", one["reward"]), 4)] for one in metrics if "reward" in one
    ]
    accuracies = [[one["step"], one["eval/accuracy"]] for one in metrics if "eval/accuracy" in one]
    return {"evaluations": accuracies, "rewards": rewards}


def numbers_of(run: Path) -> dict[str, Any]:
    """Return what the picture shows of a run of the small model: its curves, the accuracies of supervised learning, and
    a few steps whose time is as usual: that of all neighbours without an evaluation or a probe whose seconds are the
    median."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timeline = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    windows = [timeline[start : start + STEPS_SHOWN] for start in range(1, len(timeline) - STEPS_SHOWN)]
    windows = [window for window in windows if _is_usual(window)]
    windows.sort(key=lambda window: window[-1]["start"] + window[-1]["seconds"] - window[0]["start"])
    window = windows[len(windows) // 2]
    begin = window[0]["start"]
    spans = [
        [name, round(1000 * (one["start"] - begin + start), 3), round(1000 * seconds, 3)]
        for one in window
        for name, start, seconds in one["ranks"][0]
        if start >= 0
    ]
    return curves_of(run) | {
        "comparison": json.loads((run / "comparison.json").read_text()),
        "steps": [[one["step"], round(1000 * (one["start"] - begin), 3)] for one in window],
        "spans": spans,
        "milliseconds": round(1000 * (window[-1]["start"] + window[-1]["seconds"] - begin), 3),
        "tokens_per_step": metrics[window[0]["step"]]["num_tokens"] / window[0]["step"],
    }


def _is_usual(window: Sequence[Mapping[str, Any]]) -> bool:
    drivers = {name for one in window for name, _, _ in one["phases"]}
    on_rank = {name for one in window for name, _, _ in one["ranks"][0]}
    return "evaluation" not in drivers and "check" not in on_rank


def draw_hero(small: Mapping[str, Any], real: Mapping[str, Any], colors: Mapping[str, str], picture: Path) -> None:
    """Draw accuracy over steps of both models beside the phases of a few steps of the small one over time."""
    figure = Figure(figsize=(16.4, 4.7), layout="constrained", facecolor=colors["back"])
    panels = figure.subplots(1, 3, width_ratios=[1.1, 1.0, 0.8])
    for axes in panels:
        axes.set_facecolor(colors["back"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(colors["grid"])
        axes.tick_params(colors=colors["soft"], labelsize=10)
        axes.xaxis.label.set_color(colors["soft"])
        axes.grid(color=colors["grid"], alpha=0.55, linewidth=0.7)
        axes.set_axisbelow(True)
    curve, real_curve, strip = panels
    _curve(curve, small, colors)
    _supervised(curve, small, colors)
    _title(curve, "A small model learns sums from right and wrong alone", colors)
    _curve(real_curve, real, colors)
    real_curve.legend(fontsize=10, frameon=False, labelcolor=colors["text"], loc="lower right")
    real_curve.set_ylim(0.0, 1.0)
    _title(real_curve, "SmolLM2-135M learns them in plain words", colors)
    _strip(strip, small, colors)
    figure.get_layout_engine().set(wspace=0.05)
    figure.savefig(picture, dpi=150, facecolor=colors["back"])
    _shrink(picture)


def _title(axes: Any, text: str, colors: Mapping[str, str]) -> None:
    axes.set_title(text, color=colors["text"], fontsize=13, fontweight="bold", loc="left", pad=12)


def _curve(axes: Any, numbers: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    """Draw the accuracy on held-out problems, and the reward of samples."""
    steps, accuracies = zip(*numbers["evaluations"], strict=True)
    trained, rewards = zip(*numbers["rewards"], strict=True)
    axes.plot(trained, rewards, color=colors["blue"], alpha=0.45, linewidth=1, label="training problems, sampled")
    held_out = {"color": colors["blue"], "linewidth": 2.6, "marker": "o", "markersize": 6}
    axes.plot(steps, accuracies, label="held-out problems, greedy", **held_out)
    note = {"textcoords": "offset points", "fontsize": 15, "fontweight": "bold", "color": colors["blue"]}
    first, last = f"{accuracies[0]:.1%}".replace(".0%", "%"), f"{accuracies[-1]:.0%}"
    axes.annotate(first, (steps[0], accuracies[0]), (13, 4), **note)
    axes.annotate(last, (steps[-1], accuracies[-1]), (0, -25), ha="right", **note)
    axes.set_xlim(-0.025 * steps[-1], 1.025 * steps[-1])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("training step", fontsize=10)
    axes.set_ylabel("right answers", fontsize=10, color=colors["soft"])


def _supervised(axes: Any, numbers: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    """Draw how far supervised learning gets in the same time."""
    start, _, imitating, right = (one["accuracy"] for one in numbers["comparison"])
    baseline = {"linestyle": "--", "linewidth": 1.5}
    axes.axhline(right, color=colors["soft"], **baseline)
    axes.axhline(imitating, color=colors["orange"], **baseline)
    last, says = numbers["evaluations"][-1][0], {"fontsize": 10, "ha": "right"}
    text = "supervised on right solutions, same time"
    axes.text(last, right + 0.012, text, color=colors["soft"], va="bottom", **says)
    text = f"supervised on more demonstrations, same time: {imitating:.0%}"
    axes.text(last, imitating - 0.012, text, color=colors["orange"], va="top", **says)
    axes.set_ylim(min(imitating, start) - 0.13, 1.08)
    axes.set_yticks([0.4, 0.6, 0.8, 1.0])
    axes.legend(fontsize=10, frameon=False, labelcolor=colors["text"], loc="center right", bbox_to_anchor=(1.0, 0.42))


def _strip(axes: Any, numbers: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    shades = dict(zip((name for name, _ in PHASES), (colors[one] for one in ("blue", "orange", "green")), strict=True))
    least = 0.004 * numbers["milliseconds"]  # so that what takes microseconds is seen at all
    for row, (name, _) in enumerate(PHASES):
        spans = [(start, max(length, least)) for phase, start, length in numbers["spans"] if phase == name]
        axes.broken_barh(spans, (row - 0.32, 0.64), color=shades[name], linewidth=0)
    for step, start in numbers["steps"]:
        axes.axvline(start, color=colors["soft"], linewidth=0.8, linestyle=":")
        axes.text(start + 0.006 * numbers["milliseconds"], -0.72, f"step {step}", fontsize=9.5, color=colors["soft"])
    axes.set_yticks(range(len(PHASES)), [label for _, label in PHASES], fontsize=11, color=colors["text"])
    axes.set_ylim(len(PHASES) - 0.5, -1.0)
    axes.set_xlim(0, numbers["milliseconds"])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds", fontsize=10)
    _title(axes, "One set of weights, in turn", colors)


async def take_report(run: Path) -> None:
    """Take pictures of the report of a run."""
    from hybrid_rl.extras.report import write_report
    from tests.browser.chromium import Page, executable

    if executable() is None:
        print("no Chromium: the pictures of the report stay as they are")
        return
    with tempfile.TemporaryDirectory() as folder:
        report = write_report(run, Path(folder) / "report.html")
        async with Page(1360, 860) as page:
            await page.open(report, "document.documentElement?.dataset.ready === 'true'")
            await asyncio.sleep(1.0)  # until the last picture is drawn
            _shrink(await page.picture(HERE / "report.png"))
            await page.run("document.querySelector('#coloured').click()")
            await page.run("document.querySelector('[data-column=step]').click()")
            await page.run("document.querySelector('[data-column=step]').click()")
            rows = "[...document.querySelectorAll('#samples tbody tr')]"
            await page.run(
                f"{rows}.find((row) => [...row.cells].some((cell) => cell.textContent.startsWith('-'))).click()"
            )
            await page.run(f"{rows}.slice(8).forEach((row) => row.remove())")
            await page.run("document.querySelector('[data-coloring=entropy]').click()")
            _shrink(await page.picture(HERE / "report-samples.png", "#samples-section"))


def _shrink(picture: Path, num_colors: int = 128) -> None:
    """Write a picture again with a palette: a third of the bytes."""
    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(num_colors, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
