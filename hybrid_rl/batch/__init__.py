"""Batches of samples, and references to batches whose samples are kept on the workers."""

from hybrid_rl.batch.batch import Batch, Column
from hybrid_rl.batch.fields import FIELDS, TRUNCATIONS, Field
from hybrid_rl.batch.jagged import Jagged, lengths_to_offsets
from hybrid_rl.batch.ref import AnyBatch, BatchRef, Piece, store
from hybrid_rl.batch.trajectories import SampleKey, Trajectories

__all__ = [
    "FIELDS",
    "TRUNCATIONS",
    "AnyBatch",
    "Batch",
    "BatchRef",
    "Column",
    "Field",
    "Jagged",
    "Piece",
    "SampleKey",
    "Trajectories",
    "lengths_to_offsets",
    "store",
]
