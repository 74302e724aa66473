"""The optimizer of a checkpoint, put together from its files by nothing but safetensors and the offsets in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hybrid_rl.checkpoint.reading import OPTIMIZER_FOLDER, SCALARS_FILE


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The whole state on the CPU, whatever number of ranks wrote it: numbers, and tensors by parameter name."""
    path = folder / OPTIMIZER_FOLDER
    state: dict[str, Any] = json.loads((path / SCALARS_FILE).read_text())
    for name, tensor in _tensors(path).items():
        kind, _, parameter = name.partition(".")
        if parameter:
            state.setdefault(kind, {})[parameter] = tensor
        else:
            state[kind] = tensor
    return state


def same_optimizer(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same numbers and tensors, to the bit. Not by their text, which takes longer than
    to train a tiny model for some steps."""
    return _same(*map(read_optimizer, (first, second)))


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_same(value, theirs[name]) for name, value in mine.items())
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return type(mine) is type(theirs) and bool(mine == theirs)


def _tensors(folder: Path) -> dict[str, Tensor]:
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118
                parts.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))
    found = {}
    for name, its in parts.items():
        ends = [[o + n for o, n in zip(offset, part.shape, strict=True)] for offset, part in its]
        whole = torch.full([max(extents) for extents in zip(*ends, strict=True)], 0, dtype=its[0][1].dtype)
        for (offset, part), end in zip(its, ends, strict=True):
            whole[tuple(slice(*ends) for ends in zip(offset, end, strict=True))] = part
        found[name] = whole
    return found
