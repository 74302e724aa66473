"""What one rank writes into a checkpoint, in host memory: training goes on while it is written."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybrid_rl.checkpoint.reading import OPTIMIZER_FOLDER, SCALARS_FILE, split
from hybrid_rl.controller.session import shared_memory, temporary_folder
from hybrid_rl.memory.probe import available_host_bytes
from hybrid_rl.process.files import Sink, content_digest, save_tensors
from hybrid_rl.resharding.folders import Content, sync
from hybrid_rl.resharding.shards import own_parts, write_shards
from hybrid_rl.weights.boxes import local_tensor

USABLE_SHARE = 0.8  # of the memory that a host can still give: the step that goes on needs some of it too
FILES = "files"


class SaveModel(Protocol):
    """Writes this rank's part of the models into a folder; with a sink, the tensors of each file go there."""

    def __call__(self, folder: Path, sink: Sink | None = None) -> None: ...


class Snapshot:
    """The files of one rank, as they are to be written. num_bytes: of host memory."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[Mapping[str, Tensor], Mapping[str, str]]] = {}
        self._texts: dict[str, bytes] = {}

    @classmethod
    def take(cls, save_model: SaveModel, optimizers: Mapping[str, Mapping[str, Any]], rank: int) -> Snapshot:
        """Copy what a checkpoint holds. optimizers: as in `write_checkpoint`, by folder. Collective, as save_model is.
        Raises OSError if the small files cannot be made, and whatever save_model raises."""
        snapshot = cls()
        # Libraries write their small files into folders only.
        with temporary_folder("hrl-snapshot-", shared_memory()) as place:
            root = place / FILES

            def sink(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
                snapshot._tensors[path.relative_to(root).as_posix()] = (tensors, metadata)

            for part in optimizers:
                (root / part / OPTIMIZER_FOLDER).mkdir(parents=True)
            save_model(root, sink)
            for part, its in optimizers.items():
                tensors, rest = split(its)
                write_shards(root / part / OPTIMIZER_FOLDER, tensors, rank, sink)
                if rank == 0:
                    (root / part / OPTIMIZER_FOLDER / SCALARS_FILE).write_text(json.dumps(rest, indent=2))
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    snapshot._texts[path.relative_to(root).as_posix()] = path.read_bytes()
        return snapshot

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        tensors = (tensor for file, _ in self._tensors.values() for tensor in file.values())
        return sum(tensor.nbytes for tensor in tensors) + sum(map(len, self._texts.values()))

    def write(self, folder: Path, go_on: Callable[[], None]) -> dict[str, Content]:
        """Write all files into a folder that is there, and wait until they are on the disk; memory is given up file by
        file. go_on: called before each file; raises if it is not to be written any more. Returns what the files hold,
        by name. Raises OSError, and errors of safetensors."""
        written = {}
        for name in list(self._tensors):
            go_on()
            tensors, metadata = self._tensors.pop(name)
            _make_parent(folder, name)
            save_tensors(tensors, folder / name, metadata)
            del tensors
            written[name] = _synced(folder / name)
        for name in list(self._texts):
            go_on()
            _make_parent(folder, name)
            (folder / name).write_bytes(self._texts.pop(name))
            written[name] = _synced(folder / name)
        return written


def _make_parent(folder: Path, name: str) -> None:
    # The checkpoint's own folder is never made again: if it is gone, so is what was written.
    for parent in reversed((folder / name).relative_to(folder).parents[:-1]):
        (folder / parent).mkdir(exist_ok=True)


def _synced(path: Path) -> Content:
    """Wait until a file is on the disk, and read it. It is no sign of life of the training that goes on."""
    sync(path)
    return Content(path.stat().st_size, content_digest(path))


@dataclass(frozen=True)
class Room:
    """The host memory that the snapshot of a rank takes, and that its host can give."""

    host: str
    num_bytes: int
    available_bytes: int

    @classmethod
    def of(cls, model_bytes: int, optimizers: Mapping[str, Mapping[str, Any]], rank: int) -> Room:
        """Count for this rank. model_bytes: of the models' files that it writes."""
        own = (own_parts(split(its)[0], rank) for its in optimizers.values())
        tensors = (local_tensor(tensor) for parts in own for tensor in parts.values())
        return cls(socket.gethostname(), model_bytes + sum(t.nbytes for t in tensors), available_host_bytes())


def missing_room(rooms: list[Room]) -> Room | None:
    """Return the first host that cannot hold the snapshots of its ranks, with the bytes of all of them; None if all
    can."""
    for host in dict.fromkeys(room.host for room in rooms):
        its = [room for room in rooms if room.host == host]
        total, there = sum(room.num_bytes for room in its), min(room.available_bytes for room in its)
        if total > USABLE_SHARE * there:
            return Room(host, total, there)
    return None
