"""Checkpoints: a folder that `from_pretrained` reads, with the rest of the training state beside the weights.

A checkpoint appears whole or not at all: it is written under another name and renamed when it is complete. Its manifest
has a hash of every file, so that damage is reported instead of trained on.
"""

from hybrid_rl.checkpoint.finding import (
    check_resumed,
    checkpoints_of,
    clear_up,
    find_checkpoint,
    newest_checkpoint,
    resumed_folder,
    set_later_aside,
)
from hybrid_rl.checkpoint.manifest import MANIFEST_FILE, check_checkpoint, check_model, check_model_texts
from hybrid_rl.checkpoint.reading import (
    OPTIMIZER_FOLDER,
    SCALARS_FILE,
    STATE_FILE,
    read_optimizer_into,
    read_state,
)
from hybrid_rl.checkpoint.writing import write_checkpoint

__all__ = [
    "MANIFEST_FILE",
    "OPTIMIZER_FOLDER",
    "SCALARS_FILE",
    "STATE_FILE",
    "check_checkpoint",
    "check_model",
    "check_model_texts",
    "check_resumed",
    "checkpoints_of",
    "clear_up",
    "find_checkpoint",
    "newest_checkpoint",
    "read_optimizer_into",
    "read_state",
    "resumed_folder",
    "set_later_aside",
    "write_checkpoint",
]
