"""Metrics and samples on their way to trackers, none of which can stop or slow the run.

metrics.jsonl has everything. A thread for each tracker reads it from where the tracker is, however long that takes,
and tries again after an error; so nothing has to be kept in memory. What has not arrived when the run ends is said,
with the command that sends it later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hybrid_rl.controller.session import at_end
from hybrid_rl.errors import ConfigError, HybridRLError, counted
from hybrid_rl.extras.trackers.tracker_kinds import (
    KINDS,
    Measured,
    TrackedRun,
    Tracker,
    check_wandb,
    known_arguments,
    told,
)
from hybrid_rl.process.files import write_text

logger = logging.getLogger("hybrid_rl")

STATE = "trackers.json"  # in the run folder: by tracker, its name of the run, and the last step that it has
METRICS = "metrics.jsonl"
FORMER_KEY = "tracker_arguments"  # of runs that named the trackers and their arguments apart
CLOSE_SECONDS = 10.0  # that the end of a run waits for a tracker that takes nothing
LONGEST_CLOSE = 120.0  # and for all that are still taking steps
BATCH_STEPS = 10  # that are sent in one call, if so many wait
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between two tries
SLOW_SECONDS = 30.0  # after which a call to a tracker is reported
MAX_TABLES = 32  # steps whose samples wait in memory for a tracker; those of earlier ones are in samples.jsonl
TABLE_TRIES = 4  # after which a table of samples is left out
STATE_SECONDS = 10.0  # between two writes of the state
_state_lock = threading.Lock()


def check_trackers(report_to: Any) -> None:
    """Raise ConfigError for a tracker that does not exist, is not installed or would ask for a login, and for arguments
    that it does not take. report_to: that key."""
    wanted = _arguments(report_to)
    if strange := [name for name in wanted if name not in KINDS]:
        raise ConfigError(f"report_to.{strange[0]}: it is not a tracker; use one of {', '.join(KINDS)}")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"report_to={list(wanted)}: {missing[0]} is not installed; pip install {' '.join(missing)}")
    for name, arguments in wanted.items():
        if not isinstance(arguments, Mapping):
            raise ConfigError(f"report_to.{name}={arguments!r} must be a mapping of arguments")
        if arguments and (unknown := [argument for argument in arguments if argument not in known_arguments(name)]):
            raise ConfigError(
                f"report_to.{name}.{unknown[0]}: {name} has no such argument; it takes "
                f"{', '.join(known_arguments(name))}"
            )
    if "wandb" in wanted:
        check_wandb(wanted["wandb"])


def _arguments(report_to: Any) -> dict[str, Any]:
    """Return the arguments of each tracker, by name. report_to: their names, or the arguments by name."""
    by_name = report_to if isinstance(report_to, Mapping) else dict.fromkeys(report_to)
    return {name: arguments or {} for name, arguments in by_name.items() if name != "none"}


# ---------------------------------------------------------------------------------------------- where a tracker is


def read_state(folder: Path) -> dict[str, dict[str, Any]]:
    """Read which trackers have what of a run; {} if nothing is known."""
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(state, dict):
        return {}
    return {
        name: entry for name, entry in state.items() if isinstance(entry, dict) and isinstance(entry.get("step"), int)
    }


def _write_state(folder: Path, name: str, identity: str, step: int) -> None:
    with _state_lock, contextlib.suppress(OSError):
        state = read_state(folder) | {name: {"id": identity, "step": step}}
        write_text(folder / STATE, json.dumps(state))


def _records(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the whole records of a JSON-lines file from a byte on, each with the byte after it."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "step" in record:
                yield record, offset


def _batches(records: Iterable[tuple[dict[str, Any], int]], first_step: int) -> Iterator[tuple[list[Measured], int]]:
    """Yield the metrics of the steps after `first_step`, several at a time if there are, with the byte after them."""
    batch: list[Measured] = []
    end = None
    for record, end in records:
        step = int(record["step"])
        if step > first_step:
            metrics = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
            batch.append(Measured(step, metrics, time.time()))
        if len(batch) == BATCH_STEPS:
            yield batch, end
            batch = []
    if end is not None:
        yield batch, end


# ------------------------------------------------------------------------------------------------------- delivery


@dataclass
class Delivery:
    """The way of a run to one tracker. run: with the last step that the tracker has as first_step (-1: none)."""

    name: str
    run: TrackedRun

    def __post_init__(self) -> None:
        self.last_step, self.newest = self.run.first_step, self.run.first_step
        self.failure = ""
        self.tables_lost = 0
        self._is_given_up = False
        self._offset = 0
        self._tables: deque[tuple[int, Sequence[Mapping[str, Any]]]] = deque()
        self._news, self._is_ending = threading.Event(), threading.Event()
        self._busy_since: float | None = None
        self._saved_at = 0.0
        self._moves = 0  # calls that the tracker has answered
        self._table_tries = 0
        self._trying = (-1, 0.0)  # a step, and when it was sent first
        self._tracker: Tracker | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    # On the side of the training loop: nothing here waits.

    def log(self, step: int) -> None:
        """Say that metrics.jsonl has a new step."""
        self.newest = step
        self._news.set()
        busy = self._busy_since
        if busy is not None and time.monotonic() - busy > SLOW_SECONDS and not self.failure:
            self.failure = f"it has not answered for {time.monotonic() - busy:.0f} s"
            self._warn()

    def table(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of the step that is logged next."""
        self._tables.append((step, samples))
        while len(self._tables) > MAX_TABLES:
            self._tables.popleft()
            self.tables_lost += 1

    def begin_end(self) -> None:
        """Have the thread end once everything is delivered."""
        self._is_ending.set()
        self._news.set()

    def wait(self, end: float) -> bool:
        """Wait for that, until a moment of the monotonic clock, or until nothing has moved for CLOSE_SECONDS. Returns
        whether everything is delivered."""
        begun = time.monotonic()
        stalled_at, known = begun + CLOSE_SECONDS, self._moves
        while self._thread.is_alive() and (now := time.monotonic()) < min(end, stalled_at):
            self._thread.join(0.05)
            if self._moves != known:
                stalled_at, known = now + CLOSE_SECONDS, self._moves
        return not self._thread.is_alive() and self.last_step >= self.newest

    def give_up(self) -> None:
        """Have the thread end after what it does now, and note what the tracker has."""
        self._is_given_up = True
        self._save(force=True)

    def _warn(self) -> None:
        logger.warning(
            "%s cannot be reached (%s): training goes on, metrics.jsonl has everything, and it is sent when %s answers",
            *(self.name, self.failure, self.name),
        )

    # In the thread.

    def _run(self) -> None:
        delay = FIRST_DELAY
        while not self._is_given_up:
            self._news.wait()
            self._news.clear()
            try:
                self._deliver()
                if self._is_ending.is_set() and self.last_step >= self.newest and not self._tables:
                    self._end()
                    return
                if self.failure:
                    logger.warning("%s answers again; it has everything up to step %d", self.name, self.last_step)
                self.failure, delay = "", FIRST_DELAY
            except BaseException as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
                was_down = bool(self.failure)
                self.failure = told(error)
                if not was_down:
                    self._warn()
                if self._is_ending.is_set():
                    delay = min(delay, FIRST_DELAY)
                self._is_ending.wait(delay) if not self._is_ending.is_set() else time.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY)
                self._news.set()
            finally:
                self._busy_since = None

    def _deliver(self) -> None:
        self._busy_since = time.monotonic()
        if self._tracker is None:
            self._tracker = KINDS[self.name](self.run)
            self._save(force=True)
        for steps, end in _batches(_records(self.run.folder / METRICS, self._offset), self.run.first_step):
            if steps:
                self._busy_since = time.monotonic()
                if self._trying[0] != steps[0].step:
                    self._trying = (steps[0].step, time.time())
                self._tracker.log([measured._replace(at=self._trying[1]) for measured in steps])
                self.last_step = steps[-1].step
                self._moves += 1
            self._offset = end
            self._send_tables(self.last_step)
            self._save()
            if self._is_given_up:
                return
        self._send_tables(self.last_step)

    def _send_tables(self, step: int) -> None:
        while self._tables and self._tables[0][0] <= step:
            at, samples = self._tables[0]
            assert self._tracker is not None
            self._table_tries += 1
            if self._table_tries <= TABLE_TRIES:
                self._tracker.table(at, samples)
            else:  # it is this table: what follows must not wait for it
                self.tables_lost += 1
            self._table_tries = 0
            self._moves += 1
            if self._tables and self._tables[0][0] == at:  # else the training loop has dropped it meanwhile
                self._tables.popleft()

    def _save(self, *, force: bool = False) -> None:
        if self._tracker is not None and (force or time.monotonic() - self._saved_at > STATE_SECONDS):
            _write_state(self.run.folder, self.name, self._tracker.identity, self.last_step)
            self._saved_at = time.monotonic()

    def _end(self) -> None:
        self._save(force=True)
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                logger.warning("%s has every step, but did not end well: %s", self.name, told(error))


class Trackers:
    """The trackers of a run. report_to: that key; config: of the run; first_step: after which training starts.

    Trackers that knew the run before it was resumed continue it; what they lack of it, they get first.
    """

    def __init__(self, report_to: Any, folder: Path, config: Mapping[str, Any], first_step: int = 0) -> None:
        state = read_state(folder)
        self._deliveries = [
            Delivery(name, _tracked(name, folder, config, arguments, state, first_step))
            for name, arguments in _arguments(report_to).items()
        ]
        self.close = at_end(self, _close, self._deliveries, folder)  # also at the end of the program; idempotent

    def log(self, step: int) -> None:
        """Send a step that metrics.jsonl has. Takes no time, whatever the trackers do."""
        for delivery in self._deliveries:
            delivery.log(step)

    def table(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of the step that is logged next. samples: records as in samples.jsonl."""
        for delivery in self._deliveries if samples else ():
            delivery.table(step, samples)


def _tracked(
    name: str,
    folder: Path,
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    state: Mapping[str, Any],
    first_step: int | None,
) -> TrackedRun:
    """first_step: that a run is resumed after, None for one that is not continued."""
    known = state.get(name) or {}
    has = int(known.get("step", -1)) if known else -1
    # What was sent of steps after the checkpoint is sent again: the resumed run makes them again.
    return TrackedRun(folder, config, arguments, known.get("id"), has if first_step is None else min(has, first_step))


def _close(deliveries: Sequence[Delivery], folder: Path) -> None:
    """End the delivery, waiting a bounded time for what is under way, and say what has not arrived."""
    for delivery in deliveries:
        delivery.begin_end()
    end = time.monotonic() + LONGEST_CLOSE
    # All at a time: trackers that hang must not be waited for one after the other.
    with ThreadPoolExecutor(max(1, len(deliveries))) as pool:
        done = list(pool.map(lambda delivery: delivery.wait(end), deliveries))
    for delivery, is_done in zip(deliveries, done, strict=True):
        lost = delivery.tables_lost
        if is_done and not lost:
            continue
        outcome = f"not received what came after step {delivery.last_step}"
        if is_done:
            outcome = f"not received samples of {counted(lost, 'step')}"
        elif delivery.last_step >= delivery.newest:
            outcome = "not received the end of the run"
        elif delivery.last_step < 0:
            outcome = "received nothing of this run"
        delivery.give_up()
        why = f" ({delivery.failure})" if delivery.failure else ""
        command = f"hybrid-rl upload {folder} {delivery.name}"
        logger.warning(
            "%s has %s%s. Nothing is lost: the run folder has it, and `%s` sends it",
            *(delivery.name, outcome, why, command),
        )


# --------------------------------------------------------------------------------------------------------- upload


def upload(folder: str | Path, name: str, *, again: bool = False) -> int:
    """Send a run to a tracker after the fact: what it lacks, or, if `again`, everything as a new run of it.

    folder: of the run; name: as in report_to. Samples go along if the run has log_completions, as many of each step.
    Returns the number of steps that were sent. Raises ConfigError for what is no run folder or no tracker, and
    HybridRLError if the tracker fails.
    """
    folder = Path(folder)
    if name not in KINDS:
        raise ConfigError(f"{name!r} is not a tracker; use one of {', '.join(KINDS)}")
    if not (folder / METRICS).exists():
        raise ConfigError(f"{folder} has no {METRICS}; name the folder of a run")
    config = _config_of(folder)
    trackers = config.get("report_to")
    arguments = (trackers if isinstance(trackers, dict) else config.get(FORMER_KEY) or {}).get(name) or {}
    check_trackers({name: arguments})
    run = _tracked(name, folder, config, arguments, {} if again else read_state(folder), None)
    log_completions = config.get("log_completions")
    num_samples = log_completions if isinstance(log_completions, int) else 0
    sent = 0
    try:
        tracker: Tracker = KINDS[name](run)
        samples = _samples(folder, num_samples) if num_samples else iter(())
        waiting = next(samples, None)
        for steps, _ in _batches(_records(folder / METRICS, 0), run.first_step):
            tracker.log(steps)
            for step in (measured.step for measured in steps):
                while waiting is not None and waiting[0] < step:
                    waiting = next(samples, None)
                if waiting is not None and waiting[0] == step:
                    tracker.table(*waiting)
            if steps:
                sent += len(steps)
                _write_state(folder, name, tracker.identity, steps[-1].step)
        tracker.close()
    except Exception as error:
        raise HybridRLError(
            f"{name} took {counted(sent, 'step')} and then failed: {told(error)}; call it again for the rest"
        ) from error
    return sent


def _config_of(folder: Path) -> Mapping[str, Any]:
    """Read the configuration of a run; {} if there is none. Raises ConfigError for a damaged one: it says where the
    run belongs in the tracker."""
    path = folder / "config.yaml"
    if not path.exists():
        return {}
    try:
        config = yaml.safe_load(path.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"cannot be read ({told(error)})"
    else:
        if not isinstance(config, dict):
            problem = f"is a {type(config).__name__}, not keys with values"
        elif not isinstance(arguments := config.get(FORMER_KEY) or {}, dict):
            problem = f"has {FORMER_KEY}: {arguments!r:.100}, which is no mapping"
        else:
            return config
    raise ConfigError(f"{path} {problem}; restore it, or delete it to send the metrics without it")


def _samples(folder: Path, number: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the first `number` samples of every step, step by step, from the files of all ranks."""
    files = [_records(path, 0) for path in sorted(folder.glob("samples*.jsonl"))]
    heads = [next(file, None) for file in files]
    while any(head is not None for head in heads):
        step = min(int(head[0]["step"]) for head in heads if head is not None)
        samples: list[dict[str, Any]] = []
        for place, file in enumerate(files):
            head = heads[place]
            while head is not None and int(head[0]["step"]) == step:
                samples.append(head[0])
                head = next(file, None)
            heads[place] = head
        samples.sort(key=lambda sample: (sample.get("trajectory", 0), sample.get("turn", 0)))
        yield step, samples[:number]
