"""Files of saved rollouts, from which a later run can train.

A file is in the safetensors format. A column of [N] is the tensor of its name; a jagged one is `<name>.values` and
`<name>.offsets`; one of objects is `<name>.json`, its list as UTF-8 JSON in a tensor of bytes. Nothing is pickled. A
file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid_rl.batch.batch import Batch, Column
from hybrid_rl.batch.fields import FIELDS
from hybrid_rl.batch.jagged import Jagged
from hybrid_rl.batch.trajectories import key_order
from hybrid_rl.errors import DataError, StorageError
from hybrid_rl.process.files import save_tensors, set_aside

FORMAT = {"format": "hybrid_rl.batch", "format_version": "1"}
_ROLLOUT = re.compile(r"step-(\d+)-rank-(\d+)-of-(\d+)\.safetensors")


def save_batch(path: Path, batch: Batch) -> None:
    """Write a batch, from any device, to a file. An existing file is replaced once the new one is complete.

    Raises DataError for an object column that JSON cannot reproduce exactly, StorageError if the file cannot be
    written.
    """
    tensors = {name: tensor for column in batch for name, tensor in _tensors(column, batch[column])}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, temporary, FORMAT)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {path}: {error}; free space or choose another folder") from error
    finally:
        with contextlib.suppress(OSError):  # of a disk that is read-only by now
            temporary.unlink(missing_ok=True)


def load_batch(path: Path) -> Batch:
    """Read what `save_batch` wrote, onto the CPU. Raises DataError if the file is missing, damaged or of another
    kind."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Cloned, because a tensor from an open file may be a mapping of it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot read the batch {path}: {error}; if the file exists, it is damaged: write it again, or delete it"
        ) from error
    if {key: metadata.get(key) for key in FORMAT} != FORMAT:
        raise DataError(f"{path} is not a batch of this version of the library: its header says {metadata}")
    try:
        columns = {name.split(".")[0]: None for name in tensors}
        return Batch({name: _column(name, tensors) for name in columns})
    except (DataError, KeyError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}; write it again, or delete it") from error


def save_rollout(folder: Path, step: int, rank: int, num_ranks: int, batch: Batch) -> Path:
    """Write the samples of one of num_ranks ranks in a training step, one file per rank, and return its path.

    Raises as `save_batch` does, and DataError for a batch without the column `trajectory`, which names its samples.
    """
    if "trajectory" not in batch:
        raise DataError(f"a rollout needs the column trajectory, which names samples; the batch has {sorted(batch)}")
    path = Path(folder) / f"step-{step:06d}-rank-{rank:04d}-of-{num_ranks:04d}.safetensors"
    save_batch(path, batch)
    return path


def load_rollout(folder: Path, step: int) -> Batch:
    """Return the samples of all ranks in a training step, ordered by trajectory and then by turn.

    Raises DataError if the step, or the file of a rank, is missing or damaged.
    """
    files = [(rank, num_ranks, path) for at, rank, num_ranks, path in _files(Path(folder)) if at == step]
    if not files:
        raise DataError(f"{folder} has no rollout of step {step}; it has steps {rollout_steps(folder)}")
    sizes = sorted({num_ranks for _, num_ranks, _ in files})
    if len(sizes) > 1:
        raise DataError(
            f"{folder} has rollouts of step {step} from runs of {sizes} ranks; delete the files of all but one run"
        )
    missing = sorted(set(range(sizes[0])) - {rank for rank, _, _ in files})
    if missing:
        raise DataError(
            f"{folder} lacks the rollout of step {step} from rank(s) {missing} of {sizes[0]}; copy their files there, "
            f"or leave this step out"
        )
    parts = [load_batch(path) for _, _, path in sorted(files)]
    # A rank without samples may not know the columns of the others.
    batch = Batch.concat([part for part in parts if part.num_samples] or parts[:1])
    if "trajectory" not in batch:
        raise DataError(
            f"{folder}: the rollout of step {step}: the batch has no column trajectory, which names its samples; older "
            "versions saved none: roll out again"
        )
    return batch.select(key_order(batch))


def set_rollouts_aside(folder: Path, step: int) -> None:
    """Rename the rollouts of later steps: a run that resumes from this step makes new ones."""
    if Path(folder).is_dir():
        for at, _, _, path in list(_files(Path(folder))):
            if at > step:
                set_aside(path, "dropped")


def rollout_steps(folder: Path) -> list[int]:
    """Return the training steps whose rollouts are in a folder, ascending."""
    return sorted({step for step, _, _, _ in _files(Path(folder))})


def _files(folder: Path) -> Iterator[tuple[int, int, int, Path]]:
    """Yield step, rank, number of ranks and path of every rollout."""
    if not folder.is_dir():
        raise DataError(f"the folder of rollouts {folder} does not exist; correct the path")
    for path in folder.iterdir():
        match = _ROLLOUT.fullmatch(path.name)
        if match:
            yield int(match[1]), int(match[2]), int(match[3]), path


def _tensors(name: str, column: Column) -> Iterator[tuple[str, Tensor]]:
    # Copies: columns may share their offsets, and the format has no tensors that share memory.
    if isinstance(column, Jagged):
        yield f"{name}.values", column.values.detach().cpu().contiguous().clone()
        yield f"{name}.offsets", column.offsets.cpu().contiguous().clone()
    elif isinstance(column, Tensor):
        yield name, column.detach().cpu().contiguous().clone()
    else:
        for index, value in enumerate(column):
            _check_json(value, f"column {name!r}, sample {index}")
        # surrogatepass: Python strings may contain halves of characters, which must survive the round trip.
        text = json.dumps(column, ensure_ascii=False).encode("utf-8", "surrogatepass")
        yield f"{name}.json", torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _column(name: str, tensors: dict[str, Tensor]) -> Column:
    if name not in FIELDS:
        raise DataError(f"unknown column {name!r}")
    if FIELDS[name].align == "sample":
        return tensors[name]
    if FIELDS[name].align == "object":
        return json.loads(tensors[f"{name}.json"].numpy().tobytes().decode("utf-8", "surrogatepass"))
    return Jagged(tensors[f"{name}.values"], tensors[f"{name}.offsets"])


def _check_json(value: Any, where: str) -> None:
    """Raise DataError unless JSON reproduces this value exactly."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise DataError(f"{where} has the key {key!r} of type {type(key).__name__}; use text")
            _check_json(inner, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_json(inner, f"{where}[{index}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise DataError(
            f"{where} is of type {type(value).__name__}, which the file cannot hold; use text, numbers, True, False, "
            f"None, lists and dicts, or leave it out of the dataset while rollouts are saved"
        )
