"""Differences between the configuration of a run and the one that it resumes with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_SHOWN = 8
MAX_LENGTH = 60
# Identity and place of the run, which the message about resuming already names.
NOT_SHOWN = frozenset({"resume", "run_name", "output_dir"})


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the keys that differ as "kl.beta 0.0 -> 0.1, ...", "" if none does. before: as read from JSON. Keys that
    only one of them has are left out: they belong to a choice that is shown itself, or to another version."""
    after = json.loads(json.dumps(after))  # turns tuples into lists
    texts = [f"{name} {_text(old)} -> {_text(new)}" for name, old, new in differing(before, after)]
    more = f" and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return ", ".join(texts[:MAX_SHOWN]) + more


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the paths of the keys of `after` that `before` lacks or has with another value."""
    paths: list[str] = []
    for name, new in after.items():
        old = before.get(name)
        if isinstance(new, Mapping) and new:
            paths += changed_keys(old if isinstance(old, Mapping) else {}, new, f"{prefix}{name}.")
        elif name not in before or old != new:
            paths.append(f"{prefix}{name}")
    return paths


def differing(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value of the keys that differ, of those that both have."""
    for name, new in after.items():
        if name not in before or (not prefix and name in NOT_SHOWN):
            continue
        old = before[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differing(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new


def _text(value: Any) -> str:
    """Return the value as in YAML, shortened if it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 3]}..."
