"""Traces in files, so that a handoff can be planned where the engine is not installed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import Copies
from hybrid_rl.resharding.layout import TensorSpec
from hybrid_rl.resharding.trace import DestinationSpec, Fills, Trace


def head_of(trace: Trace) -> str:
    """Return everything in a trace but its tables, as JSON."""
    return json.dumps(
        {
            "sources": [(s.name, s.shape, str(s.dtype)[len("torch.") :]) for s in trace.sources],
            "destinations": [(d.name, d.shape, d.strides, str(d.dtype)[len("torch.") :]) for d in trace.destinations],
            "untraced": trace.untraced,
            "unused": trace.unused,
        }
    )


def is_same(one: Trace, other: Trace) -> bool:
    """Tell whether two traces hold the same, element by element."""
    tables = (one.copies, other.copies), (one.fills, other.fills)
    return head_of(one) == head_of(other) and all(
        np.array_equal(getattr(a, item.name), getattr(b, item.name)) for a, b in tables for item in fields(a)
    )


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace to an .npz file, compressed."""
    columns: dict[str, Any] = {"head": np.frombuffer(head_of(trace).encode(), dtype=np.uint8)}
    for prefix, table in (("copies", trace.copies), ("fills", trace.fills)):
        for item in fields(table):
            column = getattr(table, item.name)
            # Neighbouring rows are similar, and differences of integers compress well.
            change = column if column.dtype == np.float64 else np.diff(column, axis=0, prepend=0)
            columns[f"{prefix}.{item.name}"] = np.ascontiguousarray(change.T)
    np.savez_compressed(path, **columns)


def read_sources(path: Path) -> dict[str, tuple[int, ...]]:
    """Read only the names and shapes of what a trace in a file takes. Raises HandoffError if it is not a trace."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            head = json.loads(stored["head"].tobytes().decode())
        return {name: tuple(shape) for name, shape, _ in head["sources"]}
    except (OSError, ValueError, KeyError) as error:
        raise HandoffError(f"cannot read a trace from {path}: {error}") from error


def load_trace(path: Path) -> Trace:
    """Read what `save_trace` wrote. Raises HandoffError if the file is not a trace."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            columns = {name: stored[name] for name in stored.files}
        head = json.loads(columns["head"].tobytes().decode())
    except (OSError, ValueError, KeyError) as error:
        raise HandoffError(f"cannot read a trace from {path}: {error}") from error

    def table(kind: Any, prefix: str) -> Any:
        arrays = {item.name: columns[f"{prefix}.{item.name}"].T for item in fields(kind)}
        return kind(**{n: c if c.dtype == np.float64 else np.cumsum(c, axis=0) for n, c in arrays.items()})

    return Trace(
        tuple(TensorSpec(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in head["sources"]),
        tuple(
            DestinationSpec(name, tuple(shape), tuple(strides), getattr(torch, dtype))
            for name, shape, strides, dtype in head["destinations"]
        ),
        table(Copies, "copies"),
        table(Fills, "fills"),
        head["untraced"],
        tuple(head["unused"]),
    )
