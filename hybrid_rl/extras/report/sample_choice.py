"""A bounded choice of the samples of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.extras.report.run_files import Line, at, places
from hybrid_rl.extras.report.series import stretches

MAX_SAMPLES = 3000  # of a page
MAX_BYTES = 12_000_000  # of a page's samples, before they are compressed
MAX_TEXT = 6000  # characters of a text
MAX_SAMPLE = 48_000  # characters of all texts of a sample
MAX_TOKENS = 1024  # of a sample, in the coloured view
MAX_ITEMS = 60  # messages of a conversation, columns of a row


def find(folder: Path, pattern: str) -> tuple[list[Line], int]:
    """Find the samples of a run in the files of all ranks, and count the lines that are not records."""
    lines = [line for path in sorted(folder.glob(pattern)) for line in places(path)]
    return [line for line in lines if line.step is not None], sum(line.step is None for line in lines)


def chosen(lines: Sequence[Line], max_samples: int) -> list[Line]:
    """Choose samples: the same number of every step, those first that have values of each token, then those that stand
    first, which are whole groups. If there are more steps than samples to choose, evenly spread steps."""
    by_step: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        assert line.step is not None
        by_step[line.step].append(line)
    steps = [sorted(by_step)[start] for start, _ in stretches(len(by_step), max_samples)]
    left, choice = max_samples, list[Line]()
    for place, step in enumerate(sorted(steps, key=lambda step: len(by_step[step]))):
        share = left // (len(steps) - place)  # what small steps leave is for larger ones
        own = sorted(by_step[step], key=lambda line: not line.has_token_values)[:share]
        choice += own
        left -= len(own)
    return sorted(choice, key=lambda line: (line.step, line.path, line.start))


def read(lines: Sequence[Line], max_bytes: int) -> list[dict[str, Any]]:
    """Read chosen samples, each cut to MAX_SAMPLE characters of text; if all would take more than max_bytes, evenly
    spread ones only."""
    sizes = [min(line.size, MAX_SAMPLE) for line in lines]
    kept = list(lines)
    if sum(sizes) > max_bytes:
        kept = [lines[start] for start, _ in stretches(len(lines), max(max_bytes * len(lines) // sum(sizes), 1))]
    return [bounded(record) for line in kept if (record := at(line)) is not None]


def bounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with nothing in it that is too long for a page."""
    sample: dict[str, Any] = {}
    room = Room(MAX_SAMPLE)
    for name, value in sorted(record.items(), key=lambda item: item[0] != "completion"):  # before a huge prompt
        if name == "token_values" and isinstance(value, dict):
            sample[name] = {
                key: values[:MAX_TOKENS] if isinstance(values, list) else values for key, values in value.items()
            }
            length = max([len(values) for values in value.values() if isinstance(values, list)], default=0)
            if length > MAX_TOKENS:
                sample[name].setdefault("num_tokens", length)
        else:
            sample[str(name)] = cut(value, room)
    return sample


@dataclass
class Room:
    """The number of characters that may still be kept."""

    left: int


def cut(value: Any, room: Room | None = None, depth: int = 6) -> Any:
    """Return a value of a record with its texts, lists and mappings cut to what a page shows."""
    room = Room(MAX_SAMPLE) if room is None else room
    if isinstance(value, str):
        kept = value[: max(min(MAX_TEXT, room.left), 0)]
        room.left -= len(kept)
        return value if kept == value else f"{kept}\n[... {len(value) - len(kept):,} characters more]"
    if isinstance(value, dict | list) and depth == 0:
        return "[...]"
    if isinstance(value, dict):
        return {str(name)[:MAX_TEXT]: cut(item, room, depth - 1) for name, item in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list):
        more = [f"[... {len(value) - MAX_ITEMS:,} more]"] if len(value) > MAX_ITEMS else []
        return [cut(item, room, depth - 1) for item in value[:MAX_ITEMS]] + more
    return value
