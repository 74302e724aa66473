"""Python's and IPython's names that begin with an underscore, though they are for everybody."""

from __future__ import annotations

import os
from typing import Any, NoReturn


def end_at_once(status: int) -> NoReturn:
    """End this process without any of its clean-up, as a forked child must."""
    os._exit(status)


def html_of(shown: Any) -> str:
    """What a notebook shows of an object."""
    page: str = shown._repr_html_()
    return page


def traceback_of(error: BaseException) -> list[str]:
    """What IPython prints for an error that shows itself."""
    lines: list[str] = error._render_traceback_()  # type: ignore[attr-defined]
    return lines
