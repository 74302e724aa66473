"""The record of turns: what the policy answered and what calls returned, written down as each of them ends.

A conversation whose process was killed, or whose environment was lost, is made again: its agent runs once more from the
beginning, and what it asks a second time is answered from here, until it comes to what had not ended. So no finished
turn is generated twice, and no call of a tool that has returned is made twice. The files are in the run folder, one for
each training step and rank; `run/turns_folder.py` says which of them a run may use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import time
import uuid
from array import array
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid_rl.agents.calls import CallTimeoutError, Outcome
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.tool_calling import message_of
from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.config_text import key_values

logger = logging.getLogger("hybrid_rl")

STEP_FOLDER = "step-"
# Keys that may differ between the run that wrote a record and the one that goes on with it: they change prompts,
# answers and weights by no more than rounding.
FREE_KEYS = re.compile(
    r"(resume|run_name|output_dir|report_to|log_\w+|save_\w+|max_restarts|num_ranks|enable_jit_checkpoint"
    r"|(controller|memory|checkpoints|fsdp|eval)\..*|optimizer\.tokens_per_micro_batch"
    r"|model\.(gradient_checkpointing|device)|rollout\.(handoff.*|kv_cache_memory_bytes|max_num_seqs)"
    r"|agents\.(max_open_trajectories|max_environments|tool_timeout_seconds|tool_processes|unrestorable))"
)
NO_STATE = object()  # of a call that is recorded without the state after it

Write = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class TurnFiles:
    """Where the ranks of a run write turns down. run: names it, in all processes that go on with it."""

    folder: Path
    run: str


class RecordedError(Exception):
    """What a call raised in an earlier life of its trajectory; only its text was recorded."""


CONVERSATIONS = 16  # in how many a trajectory may take turns before the experts of their tokens are written again


class RecordedCall(NamedTuple):
    """A call at its place in a conversation. key: names it, in every life of the run, so that a tool can refuse to do
    twice what it was asked once. outcome: None if it never ended; state: of the environment afterwards, if `has_state`;
    order: of its end among all that is recorded of the trajectory."""

    key: str
    outcome: Outcome | None = None
    state: Any = None
    has_state: bool = False
    order: int = -1


class TrajectoryRecord:
    """What is recorded of one trajectory. key: names it, in every life of the run and in no other run. entries: by
    what they are of; write: adds one to a file.

    oldest_version: of the weights that made a recorded answer; None without answers. num_answered: answers of earlier
    lives that were asked for again in this one; num_ended: turns and calls that ended in this life, those of the record
    included.
    """

    def __init__(
        self, key: str = "", entries: dict[str, Mapping[str, Any]] | None = None, write: Write | None = None
    ) -> None:
        self.key = key
        self._entries: dict[str, Mapping[str, Any]] = {} if entries is None else entries
        self._write = write
        made = [version for entry in self._entries.values() for version, _ in entry.get("versions", ())]
        self.oldest_version = min(made, default=None)
        self._num_calls = 1 + max((entry.get("order", -1) for entry in self._entries.values()), default=-1)
        self.begin_life()

    def begin_life(self) -> None:
        """Note that the trajectory is made (again) from its beginning."""
        self._of_earlier_lives = frozenset(self._entries)
        self._experts = dict[str, npt.NDArray[np.int16]]()  # of the last answers, by name
        self.num_answered = self.num_ended = 0

    def answer(self, question: Any, version: int) -> Completion | None:
        """Return the recorded answer to a question: sampling parameters, whose seed is made of the prompt. None if
        there is none, or if later weights than `version` made some of it: a run that went back must not train on
        tokens of weights that it does not have yet."""
        name = f"answer {_digest(repr(question).encode())}"
        entry = self._entries.get(name)
        if entry is None or max((made for made, _ in entry["versions"]), default=0) > version:
            return None
        self.num_answered += name in self._of_earlier_lives
        self.num_ended += 1
        versions = [*chain.from_iterable([made] * count for made, count in entry["versions"])]
        made = _unpacked(entry["ids"]), _unpacked(entry["logprobs"]), versions
        return Completion(*made, entry["finish_reason"], self._experts_of(name))

    def note_answer(self, question: Any, completion: Completion) -> None:
        """Record an answer that has ended."""
        versions = [[made, len([*same])] for made, same in groupby(completion.versions)]
        packed = {"ids": _packed("iq", completion.token_ids), "logprobs": _packed("fd", completion.logprobs)}
        entry = {**packed, "versions": versions, "finish_reason": completion.finish_reason}
        name = f"answer {_digest(repr(question).encode())}"
        if completion.routed_experts is not None:
            entry["experts"] = self._experts_after(name, completion.routed_experts)
        self._note(name, entry)
        known = [] if self.oldest_version is None else [self.oldest_version]
        self.oldest_version = min([*known, *completion.versions], default=None)

    def _experts_after(self, name: str, experts: npt.NDArray[np.int16]) -> list[Any]:
        """Return what is recorded of the experts of an answer and its prompt: an earlier answer, how many tokens have
        those of that one, and the experts of all others. So a conversation is written once, not at every turn."""
        before, start = "", 0
        for earlier, known in self._experts.items():
            same = min(len(known), len(experts))
            differs = (known[:same] != experts[:same]).reshape(same, -1).any(1)
            shared = int(differs.argmax()) if differs.any() else same
            if shared > start and earlier != name and earlier in self._entries:
                before, start = earlier, shared
        self._remember(name, experts)
        return [before, start, experts.shape[1:], b64encode(experts[start:].astype("<i2").tobytes()).decode()]

    def _experts_of(self, name: str) -> npt.NDArray[np.int16] | None:
        """Return the recorded experts of an answer; None without any, or if a part of them has become void."""
        if name not in self._experts:
            if "experts" not in self._entries.get(name, {}):
                return None
            before, start, shape, text = self._entries[name]["experts"]
            experts = np.frombuffer(b64decode(text), "<i2").reshape(-1, *shape).astype(np.int16)
            if start:
                earlier = self._experts_of(before)
                if earlier is None:
                    return None
                experts = np.concatenate([earlier[:start], experts])
            self._remember(name, experts)
        return self._experts[name]

    def _remember(self, name: str, experts: npt.NDArray[np.int16]) -> None:
        self._experts.pop(name, None)
        self._experts[name] = experts
        if len(self._experts) > CONVERSATIONS:
            del self._experts[next(iter(self._experts))]

    def call(self, asked: str, place: int, name: str, arguments: Mapping[str, Any]) -> RecordedCall:
        """Return what is recorded of a call of a tool. asked: names the conversation up to the answer that asks for it
        (`conversation_digest`); place: of the call in this answer."""
        written = json.dumps([asked, place, name, arguments], sort_keys=True, default=repr)
        key = f"{self.key}/{_digest(written.encode())}"
        entry = self._entries.get(f"call {key}")
        if entry is None:
            return RecordedCall(key)
        error: Exception | None = None
        if "error" in entry:
            error = (CallTimeoutError if entry["is_late"] else RecordedError)(entry["error"])
        outcome = Outcome(entry.get("value"), error)
        return RecordedCall(key, outcome, entry.get("state"), "state" in entry, entry["order"])

    def note_past(self) -> None:
        """Note that a call was taken from the record."""
        self.num_ended += 1

    def note_call(self, key: str, outcome: Outcome, state: Any = NO_STATE, *, is_acted: bool = False) -> None:
        """Record a call that has ended. state: of the environment, afterwards. is_acted: whether it was one of an
        environment."""
        error = outcome.error
        entry: dict[str, Any] = {"order": self._num_calls, "is_acted": is_acted}
        self._num_calls += 1
        if error is None:
            entry["value"] = outcome.value
        else:
            entry |= {"error": message_of(error), "is_late": isinstance(error, CallTimeoutError)}
        self._note(f"call {key}", entry | ({} if state is NO_STATE else {"state": state}))

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
        """Record how an environment that has a state began."""
        self._note("reset", {"observation": observation, "state": state})

    def _note(self, name: str, entry: Mapping[str, Any]) -> None:
        self._entries[name] = entry
        self.num_ended += 1
        if self._write is not None:
            self._write(name, entry)


class TurnRecord:
    """The records of a rank's trajectories: those of training in files too, all others in memory alone.

    files: of the run, None = there are none. rank: whose files are written; those of all ranks are read, since another
    one may have made a trajectory before. config: turns of other configurations are not read (`reconfigure`).
    """

    def __init__(self, files: TurnFiles | None = None, rank: int = 0, config: TrainerConfig | None = None) -> None:
        self._folder = None if files is None else files.folder
        self._run = uuid.uuid4().hex[:12] if files is None else files.run
        self._rank, self._digest = rank, "" if config is None else config_digest(config)
        self._steps: dict[int, dict[str, dict[str, Mapping[str, Any]]]] = {}
        self._read_before: dict[int, dict[str, set[str]]] = {}  # of these, what earlier processes have written
        self._num_voids = 0
        self._open: dict[int, int] = {}  # descriptors of files, by step
        self._lock = threading.Lock()
        self._has_failed = False

    def reconfigure(self, config: TrainerConfig) -> None:
        """Go on with another configuration. What was made with the one before is not used any more, unless the new one
        makes the same."""
        if (digest := config_digest(config)) != self._digest:
            self.forget(())
            self._digest = digest

    def void(self, number: int) -> None:
        """Forget what earlier processes of the run have written, if that has become void once more (`RunTurns`).
        number: of times so far."""
        with self._lock:
            if number <= self._num_voids:
                return
            self._num_voids = number
            for step, written in self._read_before.items():
                self._close(step)
                for name, kinds in written.items():
                    for kind in kinds:
                        self._steps[step][name].pop(kind, None)
                written.clear()

    def of(self, name: str, step: int | None) -> TrajectoryRecord:
        """Return the record of a trajectory, beginning a life of it. step: of training, that began it; None = it is
        kept by nobody else."""
        key = f"{self._run}/{name}"
        if step is None:
            return TrajectoryRecord(key)
        if step not in self._steps:
            self._steps[step] = self._read(step)
            self._read_before[step] = {made: set(kinds) for made, kinds in self._steps[step].items()}
        entries = self._steps[step].setdefault(name, {})

        def write(kind: str, entry: Mapping[str, Any]) -> None:
            self._write(step, [time.time_ns(), name, kind, entry])

        return TrajectoryRecord(key, entries, None if self._folder is None else write)

    def forget(self, needed: Collection[int]) -> None:
        """Forget, here and not in files, what training steps began that are none of these."""
        with self._lock:
            for step in self._steps.keys() - set(needed):
                del self._steps[step], self._read_before[step]
                self._close(step)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.forget(())

    @property
    def _prefix(self) -> str:
        """Begins the names of files whose turns this run may use."""
        return f"{self._run}-{self._digest}-"

    def _read(self, step: int) -> dict[str, dict[str, Mapping[str, Any]]]:
        entries: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        lines = list[tuple[int, str, str, Mapping[str, Any]]]()
        for path in () if self._folder is None else self._folder.glob(f"{STEP_FOLDER}{step}/{self._prefix}*.jsonl"):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a process that was killed
                    moment, name, kind, entry = json.loads(line)
                    lines.append((moment, name, kind, entry))
        for _, name, kind, entry in sorted(lines, key=lambda line: line[0]):  # the last that was written counts
            entries[name][kind] = entry
        return entries

    def _write(self, step: int, line: list[Any]) -> None:
        assert self._folder is not None
        with self._lock:
            if step not in self._steps:
                return  # of an agent that goes on although its step is over
            try:
                if step not in self._open:
                    path = self._folder / f"{STEP_FOLDER}{step}" / f"{self._prefix}{self._rank}.jsonl"
                    path.parent.mkdir(exist_ok=True)  # not the run folder, whose disk may be gone
                    self._open[step] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                    size = os.fstat(self._open[step]).st_size
                    if size and os.pread(self._open[step], 1, size - 1) != b"\n":
                        os.write(self._open[step], b"\n")  # the process before was killed in the middle of a line
                text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
                while text:  # a disk that is nearly full takes a part
                    text = text[os.write(self._open[step], text) :]
            except OSError as error:
                self._close(step)
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning(
                        "finished turns cannot be written to %s (%s): training goes on, but after a kill the "
                        "conversations of this step begin again from their prompts; make room on that disk",
                        *(self._folder, error),
                    )

    def _close(self, step: int) -> None:
        """Close the file of a step; the lock is held."""
        if step in self._open:
            os.close(self._open.pop(step))


def config_digest(config: TrainerConfig) -> str:
    """Name what of a configuration decides turns and weights."""
    decisive = [(key.path, key.value) for key in key_values(config) if not FREE_KEYS.fullmatch(key.path)]
    return _digest(json.dumps(decisive, default=repr).encode())[:8]


def conversation_digest(*parts: Sequence[int]) -> str:
    """Name a conversation by its tokens."""
    return _digest(b"".join(array("q", part).tobytes() for part in parts))


def row_digest(row: Any) -> str:
    """Name a row of a dataset by what is in it."""
    return _digest(json.dumps(row, sort_keys=True, default=repr).encode())[:8]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _packed(kinds: str, values: Sequence[Any]) -> str:
    """Write numbers as text that begins with their type: the first of these two that holds all of them."""
    for kind in kinds:
        with contextlib.suppress(OverflowError):
            if (numbers := array(kind, values)).tolist() == [*values]:
                break
    return kind + b64encode(numbers.tobytes()).decode()


def _unpacked(text: str) -> list[Any]:
    return array(text[0], b64decode(text[1:])).tolist()
