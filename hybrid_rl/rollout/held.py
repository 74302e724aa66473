"""Groups that were begun and not trained on yet: what goes on in the next step, under newer weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import Beginning, FinishedSample, RolloutRequest, SamplingParams
from hybrid_rl.errors import CheckpointError
from hybrid_rl.rewards.results import Part

HELD_FILE = "held-"  # begins the name of a rank's file in a checkpoint


@dataclass(eq=False)
class OpenGroup:
    """A group of samples of one prompt. born: the training step that began it. requests: by trajectory, as they were at
    first; finished: samples by trajectory; parts: the beginnings of the others. scoring: the calls of reward functions
    once it is whole."""

    row: PromptRow
    group: int
    born: int
    requests: dict[int, RolloutRequest]
    finished: dict[int, FinishedSample] = field(default_factory=dict)
    begun: dict[int, Beginning] = field(default_factory=dict)
    scoring: Future[list[tuple[int, Part]]] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of its samples are complete."""
        return len(self.finished) == len(self.requests)

    @property
    def samples(self) -> list[FinishedSample]:
        """The samples of a whole group, by trajectory."""
        return [self.finished[trajectory] for trajectory in self.requests]

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that made its oldest token; None if it has none."""
        made = (*(sample.versions for sample in self.finished.values()), *(one.versions for one in self.begun.values()))
        return min((version for versions in made for version in versions), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated for it."""
        finished = sum(len(sample.completion_ids) for sample in self.finished.values())
        return finished + sum(len(one.token_ids) for one in self.begun.values())

    def remaining(self) -> Iterator[RolloutRequest]:
        """Yield requests for the rest of its samples."""
        for trajectory, request in self.requests.items():
            if trajectory not in self.finished:
                yield dataclasses.replace(request, begun=self.begun.get(trajectory, Beginning()))

    def take(self, sample: FinishedSample) -> None:
        """Take a sample that has finished, or that was broken off."""
        if sample.finish_reason == "abort":
            self.begun[sample.id] = Beginning(
                tuple(sample.completion_ids), tuple(sample.logprobs), tuple(sample.versions)
            )
        else:
            self.finished[sample.id] = sample
            self.begun.pop(sample.id, None)

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
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> OpenGroup:
        """Make the group that `to_json` described. Raises CheckpointError for anything else."""
        try:
            row, params = dict(found["row"]), dict(found["params"])
            row["prompt_ids"] = tuple(row["prompt_ids"])
            for name in ("stop_token_ids", "stop_strings"):
                params[name] = tuple(params[name])
            requests = {
                int(trajectory): RolloutRequest(
                    int(trajectory),
                    tuple(found["prompt_ids"]),
                    SamplingParams(**{**params, "seed": seed}),
                    group=found["group"],
                )
                for trajectory, seed in found["seeds"].items()
            }
            finished = {int(trajectory): FinishedSample(**one) for trajectory, one in found["finished"].items()}
            begun = {
                int(trajectory): Beginning(**{name: tuple(values) for name, values in one.items()})
                for trajectory, one in found["begun"].items()
            }
            return cls(PromptRow(**row), found["group"], found["born"], requests, finished, begun)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"a held group is damaged: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class HoldRule:
    """When a step's rollout ends, and what it delivers: the same on every rank.

    num_groups: of the batch, over all ranks. max_staleness: how many policy versions a token may lag behind the weights
    that train on it. ahead: groups that must be whole besides, for the next step. order: whether of whole groups the
    oldest or the newest are delivered first; those that would be too old in the next step come before all others.
    check_steps: engine steps between two looks at what is whole.
    """

    num_groups: int
    max_staleness: int
    ahead: int = 0
    order: str = "fifo"
    check_steps: int = 8

    def must_end(self, group: OpenGroup, version: int) -> bool:
        """Whether a group would be too old in the next step. version: of the weights of this one."""
        oldest = group.oldest_version
        return oldest is not None and version + 1 - oldest > self.max_staleness

    def key(self, group: OpenGroup, version: int) -> tuple[int, int, int]:
        """Return what whole groups are sorted by."""
        age = group.born if self.order == "fifo" else -group.born
        return (0 if self.must_end(group, version) else 1, age, group.group)


def chosen(keys: Sequence[Sequence[tuple[int, int, int]]], num_groups: int) -> set[int]:
    """Return the ids of the groups of the batch. keys: of the whole groups of every rank."""
    everywhere = sorted(key for of_rank in keys for key in of_rank)
    return {group for _, _, group in everywhere[:num_groups]}


def save_held(folder: Path, rank: int, groups: Sequence[OpenGroup]) -> None:
    """Write the groups that a rank holds into the folder of a checkpoint.

    Raises CheckpointError for a row of a dataset that JSON cannot hold.
    """
    try:
        text = json.dumps([group.to_json() for group in groups])
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a held group cannot be saved: {error}; leave columns that are no text, numbers, lists or dicts of these "
            "out of the dataset"
        ) from error
    (folder / f"{HELD_FILE}{rank:04d}.json").write_text(text, encoding="utf-8")


def load_held(folder: Path, rank: int, num_ranks: int) -> list[OpenGroup]:
    """Read this rank's share of the groups that all ranks held when a checkpoint was written, dealt out in order."""
    groups = []
    for path in sorted(folder.glob(f"{HELD_FILE}*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        groups += [OpenGroup.of_json(one) for one in found]
    return sorted(groups, key=lambda group: group.group)[rank::num_ranks]
