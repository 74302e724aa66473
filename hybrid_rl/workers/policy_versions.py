"""Versions of the policy on their way to ranks that only generate: files in shared memory.

A version holds the weights; of a policy with adapters only the adapters, beside the base, which is written once. With
it travels the trainer's half of a probe, so that ranks that generate need no policy beside their engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.errors import ConfigError, HandoffError, counted
from hybrid_rl.memory.byte_sizes import size_text
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.base import Gather
from hybrid_rl.resharding.handoff.disk import DiskSource, write_version
from hybrid_rl.weights.boxes import local_box, local_tensor
from hybrid_rl.weights.low_rank import LowRank

BASE, BASE_VERSION = "base", 0  # the folder of frozen weights, and their only version
WEIGHTS, PROBE = "weights/", "probe"  # what names in a version begin with
FACTORS = ("a", "b", "row_factor")  # of a LowRank, likewise
CHANGES = "changes"  # the note about the rest of each


def require_folder(root: Path) -> None:
    """Raise ConfigError if the folder through which weights travel is not there: it is memory of one machine."""
    if not root.is_dir():
        raise ConfigError(
            f"rollout_ranks hands weights over through {root}, memory of the machine where the run was started, but a "
            "rank runs on another one; use a Ray cluster of one machine, or leave rollout_ranks out"
        )


def require_room(root: Path, model: CausalLM, *, writes_base: bool) -> None:
    """Raise ConfigError if the folder of versions has too little room for two of this model, as many as there are for
    a moment. writes_base: whether the frozen weights below adapters are written too. Not if anything is there already:
    another rank has begun to write, or versions are replaced."""
    if any(root.iterdir()):
        return
    versions = 2 * sum(tensor.nbytes for tensor in model.weights.moving().values())
    base = sum(p.nbytes for p in model.module.parameters() if not p.requires_grad) if writes_base else 0
    free = shutil.disk_usage(root).free
    if versions + base > free:
        raise ConfigError(
            f"rollout_ranks hands weights over through {root}, which has {size_text(free)} free, but two versions of "
            f"the policy take {size_text(versions + base)}; give the machine or container more shared memory (docker "
            f"run --ipc=host, or --shm-size=), or leave rollout_ranks out"
        )


def write_policy(
    root: Path,
    version: int,
    model: CausalLM,
    *,
    is_embedded: bool,
    probe: Tensor | None,
    writes_base: bool,
    rank: int,
    gather: Gather,
) -> None:
    """Write a version of the policy. Collective.

    root: the folder of all versions. is_embedded: whether engines decode from modules like the model's, with its
    adapters; others get the weights without adapters, and what adapters add to them.
    probe: the trainer's half of it, None if it is not due. writes_base: whether the frozen weights are written too.
    """
    share: Any = {"rank": rank, "gather": gather}
    moving, fixed, changes = (model.weights.moving(), {}, {}) if is_embedded else model.weights.version(model.dtype)
    if fixed and writes_base:
        write_version(root / BASE, BASE_VERSION, fixed, **share)
    tensors = {WEIGHTS + name: tensor for name, tensor in moving.items()}
    for name, change in changes.items():
        factors = {factor: getattr(change, factor) for factor in FACTORS}
        tensors |= {f"{factor}/{name}": value for factor, value in factors.items() if value is not None}
    notes = {CHANGES: {name: [change.scale, change.is_transposed] for name, change in changes.items()}}
    if probe is not None:
        tensors[PROBE] = probe
    write_version(root, version, tensors, notes=notes, **share)


@torch.no_grad()
def fill(model: CausalLM, source: DiskSource) -> int:
    """Copy the moving weights of a version into a model with the same names, plain or sharded. Returns the bytes
    written. Raises HandoffError for other names."""
    weights = model.weights.moving()
    there = {sharded.spec.name for sharded in source.layout().tensors}
    if other := sorted(there ^ set(weights)):
        raise HandoffError(
            f"the ranks that train and those that generate differ in {counted(len(other), 'weight')}, e.g. {other[0]}: "
            "the module was changed since it was loaded; make a new Trainer"
        )
    for name, tensor in weights.items():
        source.read_into(local_tensor(tensor), name, local_box(tensor))
    return sum(local_tensor(tensor).nbytes for tensor in weights.values())


class _BaseSource(DiskSource):
    """Frozen weights: part of every version."""

    def prepare(self, version: int) -> None:
        """Accept any version."""


class PolicyReader:
    """Reads versions on a rank that generates. Making it and reading are collective over the readers.

    root: the folder of all versions. dtype: in which the policy computes.
    """

    def __init__(self, root: Path, dtype: torch.dtype, *, reader: int, num_readers: int, gather: Gather) -> None:
        self._root, self._dtype = root, dtype
        self._share: Any = {"reader": reader, "num_readers": num_readers, "gather": gather}
        self._base: DiskSource | None = None

    @contextmanager
    def read(self, version: int) -> Iterator[tuple[DiskSource, dict[str, LowRank]]]:
        """Map a version into host memory inside the block, and check its hashes; those of the base once. Yields the
        source of its weights, and what adapters add to them. Raises HandoffError for files that differ from what was
        written."""
        self._files = files = DiskSource(self._root, version, **self._share)
        weights = files.part(WEIGHTS)
        if not weights.layout().tensors:
            if self._base is None:
                self._base = _BaseSource(self._root / BASE, BASE_VERSION, **self._share)
            weights = self._base
        notes = files.notes.get(CHANGES, {})
        try:
            yield weights, {name: self._change(files, name, *note) for name, note in notes.items()}
        finally:
            weights.close()
            files.close()

    def _change(self, files: DiskSource, name: str, scale: float, is_transposed: bool) -> LowRank:
        there = {sharded.spec.name for sharded in files.layout().tensors}
        a, b, row_factor = (
            files.full(tensor_name) if (tensor_name := f"{factor}/{name}") in there else None for factor in FACTORS
        )
        assert a is not None and b is not None, "a change has both"
        return LowRank(a, b, scale, is_transposed, row_factor, self._dtype)

    @property
    def probe(self) -> Tensor | None:
        """The trainer's half of the probe of the version that is read, `HandoffProbe.expected`; None if it has none."""
        there = {sharded.spec.name for sharded in self._files.layout().tensors}
        return self._files.part(PROBE).full("") if PROBE in there else None  # the weights are not mapped for it
