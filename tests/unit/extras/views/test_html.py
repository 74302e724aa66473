"""HTML of texts and tokens: nothing gets out of its cell, and colours are as computed by hand."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.extras.views.html import Scale, escaped, messages_html, scale_of, sparkline, tokens_html

ALLOWED = {"span", "small", "div", "b"}


class Tags(HTMLParser):
    """The tags, attributes and text that a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@given(text=st.text(max_size=60), title=st.text(max_size=20))
def test_no_text_becomes_markup(text: str, title: str) -> None:
    nasty = f"<script>alert(1)</script>{text}\"'><img src=x onerror=1>"
    scale = Scale("t", 1.0)
    page = tokens_html([nasty], [0.5], scale, titles=[title + nasty], is_policy=[False]) + messages_html(
        [(nasty, nasty)]
    )
    found = Tags(page)
    assert found.tags <= ALLOWED and found.attributes <= {"style", "title"}
    assert "<script>alert(1)</script>" in found.text
    page.encode()  # also of half characters


def test_odd_characters_are_shown() -> None:
    assert escaped("a\x00\r\x1b[1m\u202eb\ud800\u2028") == "a␀␍␛[1m\\u202eb\\ud800\\u2028"
    assert escaped("👩‍💻 é漢\n\t[bold]{x}") == "👩‍💻 é漢\n\t[bold]{x}"
    assert escaped("abcd", limit=2).startswith("ab<small") and "2 more characters" in escaped("abcd", limit=2)


@pytest.mark.parametrize(
    ("value", "color"),
    [
        (2.0, "rgba(37,99,235,0.60)"),
        (-1.0, "rgba(234,88,12,0.30)"),
        (9.0, "rgba(37,99,235,0.60)"),
        (float("-inf"), "rgba(234,88,12,0.60)"),
        (0.0, ""),
        (float("nan"), ""),
        (None, ""),
    ],
)
def test_colors_of_a_signed_scale(value: float | None, color: str) -> None:
    assert scale_of("t", [1.0, -2.0, None, float("nan"), float("inf")]).color(value) == color


def test_colors_of_a_logarithmic_scale() -> None:
    scale = Scale("gap", 1.0, 0.001, is_signed=False, is_log=True)
    shares = [
        float(scale.color(value)[:-1].rpartition(",")[2] or 0) if scale.color(value) else 0
        for value in (1e-7, 0.001, 0.01, 0.1, 1.0, 50.0)
    ]
    assert shares == [0, 0, 0.2, 0.4, 0.6, 0.6]  # what rounding makes has no colour


def test_tokens_show_parts_of_characters_and_line_ends() -> None:
    page = tokens_html(["", "漢\n", "x"], [None, None, None], Scale("t", 1.0), limit=2)
    assert page == "·漢↵\n" + page[len("·漢↵\n") :] and "1 more tokens" in page


def test_sparkline_is_a_curve_of_all_values() -> None:
    assert sparkline([1.0]) == sparkline([]) == ""
    page = sparkline([0.0, float("nan"), 1.0, 0.5], width=100, height=36)
    assert 'points="0.0,33.0 50.0,3.0 100.0,18.0"' in page


def test_html_needs_no_torch() -> None:
    code = "import sys, hybrid_rl.extras.views.html; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
