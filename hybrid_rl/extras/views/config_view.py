"""A configuration as HTML: what differs from the defaults first, the rest folded."""

from __future__ import annotations

from hybrid_rl.config.config_text import KeyValue, Shown, key_values, short
from hybrid_rl.extras.views.html import cell, code, escaped, folded, page_part, table


def config_html(config: Shown) -> str:
    """Return a configuration for a notebook."""
    keys = list(key_values(config))
    sections: dict[str, list[KeyValue]] = {}
    for key in keys:
        sections.setdefault(key.path.rpartition(".")[0] or "run", []).append(key)
    rest = "".join(folded(f"{name} ({len(keys)})", _rows(keys)) for name, keys in sections.items())
    return page_part(changed_html(config), folded(f"all {len(keys)} keys, by section", rest))


def changed_html(config: Shown) -> str:
    """Return the keys of a configuration that differ from their defaults."""
    changed = [key for key in key_values(config) if key.differs]
    if not changed:
        return "<b>all keys have their defaults</b>"
    return page_part(f"<b>{len(changed)} keys differ from their defaults</b>", _rows(changed))


def _rows(keys: list[KeyValue]) -> str:
    return table(
        ("key", "value", "default", "meaning"),
        (
            cell(code(key.path))
            + cell(f"{'<b>' * key.differs}{escaped(short(key.value))}{'</b>' * key.differs}")
            + cell(escaped(short(key.default)) if key.differs else "")
            + cell(escaped(key.doc))
            for key in keys
        ),
    )
