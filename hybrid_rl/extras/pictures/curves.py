"""The picture of a run's curves, drawn when it ends."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_rl.extras.report.run_files import is_number, mapping
from hybrid_rl.extras.report.runs import config_keys

SMOOTHING = 0.8  # weight of the past in the thick lines
FEW = 25  # points that are drawn as they are, with marks
BLUE, ORANGE, GREEN, PURPLE, TEAL, OCHRE = "#2f6fce", "#d9671f", "#22883f", "#8a4fb5", "#1f9aa8", "#c9a227"
GREY, RED = "#59636e", "#cf222e"
# The parts of a step, from the bottom.
PARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("generation", ("timing/rollout",), BLUE),
    ("rewards", ("timing/reward", "timing/judge"), OCHRE),
    ("logprobs", ("timing/logprobs",), TEAL),
    ("update", ("timing/update",), ORANGE),
    ("handoff", ("timing/handoff", "timing/probe"), GREEN),
)
ACCURACY = re.compile(r"eval/([^/]+/)?accuracy")
GOOD_GAP, BAD_GAP = 0.005, 0.01  # mean difference of probabilities of engine and trainer, as verl judges it

Records = Sequence[Mapping[str, Any]]
Config = Mapping[str, Any]


def can_draw() -> bool:
    """Whether matplotlib is installed: without it a run has no pictures, and all else."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(records: Records, picture: Path) -> None:
    """Draw the main metrics of a run over its training steps as a PNG; nothing if there is none of
    them, or no matplotlib. The folder of
    the picture is the run's: its config.yaml and environment.json give the title."""
    names = {name for record in records for name in record}
    panels = [panel for panel in PANELS if any(fnmatchcase(name, need) for name in names for need in panel.needs)]
    if not panels or not can_draw():
        return
    from matplotlib.figure import Figure

    config, columns = config_keys(picture.parent / "config.yaml") or {}, min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1.2 + 3.9 * columns, 0.8 + 3.1 * rows), layout="constrained", facecolor="white")
    figure.suptitle(_title(picture.parent, config), fontsize=12, fontweight="bold", x=0.012, ha="left")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel.draw(axes, records, config)
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_xlabel("training step", fontsize=8, color=GREY)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8, colors=GREY)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7.5, frameon=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    figure.savefig(picture, dpi=110)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average of values, which begins at the first of them instead of at 0."""
    averages, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = SMOOTHING * total + (1 - SMOOTHING) * value, SMOOTHING * norm + (1 - SMOOTHING)
        averages.append(total / norm)
    return averages


def _known(records: Records, name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was recorded, and its values."""
    points = [(record["step"], record[name]) for record in records if isinstance(record.get(name), int | float)]
    return [step for step, _ in points], [float(value) for _, value in points]


def _line(axes: Any, records: Records, name: str, label: str, color: str) -> None:
    """Draw a metric: few points with marks; many as a pale line with a smoothed one over it."""
    steps, values = _known(records, name)
    if not steps:
        return
    if len(steps) < FEW:
        axes.plot(steps, values, marker="o", markersize=3.5, color=color, label=label, linewidth=1.6)
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smoothed(values), color=color, label=f"{label}, smoothed", linewidth=1.8)


def _decoding(config: Config) -> str:
    """Return how evaluations choose tokens, as a part of a label; "" if that is not known."""
    temperature = config.get("eval.eval_temperature")
    return ", greedy" if temperature == 0 else ", sampled" if temperature else ""


def _reward(axes: Any, records: Records, config: Config) -> None:
    _line(axes, records, "reward", "training, sampled", BLUE)
    _line(axes, records, "eval/reward", f"evaluation{_decoding(config)}", ORANGE)


def _accuracy(axes: Any, records: Records, config: Config) -> None:
    from matplotlib.ticker import PercentFormatter

    _line(axes, records, "pass@1", "training, sampled", BLUE)
    names = sorted({name for record in records for name in record if ACCURACY.fullmatch(name)})
    for name, color in zip(names, (ORANGE, GREEN, PURPLE, TEAL, OCHRE), strict=False):
        _line(axes, records, name, f"{'/'.join(name.split('/')[1:-1]) or 'evaluation'}{_decoding(config)}", color)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _entropy(axes: Any, records: Records, _: Config) -> None:
    _line(axes, records, "entropy", "mean of a token", PURPLE)
    axes.set_ylim(bottom=0)


def _length(axes: Any, records: Records, _: Config) -> None:
    steps, lowest = _known(records, "completions/min_length")
    highest = _known(records, "completions/max_length")[1]
    if steps and len(lowest) == len(highest):
        axes.fill_between(steps, lowest, highest, color=TEAL, alpha=0.15, linewidth=0, label="shortest to longest")
    _line(axes, records, "completions/mean_length", "mean", TEAL)


def _time(axes: Any, records: Records, _: Config) -> None:
    """Draw the seconds of a step by part, smoothed; what is left up to the top line belongs to none of them."""
    trained = [record for record in records if isinstance(record.get("timing/step"), int | float)]
    steps = [record["step"] for record in trained]
    parts = {label: [sum(record.get(name, 0.0) for name in names) for record in trained] for label, names, _ in PARTS}
    shown = [(label, smoothed(parts[label]), color) for label, _, color in PARTS if any(parts[label])]
    if shown and len(steps) > 1:
        labels, heights, colors = zip(*shown, strict=True)
        axes.stackplot(steps, heights, labels=labels, colors=colors, alpha=0.8, linewidth=0)
    totals = smoothed([record["timing/step"] for record in trained])
    axes.plot(steps, totals, color=GREY, linewidth=1.2, marker="o" if len(steps) < FEW else None, markersize=3)
    axes.lines[-1].set_label("whole step")
    axes.set_ylim(bottom=0)


def _gap(axes: Any, records: Records, _: Config) -> None:
    """Draw the mismatch on a log axis, which has no place for exact agreement."""
    name = "mismatch/prob_difference_mean"
    shown = [record for record in records if record.get(name, 0.0) > 0]
    _line(axes, shown, name, "mean of a token", PURPLE)
    values = _known(shown, name)[1]
    axes.set_ylim(min([*values, 1e-6]) / 3, max([*values, BAD_GAP]) * 3)  # before the scale, which needs a range
    axes.set_yscale("log")
    axes.axhline(BAD_GAP, color=RED, linestyle="--", linewidth=1, label="above: a precision problem")
    axes.axhspan(axes.get_ylim()[0], GOOD_GAP, color=GREEN, alpha=0.08, linewidth=0, label="good")


class Panel(NamedTuple):
    """A part of the picture. needs: metrics, or patterns with *, one of which must be there."""

    title: str
    needs: tuple[str, ...]
    draw: Callable[[Any, Records, Config], None]


PANELS = (
    Panel("reward", ("reward", "eval/reward"), _reward),
    Panel("solved", ("eval/accuracy", "eval/*/accuracy", "pass@1"), _accuracy),
    Panel("entropy (nats)", ("entropy",), _entropy),
    Panel("completion length (tokens)", ("completions/mean_length",), _length),
    Panel("seconds of a step, smoothed", ("timing/step",), _time),
    Panel("engine and trainer: difference of probabilities", ("mismatch/prob_difference_mean",), _gap),
)


def _title(run: Path, config: Config) -> str:
    """Return the name of a run, its algorithm and its model, as far as they are known."""
    model = mapping(run / "environment.json").get("model")
    model = model if isinstance(model, Mapping) else {}
    name, size = model.get("path") or model.get("class"), model.get("num_parameters")
    parts = [run.resolve().name]
    parts += [str(config["algorithm.name"])] if config.get("algorithm.name") else []
    if name:
        adapter = f", adapter r={model['adapter_rank']}" if model.get("adapter_rank") else ""
        parts.append(f"{name} ({size / 1e6:.3g}M parameters{adapter})" if is_number(size) else str(name))
    return " · ".join(parts).replace("$", r"\$")  # a dollar would begin a formula
