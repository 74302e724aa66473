"""A checkpoint that is written while training goes on, each rank's part by a thread of its own.

Threads of different ranks agree through files in the hidden folder in which the checkpoint is made, never by a
collective, which would meet those of the training. A rank that has written and synchronised its files leaves a part
file with what they hold; the leader waits for all part files, writes state and manifest, and gives the folder its name.
A rank that fails leaves none, so that the checkpoint cannot appear; the driver, which asks all ranks between steps,
then has the leader give up.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hybrid_rl.checkpoint.finding import hidden_name, sync_records
from hybrid_rl.checkpoint.manifest import STATE_FILE
from hybrid_rl.checkpoint.snapshot import Snapshot
from hybrid_rl.errors import CheckpointError
from hybrid_rl.metrics.metric_sums import now
from hybrid_rl.process.files import write_text
from hybrid_rl.resharding.folders import Content, put_in_place, replacing, sync, write_manifest

logger = logging.getLogger("hybrid_rl")

PART = ".part-{}.json"  # of a rank, in the hidden folder; none is left in a checkpoint
LOOK_SECONDS = 0.05
GIVEN_UP = "given up"  # the error of a rank that ended because of another one's


@dataclass(frozen=True)
class Progress:
    """How far a rank is. error: why its part, or the checkpoint, could not be written; "" = nothing failed. seconds:
    since it began."""

    is_done: bool
    error: str
    seconds: float


class GivenUpError(Exception):
    """The checkpoint is not to be written any more."""


class BackgroundWrite:
    """The thread of one rank that writes a checkpoint. common: the hidden folder, which the leader has made; state: of
    the trainer, as text."""

    def __init__(
        self, folder: Path, common: Path, snapshot: Snapshot, state: str, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self._folder, self._common, self._snapshot = folder, common, snapshot
        self._state, self._rank, self._num_ranks = state, rank, num_ranks
        self._given_up, self._error = threading.Event(), ""
        self._start, self._end = now(), 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def progress(self, wait_seconds: float = 0.0) -> Progress:
        """Tell how far it is, at once or after waiting so long for the end."""
        self._thread.join(wait_seconds)
        is_done = not self._thread.is_alive()
        return Progress(is_done, self._error, (self._end if is_done else now()) - self._start)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def give_up(self) -> None:
        """Have it end without a checkpoint: another rank has failed. It does not wait: a disk may hang."""
        self._given_up.set()

    def _run(self) -> None:
        try:
            if self._rank == 0:
                with replacing(self._folder, self._common, hidden_name(self._folder, "old"), is_leader=True):
                    self._complete(self._snapshot.write(self._common, self._go_on))
            else:
                self._leave_part(self._snapshot.write(self._common, self._go_on))
        except GivenUpError:
            self._error = self._error or GIVEN_UP
        except Exception as error:  # safetensors wraps I/O errors in its own types
            self._error = f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        finally:
            self._snapshot = Snapshot()  # its memory is free again
            self._end = now()

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise GivenUpError

    def _leave_part(self, written: Mapping[str, Content]) -> None:
        """Say what this rank has written, in a file that appears whole."""
        path = self._common / PART.format(self._rank)
        text = json.dumps({name: asdict(content) for name, content in written.items()})
        write_text(path, text)
        sync(path)

    def _complete(self, written: dict[str, Content]) -> None:
        """Wait for the parts of the other ranks, and finish the checkpoint."""
        for rank in range(1, self._num_ranks):
            path = self._common / PART.format(rank)
            while not path.is_file():
                self._go_on()
                if not self._common.is_dir():
                    raise FileNotFoundError(f"{self._common} is gone")
                self._given_up.wait(LOOK_SECONDS)
            written |= {name: Content(**content) for name, content in json.loads(path.read_text()).items()}
            path.unlink()
        (self._common / STATE_FILE).write_text(self._state)
        write_manifest(self._common, written)
        sync_records(self._folder.parent)
        self._go_on()
        put_in_place(self._folder, self._common, hidden_name(self._folder, "old"))
