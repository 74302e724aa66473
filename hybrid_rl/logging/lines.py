"""Lines of text for a person who watches a run: metrics of a step, a bar, a sparkline, the summary of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.cells import cell_len
from rich.text import Text

from hybrid_rl.errors import counted
from hybrid_rl.process.progress import Progress

COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("len", "completions/mean_length", "{:.1f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("|g|", "grad_norm", "{:.2f}"),
    ("s/step", "step_time", "{:.2f}"),
    ("eval reward", "eval/reward", "{:.3f}"),
    ("eval accuracy", "eval/accuracy", "{:.1%}"),
)
# Of steps that hold groups: with them a line shows these, too.
HELD = (
    ("held", "buffer/held_share", "{:.0%}"),
    ("age", "staleness/mean_age", "{:.2f}"),
    ("idle", "engine/idle_share", "{:.0%}"),
)
SUMMED_UP = tuple(column for column in COLUMNS if column[1] in ("reward", "eval/reward", "eval/accuracy"))
# Of evaluations with several sets: the accuracy of each, or its reward if it has none.
OF_SET = re.compile(r"eval/([^/]+)/(accuracy|reward)")
SIZE = re.compile(r"memory/([^/]+)_bytes")
# What a narrow terminal goes without, the first first. The step and the reward always stay.
CUT = ("idle", "age", "held", "entropy", "|g|", "eval reward", "s/step", "len", "eval accuracy")
LARGE = 1e6  # from here on an exponent is shorter than the digits
GAP = "  "
BAR_CELLS = 40
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_CELLS = 24
PHASES = ("rollout", "reward", "judge", "logprobs", "update", "handoff", "verify", "probe", "evaluate", "sleep", "wake")


def number(form: str, value: float) -> str:
    """Format a number; in exponential form if it is very large."""
    return f"{value:g}" if abs(value) >= LARGE else form.format(value)


def columns_of_sets(names: Iterable[str]) -> tuple[tuple[str, str, str], ...]:
    """Return title, name and form of one metric for each evaluation set among these names of metrics."""
    columns: dict[str, tuple[str, str, str]] = {}
    for name in names:
        if (match := OF_SET.fullmatch(name)) and (match[1] not in columns or match[2] == "accuracy"):
            columns[match[1]] = (f"eval {match[1]}", name, "{:.1%}" if match[2] == "accuracy" else "{:.3f}")
    return tuple(columns.values())


def shown_metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return title and value of the main metrics, those that exist."""
    columns = (*COLUMNS, *(HELD if HELD[0][1] in metrics else ()), *columns_of_sets(metrics))
    return [(title, number(form, metrics[name])) for title, name, form in columns if name in metrics]


def line_of(metrics: Mapping[str, float]) -> str:
    """Format the main metrics, those that exist, as one line."""
    return GAP.join(f"{title} {value}" for title, value in shown_metrics(metrics))


def handoff_line(metrics: Mapping[str, float]) -> str:
    """Describe the last handoff: version, bytes of the rank with the most, seconds, and how it was verified."""
    if "handoff/version" not in metrics:
        return ""
    gap = f", probe gap {metrics['handoff/probe_gap']:.1e}" if "handoff/probe_gap" in metrics else ""
    unproven = int(metrics.get("handoff/unproven_bytes", 0))
    verified = f", all but {unproven:,} B verified" if unproven else ", every byte verified"
    proof = verified if "timing/verify" in metrics else ""
    return (
        f"handoff v{int(metrics['handoff/version'])}: {int(metrics['handoff/bytes']):,} B in "
        f"{metrics['timing/handoff'] * 1000:.1f} ms{gap}{proof}"
    )


def step_line(step: int, max_steps: int, metrics: Mapping[str, float], width: int | None) -> Text:
    """Return the line of a training step. width: cells that it may take, None = any number; metrics are cut for it, the
    handoff first."""
    head = f"step {step:>{len(str(max_steps))}}/{max_steps}"
    pieces = shown_metrics(metrics)
    handoff = handoff_line(metrics)

    def length() -> int:
        return len(head) + sum(len(GAP) + cell_len(f"{title} {value}") for title, value in pieces)

    if width is not None:
        if length() + len(GAP) + len(handoff) > width:
            handoff = ""
        for cut in (*CUT, *(title for title, _ in reversed(pieces) if title not in CUT and title != "reward")):
            if length() <= width:
                break
            pieces = [piece for piece in pieces if piece[0] != cut]
    line = Text.assemble((head, "bold"))
    for title, value in pieces:
        style = "green" if title.startswith("eval") else ""
        line.append(GAP).append(f"{title} ", "dim").append(value, style)
    if handoff:
        line.append(GAP).append(handoff, "dim")
    return line


def detail_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return what a step spent, for whoever looks into it: seconds of its phases, memory, and its handoff's proof."""
    seconds = [f"{name} {metrics[f'timing/{name}']:.3f}" for name in PHASES if f"timing/{name}" in metrics]
    sizes = [(match[1], value) for name, value in metrics.items() if (match := SIZE.fullmatch(name))]
    held = [f"{name.replace('_', ' ')} {size_of(value)}" for name, value in sizes]
    lines = [f"{title}: {', '.join(parts)}" for title, parts in (("seconds", seconds), ("memory", held)) if parts]
    return [*lines, *filter(None, [handoff_line(metrics)])]


def size_of(num_bytes: float) -> str:
    """Format bytes with a unit: "985.6 kB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def clock(seconds: float) -> str:
    """Format a duration: "0:01:26"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


# Calls to the ranks whose names say less to a reader of the console than what they do.
CALLS = {
    "update weights": "weights to the engine",
    "update weights again": "weights to the engine",
    "keep base": "look for the base model",
}


def work_line(progress: Progress) -> str:
    """Describe what is done now: "evaluation: rollout 24/64 samples, 512 tokens/s"; "" if nothing is."""
    words = ": ".join(CALLS.get(name, name) for name in progress.names)
    if progress.unit:
        of_all = f"/{progress.total:,}" if progress.total else ""
        words = f"{words} {progress.done:,}{of_all} {progress.unit}".lstrip()
        if progress.tokens and progress.seconds > 0:
            words += f", {progress.tokens / progress.seconds:,.0f} tokens/s"
    return words


def bar_line(step: int, max_steps: int, elapsed: float, left: float | None, width: int, *, is_plain: bool) -> Text:
    """Return the live line of a run, at most `width` cells: bar, steps, time. The bar gives way first; steps and times
    never do. elapsed, left: seconds. is_plain: ASCII characters only."""
    remaining = "-:--:--" if left is None else clock(left)
    forms = [
        ("training ", f"{step}/{max_steps}  {clock(elapsed)} elapsed  {remaining} left"),
        ("", f"{step}/{max_steps}  {clock(elapsed)} elapsed  {remaining} left"),
        ("", f"{step}/{max_steps} {clock(elapsed)} left {remaining}"),
    ]
    head, tail = next((form for form in forms if len(form[0]) + len(form[1]) <= width), forms[-1])
    cells = min(BAR_CELLS, width - len(head) - len(tail) - len(GAP))
    if cells < 8:
        return Text(head + tail)
    done = min(cells, int(cells * step / max(1, max_steps)))
    full, rest = ("#", "-") if is_plain else ("━", "─")
    return Text.assemble(head, (full * done, "magenta"), (rest * (cells - done), "bright_black"), GAP, tail)


def fitted(text: str, width: int) -> str:
    """Return the text, cut with an ellipsis if it takes more than `width` cells."""
    if cell_len(text) <= width:
        return text
    kept = Text(text)
    kept.truncate(max(width, 0), overflow="ellipsis")
    return kept.plain


def sparkline(values: Sequence[float]) -> str:
    """Draw numbers as one character each, from the lowest to the highest; "" without a finite one."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(SPARKS) - 1
    return "".join(
        (SPARKS[round((v - low) / span * top)] if span else SPARKS[0]) if math.isfinite(v) else " " for v in values
    )


def binned(values: Sequence[float], num_bins: int) -> list[float]:
    """Return means of as many equal parts of a series; the values themselves if there are not more."""
    if len(values) <= num_bins:
        return list(values)
    ends = [round(index * len(values) / num_bins) for index in range(num_bins + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]


@dataclass
class History:
    """What the summary of a run tells: a few numbers of each step that `fit` ran, by step. One that comes again takes
    the place of the one before."""

    seconds: dict[int, float] = field(default_factory=dict)
    series: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, or (step 0) of the evaluation before the first."""
        self.seconds[step] = metrics.get("step_time", 0.0)
        for _, name, _ in (*SUMMED_UP, *columns_of_sets(metrics)):
            if name in metrics and math.isfinite(metrics[name]):
                self.series.setdefault(name, {})[step] = metrics[name]

    def keep_until(self, step: int) -> None:
        """Forget later steps."""
        for values in (self.seconds, *self.series.values()):
            for later in [logged_step for logged_step in values if logged_step > step]:
                del values[later]

    @property
    def num_steps(self) -> int:
        """Training steps."""
        return sum(step > 0 for step in self.seconds)

    @property
    def step_seconds(self) -> float:
        """What they took."""
        return sum(self.seconds.values())

    def rows(self, *, is_plain: bool) -> list[tuple[str, str, str]]:
        """Return title, before and after, and sparkline of what was measured. A long series is shown by means of equal
        parts, the first and the last of which are its before and after."""
        rows = []
        arrow = "->" if is_plain else "→"
        for title, name, form in (*SUMMED_UP, *columns_of_sets(self.series)):
            values = list(self.series.get(name, {}).values())
            if not values:
                continue
            means = binned(values, SPARK_CELLS)
            first, last = number(form, means[0]), number(form, means[-1])
            change = f"{first} {arrow} {last}" if len(means) > 1 else first
            each = len(values) // len(means)
            note = f"  (means of {each} steps)" if each > 1 else ""
            rows.append((title, change, ("" if is_plain or len(means) < 2 else sparkline(means)) + note))
        return rows


def summary_lines(history: History, seconds: float, place: str, *, is_plain: bool) -> list[Text]:
    """Return the lines that end a run. seconds: it took; place: of its folder, as the user would type it."""
    each = f", {history.step_seconds / history.num_steps:.2f} s each" if history.step_seconds else ""
    lines = [Text(f"trained {counted(history.num_steps, 'step')} in {clock(seconds)}{each}", "bold")]
    rows = history.rows(is_plain=is_plain)
    wide = max((len(change) for _, change, _ in rows), default=0)
    for title, change, spark in rows:
        lines.append(Text.assemble(f"  {title:<14}", f"{change:<{wide}}  ", (spark, "cyan")))
        lines[-1].rstrip()
    lines.append(Text.assemble(f"  {'results':<14}", place))
    lines.append(Text.assemble(f"  {'look at them':<14}", (f"hybrid-rl report {place}", "bold")))
    return lines
