"""The folder of a run: config.yaml, metrics.jsonl, samples.jsonl, and a picture of the curves."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_rl.errors import ConfigError, HybridRLError, StorageError, counted
from hybrid_rl.logging.warned import AGAIN
from hybrid_rl.metrics.metric_sums import finite
from hybrid_rl.process.hooks import extra

logger = logging.getLogger("hybrid_rl")

# Besides metrics.jsonl: files with a record, or several, of each step.
LOGS = ("samples*.jsonl", "eval-samples*.jsonl", "timeline.jsonl")


MAX_PENDING_BYTES = 2**28  # of records of one file that wait for the disk


class JsonLines:
    """A JSON-lines file that survives a disk that is full, read-only or gone: records that cannot be written now are
    kept and written later, up to MAX_PENDING_BYTES, and a record that was cut short is removed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[str] = []
        self._warned = False
        self._num_dropped = 0
        self._size = 0  # bytes in the file after the last record

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per record."""
        self._pending += [self._line(record) for record in records]
        self.flush()

    def keep_until(self, step: int) -> list[str]:
        """Forget records of later steps that wait for the disk, because a resumed run makes them again, and how long
        the file was before it was cut. Returns what was forgotten, as lines."""
        later = [line for line in self._pending if (_step_of(line.encode(errors="backslashreplace")) or 0) > step]
        self._pending = [line for line in self._pending if line not in later]
        self._size = 0
        return later

    def _line(self, record: Mapping[str, Any]) -> str:
        """Return a record as a line. Values that JSON cannot hold are replaced: the rest must not be lost with them."""
        try:
            return _json(record)
        except Exception:
            written = {}
            for name, value in record.items():
                try:
                    _json(value)
                    written[str(name)] = value
                except Exception as error:
                    written[str(name)] = f"(cannot be written: {type(error).__name__}: {error})"
                    logger.warning("%s: the column %r of a record cannot be written: %s", self.path, name, error)
            return _json(written)

    def flush(self) -> bool:
        """Try to write the pending records; return whether none is left."""
        if not self._pending:
            return True
        size, data = 0, b""
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                # Half a surrogate pair, which UTF-8 cannot hold, becomes its JSON escape.
                data = "".join(self._pending).encode(errors="backslashreplace")
                try:
                    written = file.write(data)
                    if written != len(data):
                        raise OSError(f"only {written} of {len(data)} bytes could be written")
                except OSError:
                    with contextlib.suppress(OSError):
                        os.ftruncate(file.fileno(), size)
                    raise
        except OSError as error:
            if not self._warned:
                text = "cannot write %s (%s): keeping its records in memory, up to %d MiB, and trying again"
                logger.warning(text, self.path, error, MAX_PENDING_BYTES // 2**20, extra=AGAIN)
            self._warned = True
            self._drop_oldest()
            return False
        if self._warned:
            lost = []
            if self._num_dropped:
                lost.append(f"{counted(self._num_dropped, 'record')} did not fit into memory and were dropped")
            if size < self._size:
                lost.append("its earlier records are gone: it was removed or cut")
            logger.warning(
                "%s is writable again; %s", self.path, ", and ".join(lost) or "nothing was lost", extra=AGAIN
            )
        self._warned, self._num_dropped, self._size = False, 0, size + len(data)
        self._pending.clear()
        return True

    def _drop_oldest(self) -> None:
        """Drop records until those that wait take no more memory than they may."""
        sizes = [len(line) for line in self._pending]
        excess, number = sum(sizes) - MAX_PENDING_BYTES, 0
        while excess > 0:
            excess, number = excess - sizes[number], number + 1
        if number and not self._num_dropped:
            logger.warning(
                "%s cannot be written, and more than %d MiB of its records wait: the oldest are dropped from now on",
                *(self.path, MAX_PENDING_BYTES // 2**20),
                extra=AGAIN,
            )
        del self._pending[:number]
        self._num_dropped += number


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"


class Dropped(NamedTuple):
    """What was removed from the logs of a run: metrics of so many steps, and unreadable lines by the log's name."""

    num_steps: int
    unreadable: Mapping[str, int]


class RunFolder:
    """The folder `output_dir/name`. If it holds another run's results, a number is appended to the name."""

    def __init__(self, output_dir: str, name: str | None, default_name: str, *, keep: bool = False) -> None:
        self.is_continued = keep
        is_given = bool(name)
        name = name or f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path = _claim(Path(output_dir).absolute(), name, keep, takes_empty=is_given)
        self.taken = None if self.path.name == name else self.path.with_name(name)  # the name that was asked for
        self.metrics = JsonLines(self.path / "metrics.jsonl")

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, completely or not at all."""
        self._write(name, text.encode())

    def _write(self, name: str, content: bytes) -> None:
        target = self.path / name
        temporary = target.with_name(f".{name}.{os.getpid()}")
        try:
            temporary.write_bytes(content)
            temporary.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):  # of a disk that is read-only by now
                temporary.unlink(missing_ok=True)
            raise StorageError(f"cannot write {target}: {error}; free space, or make the folder writable") from error

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one JSON object for a step, without NaN and infinities."""
        self.metrics.write([{"step": step} | finite(metrics) | {"step": step}])  # first key, and not overridden

    def keep_until(self, step: int) -> Dropped:
        """Move records of later steps, which a resumed run makes again, and unreadable lines from each log to the file
        `<log>.dropped` next to it. If it is killed in between, the next call completes it. Raises StorageError if the
        disk is full or read-only."""
        num_steps, unreadable = len(self.metrics.keep_until(step)), {}
        others = (path for pattern in LOGS for path in sorted(self.path.glob(pattern)))
        for path in (self.metrics.path, *others):
            if not path.exists():
                continue
            steps = [(_step_of(line), line) for line in _lines(path)]
            kept = b"".join(line + b"\n" for at, line in steps if at is not None and at <= step)
            dropped = b"".join(line + b"\n" for at, line in steps if at is None or at > step)
            if dropped:
                self._keep_aside(path, dropped)
            if kept != path.read_bytes():
                self._write(path.name, kept)
            if num_unreadable := sum(at is None for at, _ in steps):
                unreadable[path.name] = num_unreadable
            if path == self.metrics.path:
                num_steps += sum(at is not None and at > step for at, _ in steps)
        return Dropped(num_steps, unreadable)

    def _keep_aside(self, path: Path, dropped: bytes) -> None:
        """Append the dropped lines of a log to its file, without repeating those that a killed process had appended."""
        target = path.with_name(f"{path.name}.dropped")
        try:
            with open(target, "a+b") as file:
                size = file.tell()
                file.seek(max(0, size - len(dropped)))
                there = file.read()
                if there != dropped:
                    file.write((b"\n" if there and not there.endswith(b"\n") else b"") + dropped)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}; free space, or make the folder writable") from error

    def steps(self) -> list[int]:
        """The steps whose metrics have been recorded, in the order of the file."""
        lines = _lines(self.metrics.path) if self.metrics.path.exists() else []
        return [step for step in map(_step_of, lines) if step is not None]

    def flush(self, lost: Iterable[Path] = ()) -> list[Path]:
        """Write pending records, and return the files that cannot be written. lost: those of ranks."""
        return [*lost, *([] if self.metrics.flush() else [self.metrics.path])]

    def finish(self, lost: Iterable[Path] = ()) -> None:
        """Draw the curves and write pending records. lost: files of ranks that could not be written.

        Raises HybridRLError if records still cannot be written.
        """
        if lost := self.flush(lost):
            raise HybridRLError(
                f"{', '.join(map(str, lost))}: the disk is full or read-only, and the records of the last steps could "
                "not be written; the model in memory is complete: free space and call trainer.save()"
            )
        try:
            extra("draw_curves")(read_jsonl(self.metrics.path), self.path / "curves.png")
        except OSError as error:
            logger.warning("cannot draw %s: %s", self.path / "curves.png", error)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read all records of a JSON-lines file; [] if it does not exist."""
    return [json.loads(line) for line in _lines(path)] if path.exists() else []


def _lines(path: Path) -> list[bytes]:
    # Not str.splitlines, which also splits at U+2028 and other characters that JSON leaves unescaped in strings.
    return [line for line in path.read_bytes().split(b"\n") if line]


def _step_of(line: bytes) -> int | None:
    """The step of a record; None for a line that is cut short or is not a record."""
    try:
        return int(json.loads(line).get("step", 0))
    except (ValueError, TypeError, AttributeError):
        return None


def _claim(base: Path, name: str, keep: bool, *, takes_empty: bool) -> Path:
    """Make a folder of this name, or of its next number that is free. takes_empty: a folder that is there and empty is
    free, as one that a user has made; one with a time as its name is that of a run that started in the same second."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        if keep:
            (base / name).mkdir(exist_ok=True)
            return base / name
        for number in range(1, 10_000):
            path = base / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                if takes_empty and path.is_dir() and not any(path.iterdir()):
                    return path
    except OSError as error:
        raise ConfigError(
            f"cannot make the run folder {base / name}: {error}; set output_dir to a writable folder"
        ) from error
    raise ConfigError(f"{base / name} and 9,998 numbered variants of it exist; choose another run_name")
