"""HTML of texts, tokens and tables for notebooks and reports: functions of plain values.

Styles are inline and colours transparent, so that the result fits light and dark pages and changes nothing around it.
Without styles (GitHub drops them) it is still a table with its texts and numbers. All text is escaped here and nowhere
else: functions take plain text and return HTML.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybrid_rl.errors import visible

MAX_TOKENS = 400  # of a completion that are shown
MAX_TEXT = 1200  # characters of any other text
ALPHA = 0.6  # of the strongest colour: text stays readable on it
POSITIVE, NEGATIVE, MARKED = "37,99,235", "234,88,12", "147,51,234"  # blue, orange, violet: told apart by most people

TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere;text-align:left"
CELL = "padding:4px 8px;vertical-align:top;border-top:1px solid rgba(128,128,128,.35)"
FAINT = "opacity:.65"


@dataclass(frozen=True)
class Scale:
    """How a number becomes a colour. title: what the number is. high: the magnitude of the strongest colour; low: of no
    colour. is_signed: positive numbers are blue, negative ones orange; otherwise only the magnitude counts. is_log:
    each factor of ten adds the same amount of colour."""

    title: str
    high: float
    low: float = 0.0
    is_signed: bool = True
    is_log: bool = False

    def color(self, value: float | None) -> str:
        """Return a CSS colour; "" for no colour. NaN has none, infinities have the strongest."""
        if value is None or math.isnan(value) or abs(value) <= self.low or self.high <= self.low:
            return ""
        share = min(abs(value), self.high) / self.high
        if self.is_log:
            share = 1 + math.log(share) / math.log(self.high / self.low)
        elif self.low:
            share = (min(abs(value), self.high) - self.low) / (self.high - self.low)
        hue = MARKED if not self.is_signed else POSITIVE if value > 0 else NEGATIVE
        return f"rgba({hue},{ALPHA * share:.2f})"

    def legend(self) -> str:
        """Return the scale as a line of HTML: its title and a few of its colours."""
        if self.is_log:
            steps = [self.low * (self.high / self.low) ** (part / 3) for part in range(4)]
        else:
            ends = (-1.0, -0.5, 0.0, 0.5, 1.0) if self.is_signed else (0.0, 0.5, 1.0)
            steps = [part * self.high for part in ends]
        shown = " ".join(_swatch(self.color(step), f" {step:.2g} ") for step in steps)
        return f'<small style="{FAINT}">colour of a token: {escaped(self.title)}</small> <small>{shown}</small>'


def scale_of(title: str, values: Iterable[float | None]) -> Scale:
    """Return a linear scale up to the largest magnitude among values; NaN and infinities do not count."""
    magnitudes = [abs(value) for value in values if value is not None and math.isfinite(value)]
    return Scale(title, max(magnitudes, default=0.0) or 1.0)


def escaped(text: object, limit: int = MAX_TEXT) -> str:
    """Return text as HTML that shows it as it is: markup escaped; control characters, half characters and those that
    turn the direction of writing made visible; what exceeds `limit` characters replaced by how much that is."""
    whole = str(text)
    more = len(whole) - limit
    return _escaped(whole[:limit]) + (more_note(f"{more:,} more characters") if more > 0 else "")


def more_note(text: str) -> str:
    """Return a remark about something left out."""
    return f'<small style="{FAINT}"> … {html.escape(text)}</small>'


def _escaped(text: str) -> str:
    return html.escape(visible(text))


def tokens_html(
    texts: Sequence[str],
    values: Sequence[float | None],
    scale: Scale,
    *,
    is_policy: Sequence[bool] | None = None,
    titles: Sequence[str] | None = None,
    limit: int = MAX_TOKENS,
) -> str:
    """Return tokens as a line of text with coloured backgrounds.

    texts, values: of each token, [T]. is_policy: False for tokens of tools and environments, which are faint and
    underlined; None = all are the policy's. titles: what is shown under the mouse. limit: tokens shown.
    """
    spans = []
    for place, (text, value) in enumerate(zip(texts[:limit], values[:limit], strict=True)):
        color = scale.color(value)
        style = f"background:{color};" if color else ""
        if is_policy is not None and not is_policy[place]:
            style += "opacity:.7;border-bottom:1px dotted currentColor;"
        title = f' title="{_escaped(titles[place])}"' if titles is not None else ""
        shown = escaped(text).replace("\n", "↵\n") if text else "·"  # a part of a character
        attribute = f' style="{style}"' if style else ""
        spans.append(f"<span{attribute}{title}>{shown}</span>" if attribute or title else shown)
    rest = len(texts) - limit
    return "".join(spans) + (more_note(f"{rest:,} more tokens") if rest > 0 else "")


def code(name: str) -> str:
    """Return a name as it is written in programs, in one line."""
    return f'<code style="white-space:nowrap">{escaped(name)}</code>'


def messages_html(messages: Sequence[tuple[str, str]]) -> str:
    """Return chat messages, (role, text) each, with their roles in bold."""
    lines = (f"<div><b>{escaped(role, 40)}</b> {escaped(text)}</div>" for role, text in messages)
    return "".join(lines)


def folded(summary: str, content: str, *, is_open: bool = False) -> str:
    """Return content that a click unfolds. summary: plain text."""
    return f"<details{' open' * is_open}><summary>{escaped(summary)}</summary>{content}</details>"


def cell(content: str, *, rows: int = 1, is_number: bool = False) -> str:
    """Return a cell of a table, over several rows if they share it. content: HTML."""
    style = f"{CELL};text-align:right;white-space:nowrap" if is_number else f"{CELL};{TEXT_STYLE}"
    span = f' rowspan="{rows}"' if rows > 1 else ""
    return f'<td{span} dir="auto" style="{style}">{content}</td>'


def table(titles: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table. titles: plain text; rows: each the cells of a row."""
    head = "".join(f'<th style="padding:4px 8px;text-align:left">{escaped(title)}</th>' for title in titles)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def page_part(*parts: str) -> str:
    """Return the parts of a view, one below the other."""
    return "".join(f'<div style="margin:2px 0">{part}</div>' for part in parts if part)


def pairs_html(pairs: Mapping[str, str]) -> str:
    """Return names and values, both plain text, as a table without titles."""
    rows = (cell(f"<b>{escaped(name)}</b>") + cell(escaped(value)) for name, value in pairs.items())
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table style="border-collapse:collapse"><tbody>{body}</tbody></table>'


def sparkline(values: Sequence[float], *, width: int = 240, height: int = 36) -> str:
    """Return finite numbers as a small SVG curve; "" for fewer than two."""
    shown = [value for value in values if math.isfinite(value)]
    shown = shown[:: max(1, len(shown) // width)]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    spread = (high - low) or 1.0
    points = " ".join(
        f"{place * width / (len(shown) - 1):.1f},{height - 3 - (value - low) / spread * (height - 6):.1f}"
        for place, value in enumerate(shown)
    )
    line = f'<polyline points="{points}" fill="none" stroke="rgb({POSITIVE})" stroke-width="1.5"/>'
    return f'<svg width="{width}" height="{height}" role="img" aria-label="curve">{line}</svg>'


def _swatch(color: str, text: str) -> str:
    return f'<span style="background:{color or "transparent"};padding:0 3px">{html.escape(text)}</span>'
