"""Batches of samples, and references to batches whose samples are kept on the workers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_rl.batch.batch import Batch as Batch
    from hybrid_rl.batch.batch import Column as Column
    from hybrid_rl.batch.fields import FIELDS as FIELDS
    from hybrid_rl.batch.fields import TRUNCATIONS as TRUNCATIONS
    from hybrid_rl.batch.fields import Field as Field
    from hybrid_rl.batch.jagged import Jagged as Jagged
    from hybrid_rl.batch.jagged import lengths_to_offsets as lengths_to_offsets
    from hybrid_rl.batch.ref import AnyBatch as AnyBatch
    from hybrid_rl.batch.ref import BatchRef as BatchRef
    from hybrid_rl.batch.ref import Piece as Piece
    from hybrid_rl.batch.ref import store as store
    from hybrid_rl.batch.samples import Sample as Sample
    from hybrid_rl.batch.samples import Token as Token
    from hybrid_rl.batch.trajectories import SampleKey as SampleKey
    from hybrid_rl.batch.trajectories import Trajectories as Trajectories

# Imported when first used: hybrid_rl.batch.messages needs no PyTorch.
_HOMES = {
    "batch": ("Batch", "Column"),
    "fields": ("FIELDS", "TRUNCATIONS", "Field"),
    "jagged": ("Jagged", "lengths_to_offsets"),
    "ref": ("AnyBatch", "BatchRef", "Piece", "store"),
    "samples": ("Sample", "Token"),
    "trajectories": ("SampleKey", "Trajectories"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        attribute = globals()[name] = getattr(importlib.import_module(f"hybrid_rl.batch.{_MODULES[name]}"), name)
        return attribute
    raise AttributeError(f"module 'hybrid_rl.batch' has no attribute {name!r}")
