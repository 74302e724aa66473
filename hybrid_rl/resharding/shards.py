"""Sharded tensor files: each rank writes its own part, and any number of ranks can read them.

The files are in torch.distributed.checkpoint's safetensors format (HuggingFaceStorageWriter with save_distributed),
which can read them. The code here unpickles nothing, communicates nothing, makes no second copy of the tensors, and
treats a missing part as an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hybrid_rl.compat.transformers import str_to_torch_dtype
from hybrid_rl.errors import CheckpointError
from hybrid_rl.process.files import Sink, save_tensors
from hybrid_rl.weights.boxes import Box, is_first_copy, local_box, local_tensor, num_elements, overlap, within

SHARDING_INFO = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"


@dataclass(frozen=True)
class _Part:
    path: Path
    file: Any
    box: Box
    dtype: torch.dtype


def write_shards(folder: Path, tensors: Mapping[str, Tensor], rank: int, sink: Sink | None = None) -> Path | None:
    """Write this rank's parts of tensors, sharded or plain (which rank 0 writes). Returns the file, if it has any.

    Of several copies only one is written. The folder must exist and be the same for all ranks. sink: takes the parts
    instead of having them written.
    """
    own = own_parts(tensors, rank)
    parts = {name: local_tensor(tensor).contiguous() for name, tensor in own.items() if _holds_part(tensor)}
    if not parts:
        return None
    offsets = {name: {OFFSETS: [part.start for part in local_box(own[name])]} for name in parts}
    path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    metadata = {"format": "pt", "DCP_VERSION": "1.0", SHARDING_INFO: json.dumps(offsets)}
    if sink is None:
        save_tensors(parts, path, metadata)
    else:
        sink({name: part.to("cpu", copy=True) for name, part in parts.items()}, path, metadata)
    return path


def own_parts(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the tensors of which this rank writes a part."""
    return {name: tensor for name, tensor in tensors.items() if is_first_copy(tensor, rank)}


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, plain or sharded, from files of any number of ranks. Each rank reads its own parts.

    Raises CheckpointError, before anything is changed, if names, shapes or dtypes differ or a part is missing.
    """
    stored = _parts(folder)
    differing = sorted(stored.keys() ^ tensors.keys())
    if differing:
        raise CheckpointError(
            f"{folder} is of another model, or of another dtype: {len(differing)} tensors differ, e.g. "
            f"{differing[0]} ({'only in the checkpoint' if differing[0] in stored else 'not in the checkpoint'})"
        )
    plan = {name: _plan(folder, name, tensors[name], stored[name]) for name in tensors}
    for name, pieces in plan.items():
        box, target = local_box(tensors[name]), local_tensor(tensors[name])
        for part, common in pieces:
            try:
                target[within(common, box)].copy_(part.file.get_slice(name)[within(common, part.box) or ...])
            except Exception as error:  # safetensors has errors of its own
                raise CheckpointError(f"cannot read {name} of {part.path}: {error}") from error


def stored_boxes(folder: Path) -> dict[str, list[tuple[str, Box]]]:
    """Return the parts of every tensor in a folder: file name and box. Raises CheckpointError if it cannot be read.

    Every file holds at most one part of a tensor.
    """
    return {name: [(part.path.name, part.box) for part in parts] for name, parts in _parts(folder).items()}


def _parts(folder: Path) -> dict[str, list[_Part]]:
    parts: dict[str, list[_Part]] = {}
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"cannot read {folder}: it has no .safetensors files")
    path = folder
    try:
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            offsets = json.loads(file.metadata()[SHARDING_INFO])
            for name in file.keys():  # noqa: SIM118
                piece = file.get_slice(name)
                box = tuple(slice(o, o + n) for o, n in zip(offsets[name][OFFSETS], piece.get_shape(), strict=True))
                parts.setdefault(name, []).append(_Part(path, file, box, str_to_torch_dtype[piece.get_dtype()]))
    except Exception as error:  # safetensors and json raise errors of their own
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    return parts


def _plan(folder: Path, name: str, tensor: Tensor, parts: list[_Part]) -> list[tuple[_Part, Box]]:
    """Return what to read from which part. Parts do not overlap, so counting elements shows whether any is missing."""
    shape, dtype = _global_shape(parts), parts[0].dtype
    if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
        raise CheckpointError(
            f"{folder} is of another model: {name} is {dtype} {list(shape)}, here {tensor.dtype} {list(tensor.shape)}"
        )
    box = local_box(tensor)
    pieces = [(part, common) for part in parts if (common := overlap(part.box, box)) is not None]
    missing = num_elements(box) - sum(num_elements(common) for _, common in pieces)
    if missing:
        raise CheckpointError(f"{folder} is incomplete: none of its files has {missing} elements of {name}")
    return pieces


def _global_shape(parts: list[_Part]) -> tuple[int, ...]:
    return tuple(max(part.box[dim].stop for part in parts) for dim in range(len(parts[0].box)))


def _holds_part(tensor: Tensor) -> bool:
    # An empty tensor has one empty part on every rank: it is written to record its name.
    return num_elements(local_box(tensor)) > 0 or tensor.numel() == 0
