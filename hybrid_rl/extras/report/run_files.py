"""Files of a run folder, read as they are: a run may be under way, or may have been cut off in the middle of a line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from hybrid_rl.errors import ConfigError

STEP = re.compile(rb'^\{"step": (\d{1,15})[,}]')


class Line(NamedTuple):
    """The place of a record in a file. step: of the record; None if the line is not a record."""

    path: Path
    start: int
    size: int
    step: int | None
    has_token_values: bool


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return a record, with None in the place of NaN and infinities; None if the line is not one."""
    try:
        record = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and _step(record) is not None else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a record is a finite number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _step(record: dict[str, Any]) -> int | None:
    step = record.get("step")
    return int(step) if is_number(step) else None


def records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a JSON-lines file by their step, later ones in the place of earlier ones of the same step,
    and the number of lines that are not records. No file: none."""
    by_step: dict[int, dict[str, Any]] = {}
    num_broken = 0
    for line in _lines(path):
        record = parsed(line)
        if record is None:
            num_broken += 1
        else:
            step = _step(record)
            assert step is not None
            by_step[step] = record | {"step": step}
    return [by_step[step] for step in sorted(by_step)], num_broken


def places(path: Path) -> Iterator[Line]:
    """Find the records of a large file without keeping them."""
    start = 0
    for line in _lines(path):
        # Parsing is only needed if the line is not as this library writes it, or is the one that may be cut short.
        match = STEP.match(line) if line.endswith(b"}") else None
        record = None if match else parsed(line)
        step = int(match[1]) if match else None if record is None else _step(record)
        yield Line(path, start, len(line), step, b'"token_values": {' in line)
        start += len(line) + 1


def at(line: Line) -> dict[str, Any] | None:
    """Read the record at a place."""
    with open(line.path, "rb") as file:
        file.seek(line.start)
        return parsed(file.read(line.size))


def mapping(path: Path) -> dict[str, Any]:
    """Read a JSON file; {} if it is missing or broken."""
    try:
        content = json.loads(path.read_bytes(), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    try:
        with open(path, "rb") as file:
            for line in file:  # split at \n only: JSON leaves U+2028 and others in strings as they are
                yield line.rstrip(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; make it a readable file, or remove it") from error
