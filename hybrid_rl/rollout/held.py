"""Groups that were begun and not trained on yet: what goes on in the next step, under newer weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from hybrid_rl.data.prompts import PromptRow, shorten
from hybrid_rl.engines.base import Beginning, FinishedSample, RolloutRequest, SamplingParams
from hybrid_rl.errors import CheckpointError, ConfigError, DataError, counted
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rewards.results import Part
from hybrid_rl.rollout.held_json import check, read, read_fields
from hybrid_rl.rollout.lengths import expected_length

HELD_FILE = "held-"  # begins the name of a rank's file in a checkpoint


@dataclass(eq=False)
class OpenGroup:
    """A group of samples of one prompt. born: the training step that began it. requests: by trajectory, as they were at
    first; finished: samples by trajectory; begun: the beginnings of the others. whole_in: the state of the run when it
    became whole, which reward functions are told; scoring: their calls; texts: of its samples, once they were decoded.
    expected: tokens that earlier completions had on average; None = not known."""

    row: PromptRow
    group: int
    born: int
    requests: dict[int, RolloutRequest]
    finished: dict[int, FinishedSample] = field(default_factory=dict)
    begun: dict[int, Beginning] = field(default_factory=dict)
    whole_in: TrainerState | None = None
    scoring: Future[list[tuple[int, Part]]] | None = None
    texts: list[str] | None = None
    expected: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of its samples are complete."""
        return len(self.finished) == len(self.requests)

    @property
    def is_scored(self) -> bool:
        """Whether it has its rewards, will have them, or a function has failed to give them."""
        found = self.scoring
        return found is not None and not (found.done() and (found.cancelled() or found.exception() is not None))

    def forget_failure(self) -> None:
        """Have its rewards asked for again if a function has failed to give them. A call that could not be ended and
        may still run is not repeated."""
        if self.scoring is None or not self.scoring.done() or not self.is_scored:
            return
        outcomes = [outcome for _, (_, outcome) in self.scoring.result()]
        if any((one.failure or one.errors) and not one.is_left_behind for one in outcomes):
            self.scoring = None

    @property
    def samples(self) -> list[FinishedSample]:
        """The samples of a whole group, by trajectory."""
        return [self.finished[trajectory] for trajectory in self.requests]

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that made its oldest token; None if it has none."""
        # It is asked for at every look, and the versions of a sample only grow: the first token is the oldest.
        made = (*(sample.versions for sample in self.finished.values()), *(one.versions for one in self.begun.values()))
        return min((versions[0] for versions in made if versions), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated for it."""
        finished = sum(len(sample.completion_ids) for sample in self.finished.values())
        return finished + self.num_begun

    @property
    def num_begun(self) -> int:
        """Tokens of its completions that were broken off."""
        return sum(len(one.token_ids) for one in self.begun.values())

    @property
    def num_again(self) -> int:
        """Tokens that an engine has computed and will compute again, before it goes on: those of completions that were
        broken off, and of their prompt, once."""
        return self.num_begun + len(self.row.prompt_ids) if self.num_begun else 0

    @property
    def num_missing(self) -> int:
        """Tokens that may be expected to be generated for it yet."""
        return sum(self.missing(request) for request in self.remaining())

    def prompt(self, data_rank: int) -> HeldPrompt:
        """Return what the driver knows of it. data_rank: which of the ranks that have samples of their own holds it."""
        params = next(iter(self.requests.values())).params
        oldest = self.oldest_version
        return HeldPrompt(self.row, len(self.requests), params.temperature, oldest, data_rank, self.num_missing)

    def remaining(self) -> Iterator[RolloutRequest]:
        """Yield requests for the rest of its samples."""
        for trajectory, request in self.requests.items():
            if trajectory not in self.finished:
                yield dataclasses.replace(request, begun=self.begun.get(trajectory, Beginning()))

    def missing(self, request: RolloutRequest) -> int:
        """Return how many tokens may be expected of one of its `remaining` requests yet. Examples are its samples that
        have finished, and the earlier completions of the prompt."""
        known = [len(sample.completion_ids) for sample in self.finished.values()]
        if self.expected is not None:
            known.append(self.expected)
        num_tokens, limit = len(request.begun.token_ids), request.params.max_tokens
        return max(0, expected_length(num_tokens, known, limit) - num_tokens)

    def take(self, sample: FinishedSample) -> None:
        """Take a sample that has finished, or that was broken off."""
        if sample.finish_reason == "abort":
            self.begun[sample.id] = Beginning(
                tuple(sample.completion_ids), tuple(sample.logprobs), tuple(sample.versions)
            )
        else:
            self.finished[sample.id] = sample
            self.begun.pop(sample.id, None)

    def drop(self) -> None:
        """Forget rewards that nobody waits for. Calls that run already run to their end."""
        if self.scoring is not None:
            self.scoring.cancel()

    def copied(self) -> OpenGroup:
        """Return a copy that can go on while this one stays as it is: a step may be taken back."""
        return dataclasses.replace(self, finished={**self.finished}, begun={**self.begun})

    def to_json(self) -> dict[str, Any]:
        """Return everything but pending rewards, in what JSON can hold exactly."""
        first = next(iter(self.requests.values()))
        return {
            "row": dataclasses.asdict(self.row),
            "group": self.group,
            "born": self.born,
            "prompt_ids": list(first.prompt_ids),
            "params": dataclasses.asdict(first.params),
            "seeds": {trajectory: request.params.seed for trajectory, request in self.requests.items()},
            "finished": {trajectory: dataclasses.asdict(sample) for trajectory, sample in self.finished.items()},
            "begun": {trajectory: dataclasses.asdict(one) for trajectory, one in self.begun.items()},
            "whole_in": None if self.whole_in is None else dataclasses.asdict(self.whole_in),
            "expected": self.expected,
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> OpenGroup:
        """Make the group that `to_json` described. Raises CheckpointError, with a key, for anything else."""
        kept = read_fields(_Kept, found, "")
        check_tokens(kept.prompt_ids, "prompt_ids")
        check(bool(kept.prompt_ids), "prompt_ids", kept.prompt_ids, "at least one token")
        check_tokens(kept.row.prompt_ids, "row.prompt_ids")
        check(bool(kept.seeds), "seeds", kept.seeds, "the seeds of a group's samples")
        for trajectory, sample in kept.finished.items():
            key = f"finished.{trajectory}"
            check(trajectory in kept.seeds and sample.id == trajectory, f"{key}.id", sample.id, "one of the samples")
            check(sample.finish_reason != "abort", f"{key}.finish_reason", "abort", "that of a whole sample")
            check_tokens(sample.completion_ids, f"{key}.completion_ids", sample.versions, sample.logprobs)
        for trajectory, one in kept.begun.items():
            is_open = trajectory in kept.seeds and trajectory not in kept.finished
            check(is_open, f"begun.{trajectory}", one, "of an unfinished sample")
            check_tokens(one.token_ids, f"begun.{trajectory}.token_ids", one.versions, one.logprobs)
        requests = {
            trajectory: RolloutRequest(
                trajectory, kept.prompt_ids, dataclasses.replace(kept.params, seed=seed), group=kept.group
            )
            for trajectory, seed in kept.seeds.items()
        }
        rest: Any = {"whole_in": kept.whole_in, "expected": kept.expected}
        return cls(kept.row, kept.group, kept.born, requests, kept.finished, kept.begun, **rest)


@dataclass(frozen=True)
class _Kept:
    """What `OpenGroup.to_json` gives."""

    row: PromptRow
    group: int
    born: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seeds: dict[int, int]
    finished: dict[int, FinishedSample]
    begun: dict[int, Beginning]
    whole_in: TrainerState | None
    expected: int | None = None


def check_tokens(token_ids: Sequence[int], key: str, *beside: Sequence[float]) -> None:
    """Check the ids of tokens in a checkpoint. beside: their versions and logprobs. Raises CheckpointError."""
    for name, numbers in ((key, token_ids), (f"a version of {key}", beside[0] if beside else ())):
        check(min(numbers, default=0) >= 0, name, min(numbers, default=0), "0 or above")
    for values in beside:
        check(len(values) == len(token_ids), key, token_ids, f"as long as what belongs to it, {shorten(values)}")


@dataclass(frozen=True)
class HeldPrompt:
    """The prompt of a held group, of num_generations samples. oldest_version: of its tokens; None if it has none.
    data_rank: which of the ranks that have samples of their own holds it; num_missing: tokens that it may be expected
    to need yet."""

    row: PromptRow
    num_generations: int
    temperature: float
    oldest_version: int | None
    data_rank: int = 0
    num_missing: int = 0


class Group(Protocol):
    """A group that may be held, as the rule sees it. group: its id; born: the training step that began it;
    oldest_version: of its tokens, None if it has none."""

    @property
    def group(self) -> int: ...
    @property
    def born(self) -> int: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def oldest_version(self) -> int | None: ...
    def to_json(self) -> dict[str, Any]: ...


AnyGroup = TypeVar("AnyGroup", bound=Group)


class Standing(NamedTuple):
    """How far the groups of a rank are. num_whole, num_unfinished: of all. due: those that are whole, and that are not,
    by the version of the weights that must train on them at the latest; without those that this step began.
    is_outdated: whether newer weights wait for the rank."""

    num_whole: int
    num_unfinished: int
    due: dict[int, tuple[int, int]]
    is_interrupted: bool = False
    is_outdated: bool = False


Key = tuple[int, int, int]  # of a whole group: what it is sorted by, and its id


@dataclass(frozen=True)
class HoldRule:
    """When a step's rollout ends, and what it delivers: the same on every rank.

    num_groups: of the batch, over all ranks. max_staleness: how many policy versions a token may lag behind the weights
    that train on it. ahead: groups that must be whole besides, for the next step. order: whether of whole groups the
    oldest or the newest are delivered first. check_steps: engine steps between two looks at what is whole. drops: what
    is not delivered is dropped, so that nothing is held; then max_staleness is 0 and ahead is 0.

    A group is due at the version of its oldest token plus max_staleness. As a step delivers num_groups, at most n *
    num_groups of what is held may be due within the n next steps: groups beyond that are finished and delivered now,
    those that are due first before all others.
    """

    num_groups: int
    max_staleness: int
    ahead: int = 0
    order: str = "fifo"
    check_steps: int = 8
    drops: bool = False

    def deadline(self, oldest_version: int | None, version: int) -> int:
        """Return the last version that may train on a group. version: the present one, which made the oldest token if
        there is none."""
        return (version if oldest_version is None else oldest_version) + self.max_staleness

    def standing(self, groups: Iterable[Group], version: int, **state: bool) -> Standing:
        """Return how far a rank's groups are. version: of the weights of this step; state: the flags of Standing."""
        numbers, due = [0, 0], dict[int, tuple[int, int]]()
        for group in groups:
            numbers[group.is_whole] += 1
            deadline = self.deadline(group.oldest_version, version)
            if deadline < version + self.max_staleness:
                whole, unfinished = due.get(deadline, (0, 0))
                due[deadline] = (whole + group.is_whole, unfinished + (not group.is_whole))
        return Standing(numbers[True], numbers[False], due, **state)

    def needed(self, everywhere: Sequence[Standing], version: int) -> Iterator[tuple[int, int, int]]:
        """Yield deadlines, the earliest first, with the number of groups due by then that this step must deliver, and
        how many of these are whole."""
        count = whole = 0
        for deadline in sorted({deadline for of_rank in everywhere for deadline in of_rank.due}):
            for of_rank in everywhere:
                numbers = of_rank.due.get(deadline, (0, 0))
                whole, count = whole + numbers[0], count + sum(numbers)
            yield deadline, min(self.num_groups, count - self.num_groups * (deadline - version)), whole

    def is_over(self, everywhere: Sequence[Standing], version: int) -> bool:
        """Whether a step's rollout ends."""
        if not any(of_rank.num_unfinished for of_rank in everywhere):
            return True
        is_enough = sum(of_rank.num_whole for of_rank in everywhere) >= self.num_groups + self.ahead
        return is_enough and all(needed <= whole for _, needed, whole in self.needed(everywhere, version))

    def key(self, group: Group, version: int) -> Key:
        """Return what a whole group is chosen by: its deadline, its place in the order, its id."""
        age = group.born if self.order == "fifo" else -group.born
        return self.deadline(group.oldest_version, version), age, group.group

    def chosen(self, keys: Iterable[Key], everywhere: Sequence[Standing], version: int) -> set[int]:
        """Return the ids of the groups of the batch. keys: of the whole groups of all ranks."""
        line = sorted(keys, key=lambda key: key[1:])
        found: list[Key] = []
        for deadline, needed, _ in self.needed(everywhere, version):
            due = [key for key in line if key[0] <= deadline and key not in found]
            found += due[: max(0, needed - len(found))]
        found += [key for key in line if key not in found][: self.num_groups - len(found)]
        return {group for _, _, group in found}

    def check(self, held: Iterable[HeldPrompt], version: int) -> None:
        """Check that what is held can be trained on in time, by a step at this version and those after it. Raises
        ConfigError."""
        deadlines = sorted(self.deadline(prompt.oldest_version, version) for prompt in held)
        late = [
            place // self.num_groups + version - deadline
            for place, deadline in enumerate(deadlines)
            if place // self.num_groups + version > deadline
        ]
        if late:
            raise ConfigError(
                f"max_staleness={self.max_staleness} is too small for the {counted(len(deadlines), 'group')} that the "
                f"checkpoint holds, with prompts_per_step={self.num_groups}; set max_staleness to at least "
                f"{self.max_staleness + max(late)}, or prompts_per_step as it was"
            )


def in_order(groups: Iterable[OpenGroup]) -> list[RolloutRequest]:
    """Return requests for the rest of these groups in the order in which they should start: what is begun already goes
    first, then what may be expected to take longest. Samples of a group that have not begun stay together: they share
    the keys and values of their prompt."""
    found = [(request, group.missing(request)) for group in groups for request in group.remaining()]
    return [request for request, _ in sorted(found, key=lambda one: (not one[0].begun.token_ids, -one[1]))]


def check_row(row: PromptRow) -> None:
    """Check that a row can be held: checkpoints keep it as JSON. Raises DataError for one that JSON would change."""
    if (name := next((name for name, value in row.columns.items() if not _is_plain(value)), None)) is not None:
        raise DataError(
            f"row {row.index}: the column {name!r} has the value {shorten(row.columns[name])}, which a checkpoint "
            "cannot keep with a group that is held: rollout.partial and rollout.async_level need columns of text, "
            "numbers, booleans, None, lists, and dicts with keys of text; convert it, or drop the column"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def held_text(groups: Sequence[Group]) -> str:
    """Return the groups that a rank holds as JSON. Raises CheckpointError for a row of a dataset that it cannot
    hold."""
    try:
        return json.dumps([group.to_json() for group in groups])
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a held group cannot be saved: {error}; leave columns that are no text, numbers, lists or dicts of these "
            "out of the dataset"
        ) from error


def write_held(folder: Path, rank: int, text: str) -> None:
    """Write what `held_text` has returned for a rank into the folder of a checkpoint."""
    (folder / f"{HELD_FILE}{rank:04d}.json").write_text(text, encoding="utf-8")


def save_held(folder: Path, rank: int, groups: Sequence[Group]) -> None:
    """Write the groups that a rank holds into the folder of a checkpoint. Raises CheckpointError as `held_text`."""
    write_held(folder, rank, held_text(groups))


def load_held(
    folder: Path, rank: int, num_ranks: int, read_group: Callable[[Mapping[str, Any]], AnyGroup], *, has_agents: bool
) -> list[AnyGroup]:
    """Read this rank's share of the groups that were held when a checkpoint was written: its own ones, or if there were
    more or fewer ranks, all groups dealt out in order. read_group: makes a group of what its `to_json` gave.
    has_agents: whether this run's samples are trajectories of agents. Raises ConfigError for groups of the other kind.
    Raises CheckpointError for a file that is damaged, with the place and key of what is, or holds a group twice."""
    of_ranks, known = [], set[int]()
    for path in sorted(folder.glob(f"{HELD_FILE}*.json")):
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; resume from another checkpoint") from error
        _check_kind(written, has_agents=has_agents)
        try:
            groups = read(list[Any], written, "the file")
            of_ranks.append([_read_group(read_group, one, place) for place, one in enumerate(groups)])
            for group in of_ranks[-1]:
                if group.group in known:
                    raise CheckpointError(f"group {group.group} is there twice, here or in a file before")
                known.add(group.group)
        except (ValueError, OverflowError, CheckpointError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; resume from another checkpoint") from error
    if len(of_ranks) == num_ranks:
        return of_ranks[rank]
    return sorted((group for groups in of_ranks for group in groups), key=lambda group: group.group)[rank::num_ranks]


def _check_kind(groups: Any, *, has_agents: bool) -> None:
    """Raise ConfigError for groups of agents in a run without any, and for others in a run with agents."""
    others = {"params", "seeds"} if has_agents else {"place", "call"}  # keys of the other kind
    if isinstance(groups, list) and any(isinstance(one, dict) and others <= one.keys() for one in groups):
        made, now = ("without", "with") if has_agents else ("with", "without")
        raise ConfigError(
            f"the checkpoint holds groups begun {made} tools=, environment_factory=, rollout_func= or agent=; "
            f"this run is one {now} them: pass the same arguments as then, or start a new run from these weights"
        )


def _read_group(read_group: Callable[[Mapping[str, Any]], AnyGroup], found: Any, place: int) -> AnyGroup:
    try:
        return read_group(found)
    except CheckpointError as error:
        raise CheckpointError(f"group {place}: {error}") from error
