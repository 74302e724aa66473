"""The record of turns: what the policy answered and what calls returned, written down as each of them ends.

A conversation whose process was killed, or whose environment was lost, is made again: its agent runs once more from the
beginning, and what it asks a second time is answered from here, until it comes to what had not ended. So no finished
turn is generated twice, and no call of a tool that has returned is made twice. The files are in the run folder, one for
each training step and rank; a checkpoint after that step makes them unnecessary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import uuid
from array import array
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_rl.agents.calls import CallTimeoutError, Outcome
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.tool_calling import message_of
from hybrid_rl.config.changes import changed_keys
from hybrid_rl.errors import AgentError
from hybrid_rl.process.files import write_text

logger = logging.getLogger("hybrid_rl")

HEAD_FILE, STEP_FOLDER = "record.json", "step-"
# Keys that may differ between the run that wrote a record and the one that goes on with it: they change prompts,
# answers and weights by no more than rounding.
FREE_KEYS = re.compile(
    r"(resume|run_name|output_dir|report_to|log_\w+|save_\w+|max_restarts|max_steps|num_ranks|enable_jit_checkpoint"
    r"|(controller|memory|checkpoints|fsdp|eval)\..*|optimizer\.tokens_per_micro_batch)"
)

Write = Callable[[str, Mapping[str, Any]], None]


class RecordedError(Exception):
    """What a call raised in an earlier life of its trajectory; only its text was recorded."""


class RecordedCall(NamedTuple):
    """A call at its place in a trajectory. key: names it, in every life of the run, so that a tool can refuse to do
    twice what it was asked once. outcome: None if it never ended; state: of the environment afterwards, if it has
    one."""

    key: str
    outcome: Outcome | None = None
    state: Any = None


class TrajectoryRecord:
    """What is recorded of one trajectory. key: names it, in every life of the run and in no other run. entries: by
    what they are of; write: adds one to a file. oldest_version: of the weights that made a recorded answer; None
    without answers."""

    def __init__(self, key: str = "", entries: dict[str, Mapping[str, Any]] | None = None, write: Write | None = None):
        self.key = key
        self._entries: dict[str, Mapping[str, Any]] = {} if entries is None else entries
        self._write = write
        made = [version for entry in self._entries.values() for version in _unpacked("q", entry.get("versions", ""))]
        self.oldest_version = min(made, default=None)

    def answer(self, question: Any, version: int) -> Completion | None:
        """Return the recorded answer to a question: sampling parameters, whose seed is made of the prompt. None if
        there is none, or if later weights than `version` made some of it: a run that went back must not train on
        tokens of weights that it does not have yet."""
        entry = self._entries.get(_answer(question))
        if entry is None:
            return None
        versions = _unpacked("q", entry["versions"])
        if max(versions, default=0) > version:
            return None
        return Completion(
            _unpacked("q", entry["ids"]), _unpacked("d", entry["logprobs"]), versions, entry["finish_reason"]
        )

    def note_answer(self, question: Any, completion: Completion) -> None:
        """Record an answer that has ended."""
        packed = {"ids": _packed("q", completion.token_ids), "logprobs": _packed("d", completion.logprobs)}
        packed["versions"] = _packed("q", completion.versions)
        self._note(_answer(question), {**packed, "finish_reason": completion.finish_reason})
        known = [] if self.oldest_version is None else [self.oldest_version]
        self.oldest_version = min([*known, *completion.versions], default=None)

    def call(self, number: int, name: str, arguments: Mapping[str, Any]) -> RecordedCall:
        """Return what is recorded of a call of a tool. number: of the call in the trajectory."""
        written = json.dumps([number, name, arguments], sort_keys=True, default=repr)
        key = f"{self.key}/{number}-{_digest(written)}"
        entry = self._entries.get(f"call {key}")
        if entry is None:
            return RecordedCall(key)
        error: Exception | None = None
        if "error" in entry:
            error = (CallTimeoutError if entry["is_late"] else RecordedError)(entry["error"])
        return RecordedCall(key, Outcome(entry.get("value"), error), entry.get("state"))

    def note_call(self, key: str, outcome: Outcome, state: Any = None, *, is_acted: bool = False) -> None:
        """Record a call that has ended. state: of the environment, afterwards. is_acted: whether it was one of an
        environment. Raises AgentError for a state that JSON cannot hold."""
        error = outcome.error
        entry = (
            {"value": outcome.value}
            if error is None
            else {"error": message_of(error), "is_late": isinstance(error, CallTimeoutError)}
        )
        self._note(f"call {key}", {**entry, "state": state, "is_acted": is_acted})

    @property
    def num_finished(self) -> int:
        """Turns and calls that are recorded."""
        return len(self._entries)

    @property
    def has_acted(self) -> bool:
        """Whether a call of an environment is recorded."""
        return any(entry.get("is_acted") for entry in self._entries.values())

    @property
    def beginning(self) -> tuple[Any, Any] | None:
        """What `reset` of the environment returned, and its state then; None if that is not recorded."""
        entry = self._entries.get("reset")
        return None if entry is None else (entry["observation"], entry["state"])

    def note_beginning(self, observation: Any, state: Any) -> None:
        """Record how an environment that has a state began. Raises AgentError as `note_call`."""
        self._note("reset", {"observation": observation, "state": state})

    def _note(self, name: str, entry: Mapping[str, Any]) -> None:
        try:
            json.dumps(entry)
        except (TypeError, ValueError) as error:
            raise AgentError(
                f"state() of an environment returned {entry.get('state')!r:.200}, which JSON cannot hold ({error}); "
                "return text, numbers, booleans, None, and lists and dicts of them"
            ) from error
        self._entries[name] = entry
        if self._write is not None:
            self._write(name, entry)


class TurnRecord:
    """The records of a rank's trajectories: those of training in files too, all others in memory alone.

    folder: of the run's record (`begin_record`), None = no files. rank: whose files are written; those of all ranks are
    read, since another one may have made a trajectory before.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._folder, self._rank = folder, rank
        self._run = uuid.uuid4().hex[:12] if folder is None else json.loads((folder / HEAD_FILE).read_text())["run"]
        self._steps: dict[int, dict[str, dict[str, Mapping[str, Any]]]] = {}
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()
        self._has_failed = False

    def of(self, name: str, step: int | None) -> TrajectoryRecord:
        """Return the record of a trajectory. step: of training, that began it; None = it is kept by nobody else."""
        key = f"{self._run}/{name}"
        if step is None:
            return TrajectoryRecord(key)
        if step not in self._steps:
            self._steps[step] = self._read(step)
        entries = self._steps[step].setdefault(name, {})

        def write(kind: str, entry: Mapping[str, Any]) -> None:
            self._write(step, [name, kind, entry])

        return TrajectoryRecord(key, entries, None if self._folder is None else write)

    def forget(self, needed: Collection[int]) -> None:
        """Forget, here and not in files, what training steps began that are none of these."""
        for step in self._steps.keys() - set(needed):
            del self._steps[step]
            with contextlib.suppress(KeyError):
                os.close(self._files.pop(step))

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.forget(())

    def _read(self, step: int) -> dict[str, dict[str, Mapping[str, Any]]]:
        entries: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for path in () if self._folder is None else sorted(self._folder.glob(f"{STEP_FOLDER}{step}/*.jsonl")):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a process that was killed
                    name, kind, entry = json.loads(line)
                    entries[name][kind] = entry
        return entries

    def _write(self, step: int, line: list[Any]) -> None:
        assert self._folder is not None
        with self._lock:
            try:
                if step not in self._files:
                    path = self._folder / f"{STEP_FOLDER}{step}" / f"rank-{self._rank}.jsonl"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._files[step] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                    size = os.fstat(self._files[step]).st_size
                    if size and os.pread(self._files[step], 1, size - 1) != b"\n":
                        os.write(self._files[step], b"\n")
                text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
                while text:  # a disk that is nearly full takes a part
                    text = text[os.write(self._files[step], text) :]
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning(
                        "finished turns cannot be written to %s (%s): training goes on, but after a kill the "
                        "conversations of this step begin again from their prompts",
                        *(self._folder, error),
                    )


def begin_record(folder: Path, config: Mapping[str, Any], *, goes_on: bool) -> None:
    """Make the folder of a run's record, or go on with the one that is there: if the run goes on from where that began
    (`goes_on`) and its configuration still makes the same turns; else what is there is deleted, which is logged."""
    head, config = folder / HEAD_FILE, json.loads(json.dumps(config))
    if head.is_file():
        changed = _changed(head, config)
        if goes_on and not changed:
            return
        why = f"{', '.join(changed[:4])} changed" if changed else "the run goes on from an earlier checkpoint"
        if any(folder.glob(f"{STEP_FOLDER}*")):
            logger.warning("finished turns in %s are not used, because %s", folder, why)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(head, json.dumps({"run": uuid.uuid4().hex[:12], "config": config}))


def change_record(folder: Path, config: Mapping[str, Any]) -> None:
    """Note that a run goes on with another configuration: what it wrote down since its last checkpoint was made with
    the one before, and is deleted if that makes other turns."""
    head, config = folder / HEAD_FILE, json.loads(json.dumps(config))
    if head.is_file() and _changed(head, config):
        delete_before(folder, None)
        write_text(head, json.dumps({**json.loads(head.read_text(encoding="utf-8")), "config": config}))


def _changed(head: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the keys that differ from those of a record, and matter to it."""
    known = json.loads(head.read_text(encoding="utf-8"))["config"]
    return [key for key in changed_keys(known, config) if not FREE_KEYS.fullmatch(key)]


def delete_before(folder: Path, step: int | None) -> None:
    """Delete what training steps before this one began, None = all of them."""
    for path in folder.glob(f"{STEP_FOLDER}*"):
        if step is None or int(path.name.removeprefix(STEP_FOLDER)) < step:
            shutil.rmtree(path, ignore_errors=True)


def _answer(question: Any) -> str:
    return f"answer {_digest(repr(question))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _packed(kind: str, values: Any) -> str:
    return b64encode(array(kind, values).tobytes()).decode()


def _unpacked(kind: str, text: str) -> list[Any]:
    return array(kind, b64decode(text)).tolist()
