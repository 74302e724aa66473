"""Reading of a checkpoint's training state, all that is not the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hybrid_rl.checkpoint.manifest import STATE_FILE
from hybrid_rl.errors import CheckpointError
from hybrid_rl.resharding.shards import read_shards

OPTIMIZER_FOLDER = "optimizer"
SCALARS_FILE = "scalars.json"
BASE = "base"  # its entry for the base of adapters: {"path": ..., "hashes": {dtype: hash}, "config": {...}}
KINDS: Mapping[str, type] = {
    "global_step": int,
    "num_tokens": int,
    "sampler": dict,
    "config": dict,
    "best": dict,
    BASE: dict,
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint from which a run goes on, read once. state: of the trainer, with all that a run needs to go on."""

    folder: Path
    state: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the state in a folder. Raises CheckpointError as `read_state`."""
        return cls(folder, read_state(folder, ("global_step", "num_tokens", "sampler")))

    @property
    def step(self) -> int:
        """Its training steps."""
        return int(self.state["global_step"])

    @property
    def base(self) -> Mapping[str, Any] | None:
        """Where the base model of its adapters is, with hashes; None if it has none."""
        return self.state.get(BASE)

    @property
    def held(self) -> list[int]:
        """The groups that it holds."""
        return self.state.get("collector", {}).get("held", [])

    def __str__(self) -> str:
        return str(self.folder)


def read_state(folder: Path, required: Iterable[str] = ()) -> dict[str, Any]:
    """Read the trainer's state of a checkpoint. Raises CheckpointError if it, or a required entry, is missing or
    impossible, or if it is of another training step than the folder's name says."""
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {STATE_FILE}")
    try:
        state = _read_object(path)
        missing = sorted(set(required) - state.keys())
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        for name in KINDS.keys() & state.keys():
            value = state[name]
            if type(value) is not KINDS[name] or (isinstance(value, int) and value < 0):
                raise ValueError(f"its {name} is {value!r}")
        check_name(folder, state)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return state


def check_name(folder: Path, state: Mapping[str, Any]) -> None:
    """Raise ValueError if a folder is named after another training step than that of its state."""
    named, step = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name), state.get("global_step")
    if named is not None and isinstance(step, int) and int(named[1]) != step:
        raise ValueError(
            f"its global_step is {step}, but the folder is named {folder.name}; rename the folder to checkpoint-{step}"
        )


def read_optimizer_into(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the tensors of an optimizer's state from a checkpoint written by any number of ranks, and return the state:
    those tensors, and the checkpoint's numbers.

    Every rank reads its own parts; nothing is communicated. Raises CheckpointError, before anything is changed, if the
    files are damaged or of another model.
    """
    path = folder / OPTIMIZER_FOLDER
    try:
        rest = _read_object(path / SCALARS_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path / SCALARS_FILE}: {error}") from error
    read_shards(path, split(state)[0])
    try:
        return _joined(state, rest)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / SCALARS_FILE} is damaged: {type(error).__name__}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises OSError and ValueError."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def split(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split nested mappings into their tensors by path ("exp_avg.<parameter>"), and the same mappings without them."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            inner, rest[key] = split(value, f"{prefix}{key}.")
            tensors |= inner
        else:
            rest[key] = value
    return tensors, rest


def _joined(state: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Join the tensors of `state` with everything else of `rest`."""
    joined = dict(rest)
    for key, value in state.items():
        if isinstance(value, Tensor):
            joined[key] = value
        elif isinstance(value, Mapping):
            joined[key] = _joined(value, rest.get(key, {}))
    return joined
