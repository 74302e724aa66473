"""Handoff through files, to engines that share nothing with the trainer but a folder.

Each version has a folder (`resharding/folders.py`), to which every rank writes its shards; a version is complete or
absent.
"""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.folders import (
    Content,
    put_in_place,
    read_manifest,
    replacing,
    write_manifest,
    write_part,
)
from hybrid_rl.resharding.handoff.base import (
    DISK,
    Delivered,
    Gather,
    Parts,
    Source,
    agree,
    alone,
    assembled,
    cells,
    copy_shares,
    number_of,
)
from hybrid_rl.resharding.layout import ShardedTensor, SourceLayout, TensorSpec
from hybrid_rl.resharding.rank_plan import Plan
from hybrid_rl.resharding.shards import stored_boxes
from hybrid_rl.weights.boxes import Box, overlap, within

logger = logging.getLogger("hybrid_rl")

_PREFIX = "version-"
_PARTIAL = ".partial"  # suffix of unfinished or replaced versions


def version_folder(root: Path, version: int) -> Path:
    """Return the folder of a version."""
    return root / f"{_PREFIX}{version:08d}"


def write_version(
    root: Path,
    version: int,
    tensors: Mapping[str, Tensor],
    *,
    rank: int = 0,
    gather: Gather = alone,
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Write the weights of a policy version, plain or sharded, by name; return its folder. Collective; each rank writes
    its own part.

    notes: anything else to tell the readers, of types that JSON has.

    All other versions are removed, and the same one is replaced. One training run at a time writes to a folder, and its
    versions rise: those above the new one are left over from another run. A reader of what is replaced or removed gets
    an error, never parts of both.

    Raises HandoffError on every rank if one cannot write; the folder then holds what it held before.
    """
    folder = version_folder(root, version)
    partial, replaced = (root / f".{folder.name}{kind}{_PARTIAL}" for kind in ("", ".replaced"))
    is_leader = rank == 0

    def begin() -> None:
        for left_over in root.glob(f".{_PREFIX}*{_PARTIAL}"):  # of writers that were killed
            shutil.rmtree(left_over, ignore_errors=True)
        partial.mkdir(parents=True)

    def complete(files: Mapping[str, Content]) -> None:
        before = _versions(root)
        specs = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in sorted(tensors.items())}
        write_manifest(partial, files, version=version, tensors=specs, notes=dict(notes or {}))
        put_in_place(folder, partial, replaced)
        for other in {*before} - {version}:
            shutil.rmtree(version_folder(root, other), ignore_errors=True)
        if others := [there for there in before if there >= version]:
            message = "%s held policy versions %s of another run; version %d takes their place"
            logger.warning(message, root, others, version)

    with replacing(folder, partial, replaced, is_leader=is_leader):
        _agree(gather, version, lambda: begin() if is_leader else None)
        files: dict[str, Content] = {}
        for part in _agree(gather, version, lambda: write_part(partial, tensors, rank)):
            files |= part
        _agree(gather, version, lambda: complete(files) if is_leader else None)
    return folder


class DiskSource(Source):
    """The weights of one version, of which a plan's parts are read from its folder. Its layout's ranks are the files.

    reader, num_readers: which of the readers that share the work of checking hashes this is. gather: over all readers.
    notes: what the writer told beside the tensors.

    Raises HandoffError on every reader if the version is missing, or its files differ from what was written.
    """

    _prefix = ""  # of the names in the files

    def __init__(
        self,
        root: Path,
        version: int,
        *,
        reader: int = 0,
        num_readers: int = 1,
        gather: Gather = alone,
        device: torch.device | str = "cpu",
    ) -> None:
        self._folder = version_folder(root, version)
        self._version, self._reader, self._num_readers, self.gather = version, reader, num_readers, gather
        self._device = torch.device(device)

        def read() -> dict[str, Content]:
            self._identity = _identity(self._folder)
            files, tensors, self.notes = _read_manifest(root, self._folder, version)
            self._names = sorted(files)
            _check_files(self._folder, files, reader, num_readers)
            self._layout = _layout(self._folder, self._names, tensors, num_readers)
            self._check_same()
            return files

        first, *others = _agree(gather, version, read)
        if any(files != first for files in others):
            raise self._replaced()
        self._opened: dict[int, list[Tensor | None]] = {}

    def part(self, prefix: str) -> DiskSource:
        """Return a source of the tensors whose names begin so, by the rest of their names."""
        source = copy(self)
        source._prefix, source._opened = self._prefix + prefix, {}
        source._layout = SourceLayout(
            tuple(
                replace(tensor, spec=replace(tensor.spec, name=tensor.spec.name.removeprefix(prefix)))
                for tensor in self._layout.tensors
                if tensor.spec.name.startswith(prefix)
            ),
            self._layout.hosts,
        )
        return source

    def prepare(self, version: int) -> None:
        """Check the version. Raises HandoffError for a version other than that of the folder."""
        super().prepare(version)
        if version != self._version:
            raise HandoffError(f"{self._folder} holds policy version {self._version}, not {version}; open that version")

    def deliver(self, plan: Plan, destinations: Sequence[Tensor]) -> Delivered:
        """Map the files and read what the plan needs."""
        return Delivered.of(plan, destinations, *copy_shares(plan.shares, self._parts, destinations, lambda rank: DISK))

    def full(self, name: str) -> Tensor:
        """Assemble one tensor from the files; not collective."""
        return assembled(self._layout, name, self._parts, self._device)

    def read_into(self, target: Tensor, name: str, box: Box) -> None:
        """Write a box of one tensor from the mapped files, without a copy of the whole; not collective. target: of the
        box's shape, any dtype and device."""
        number = number_of(self._layout, name)
        for cell, owners in cells(self._layout.tensors[number]):
            common = overlap(cell, box)
            if common is None:
                continue
            part = self._parts(owners[0])[number]
            assert part is not None, "the layout was made from what the files hold"
            extents = [side.stop - side.start for side in cell]
            target[within(common, box)].copy_(part.reshape(extents)[within(common, cell)])

    def held(self) -> dict[int, Parts]:
        """Return the parts in this reader's share of the files."""
        return {number: self._parts(number) for number in range(self._reader, len(self._names), self._num_readers)}

    def close(self) -> None:
        """Unmap the files."""
        self._opened = {}

    def _parts(self, number: int) -> Parts:
        if number not in self._opened:
            path = self._folder / self._names[number]
            try:
                with safe_open(path, framework="pt", device=str(self._device)) as file:
                    inside = set(file.keys())
                    names = [self._prefix + sharded.spec.name for sharded in self._layout.tensors]
                    parts = [file.get_tensor(name) if name in inside else None for name in names]
            except (OSError, SafetensorError) as error:
                raise self._replaced() from error
            self._check_same()  # only now, because open files cannot be replaced any more
            self._opened[number] = parts
        return self._opened[number]

    def _check_same(self) -> None:
        if _identity(self._folder) != self._identity:
            raise self._replaced()

    def _replaced(self) -> HandoffError:
        return HandoffError(
            f"{self._folder} was replaced or removed while it was read; let one training run at a time write there, "
            f"and read a version before the next ones push it out"
        )


def _agree(gather: Gather, version: int, action: Callable[[], Any]) -> list[Any]:
    """Run an action on every participant and return the results. Raises HandoffError on all if it fails on one."""
    try:
        return agree(gather, f"the files of policy version {version}", action)
    except HandoffError:
        raise
    except Exception as error:  # safetensors raises errors of its own
        raise HandoffError(f"files of policy version {version}: {type(error).__name__}: {error}") from error


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what identifies a folder among others of the same name, and changes if files are removed from it; None if
    it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _versions(root: Path) -> list[int]:
    names = [path.name for path in root.glob(f"{_PREFIX}*")]
    return sorted(int(name.removeprefix(_PREFIX)) for name in names if name.removeprefix(_PREFIX).isdecimal())


def _read_manifest(root: Path, folder: Path, version: int) -> tuple[dict[str, Content], dict[str, Any], dict[str, Any]]:
    """Return the files of a version, dtype and shape of its tensors by name, and the writer's notes."""
    try:
        files_and_manifest = read_manifest(folder)
        if files_and_manifest is None:
            there = _versions(root)
            raise HandoffError(f"{root} does not hold policy version {version}; it holds {there[-3:] or 'none'}")
        files, manifest = files_and_manifest
        stored, tensors, notes = manifest["version"], dict(manifest["tensors"]), dict(manifest["notes"])
    except (ValueError, KeyError, TypeError) as error:
        raise HandoffError(f"{error}; write the version again") from error
    if stored != version:
        raise HandoffError(f"{folder} holds policy version {stored}, not {version}; it was moved or copied")
    return files, tensors, notes


def _check_files(folder: Path, files: Mapping[str, Content], reader: int, num_readers: int) -> None:
    for number, (name, content) in enumerate(sorted(files.items())):
        problem = content.problem_of(folder / name, is_read=number % num_readers == reader)
        if problem is not None:
            raise HandoffError(f"{folder / name} is damaged: {problem}; write the version again")


def _layout(folder: Path, names: Sequence[str], tensors: Mapping[str, Any], num_readers: int) -> SourceLayout:
    """Make the layout from the boxes that the files hold. Every reader is a rank, even without a file."""
    numbers = {name: number for number, name in enumerate(names)}
    boxes = stored_boxes(folder)
    sharded = []
    for name, (dtype, shape) in sorted(tensors.items()):
        spec = TensorSpec(name, tuple(shape), getattr(torch, dtype))
        sharded.append(_grid(folder, spec, [(box, numbers[file]) for file, box in boxes.get(name, [])]))
    return SourceLayout(tuple(sharded), (socket.gethostname(),) * max(len(names), num_readers))


def _grid(folder: Path, spec: TensorSpec, boxes: Sequence[tuple[Box, int]]) -> ShardedTensor:
    cuts = tuple(
        tuple(sorted({0, extent, *(at for box, _ in boxes for at in (box[dim].start, box[dim].stop))}))
        for dim, extent in enumerate(spec.shape)
    )
    owners = np.full((*(len(c) - 1 for c in cuts), 1), -1, dtype=np.int32)
    for box, number in boxes:
        if 0 not in owners.shape:
            cell = tuple(c.index(side.start) for c, side in zip(cuts, box, strict=True))
            is_cell = all(c[at + 1] == side.stop for c, at, side in zip(cuts, cell, box, strict=True))
            owners[cell] = number if is_cell else -1
    if (owners < 0).any():
        raise HandoffError(
            f"{folder} is incomplete: {int((owners < 0).sum())} of {owners.size} parts of {spec.name} "
            f"{list(spec.shape)} are in none of its files; write the version again"
        )
    return ShardedTensor(spec, cuts, owners)
