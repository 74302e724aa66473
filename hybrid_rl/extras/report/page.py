"""One page of HTML that needs no other file and no network."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybrid_rl.errors import REPORT_EXTRA, ConfigError, HybridRLError

SCRIPTS = ("base.js", "charts.js", "timeline.js", "tokens.js", "samples.js", "main.js")


def render(data: Mapping[str, Any], title: str) -> str:
    """Return the page. data: what it shows, as JSON can hold it.

    Data and plotly are compressed and written in base64, so that nothing that a model or a user wrote can be read as
    HTML or script; the page's own scripts insert it as text only. A content policy forbids all requests.
    """
    folder = files("hybrid_rl.extras.report") / "page"
    parts = {
        "title": html.escape(title),
        "style": (folder / "report.css").read_text(encoding="utf-8"),
        "plotly": plotly_packed(),
        "data": packed(json.dumps(data, allow_nan=False, separators=(",", ":")).encode()),
        "script": "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    # Each place is filled once: what is inserted is not searched for further places.
    pieces = (folder / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def packed(content: bytes) -> str:
    """Return bytes compressed (gzip) and in base64."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


@functools.cache
def plotly_packed() -> str:
    """Return plotly's own minified script, compressed. Raises ConfigError if plotly is not installed, and HybridRLError
    if the installed package lacks the script."""
    try:
        import plotly
    except ImportError as error:
        raise ConfigError(f"the report needs plotly, which is not installed: {REPORT_EXTRA}") from error

    path = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    if not path.exists():
        raise HybridRLError(
            f"{path} is missing: plotly is not installed completely; pip install --force-reinstall plotly"
        )
    return packed(path.read_bytes())
