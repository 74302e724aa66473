"""The documentation as a site, written to build/docs by `make docs`. Pages are Markdown and can be read offline."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "hybrid_rl"
author = "The hybrid_rl authors"
copyright = author
release = re.search(r'__version__ = "(.*)"', (ROOT / "hybrid_rl/__init__.py").read_text()).group(1)  # type: ignore[union-attr]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
# Model cards' configs, and what is read on GitHub only.
exclude_patterns = ["plans/models", "notebooks/.ipynb_checkpoints"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "strikethrough"]
# Notebooks are shown with the outputs that they are kept with.
nb_execution_mode = "off"
default_role = "code"
nitpicky = True
# Types in signatures: most are no page of ours, and those of other libraries would need a network to be found.
nitpick_ignore_regex = [("py:.*", ".*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "hybrid_rl"
html_static_path = ["_static"]
html_css_files = ["hybrid_rl.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
copybutton_prompt_text = "$ "

_NAMED = re.compile(r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): (.*)")


def as_rst(lines: list[str]) -> list[str]:
    """A docstring of this library as reStructuredText: `name: meaning` lines become a list, backticks are code."""
    shaped: list[str] = []
    in_list = False
    for line in lines:
        named = _NAMED.fullmatch(line.strip())
        if named and (in_list or not shaped or not shaped[-1].strip()):
            in_list = True
            shaped.append(f"- `{'`, `'.join(named[1].split(', '))}`: {named[2]}")
        elif in_list and line.strip():
            shaped.append("  " + line.strip())
        else:
            in_list = False
            shaped.append(line)
    return _escaped("\n".join(shaped)).split("\n")


def _escaped(text: str) -> str:
    """Code keeps its backticks, doubled, on one line; nothing outside of it is markup."""
    parts = text.split("`")
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"([*|])|(_)(?=\W|$)", r"\\\1\2", parts[number])
    return "``".join(" ".join(part.split()) if number % 2 else part for number, part in enumerate(parts))


def _in_our_style(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def setup(app: Any) -> None:
    """Register what Sphinx calls."""
    app.connect("autodoc-process-docstring", _in_our_style)
