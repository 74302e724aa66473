"""The rule of held groups: when all ranks end what they generate, and which groups a step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.errors import ConfigError, counted
from hybrid_rl.process.interrupts import interrupt_requested


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
    """A group that may be held, as the rule sees it. has_agents: whether its samples are trajectories of agents. group:
    its id; born: the training step that began it; oldest_version: of its tokens, None if it has none; num_tokens: of
    what is whole of it; num_missing: that may be expected to be generated yet."""

    has_agents: ClassVar[bool]

    @property
    def group(self) -> int: ...
    @property
    def born(self) -> int: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def oldest_version(self) -> int | None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_missing(self) -> int: ...
    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self: ...
    def end(self) -> None: ...


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
    that train on it. ahead: groups that must be whole besides, for the steps after it. order: whether of whole groups
    the oldest or the newest are delivered first. check_steps: engine steps between two looks at what is whole. drops:
    what is not delivered is dropped, so that nothing is held; then max_staleness is 0 and ahead is 0. wanted: groups
    that are delivered now; None = num_groups. A step that replaces groups which teach nothing wants as many as it
    lacks: what was due was delivered before.

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
    wanted: int | None = None

    @property
    def num_wanted(self) -> int:
        """How many groups are delivered now."""
        return self.num_groups if self.wanted is None else self.wanted

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
        is_enough = sum(of_rank.num_whole for of_rank in everywhere) >= self.num_wanted + self.ahead
        return is_enough and all(needed <= whole for _, needed, whole in self.needed(everywhere, version))

    def key(self, group: Group, version: int) -> Key:
        """Return what a whole group is chosen by: its deadline, its place in the order, its id."""
        age = group.born if self.order == "fifo" else -group.born
        return self.deadline(group.oldest_version, version), age, group.group

    def chosen(self, keys: Iterable[Key], everywhere: Sequence[Standing], version: int) -> set[int]:
        """Return the ids of the groups of the batch. keys: of the whole groups of all ranks."""
        line = sorted(keys, key=lambda key: key[1:])
        batch: list[Key] = []
        for deadline, needed, _ in self.needed(everywhere, version):
            due = [key for key in line if key[0] <= deadline and key not in batch]
            batch += due[: max(0, needed - len(batch))]
        batch += [key for key in line if key not in batch][: self.num_wanted - len(batch)]
        return {group for _, _, group in batch}

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


@dataclass(frozen=True)
class Ending:
    """When a generation with held groups ends.

    rule: which groups are enough. learner: the version of the weights that will train on the batch. is_outdated:
    whether newer weights than those that generate wait for this rank; None if none can come, and a step waits for its
    batch.
    """

    rule: HoldRule
    learner: int
    is_outdated: Callable[[], bool] | None = None

    def standing(self, groups: Iterable[Group]) -> Standing:
        """Return how far this rank is."""
        is_outdated = self.is_outdated is not None and self.is_outdated()
        return self.rule.standing(groups, self.learner, is_interrupted=interrupt_requested(), is_outdated=is_outdated)

    def is_reached(self, everywhere: Sequence[Standing]) -> bool:
        """Whether the ranks end here: enough is whole, newer weights wait for all, or one was interrupted.

        Raises KeyboardInterrupt for that if a step waits for its batch; on all ranks at once, since those of one engine
        step together.
        """
        if self.rule.is_over(everywhere, self.learner):
            return True
        is_interrupted = any(of_rank.is_interrupted for of_rank in everywhere)
        if is_interrupted and self.is_outdated is None:
            raise KeyboardInterrupt
        return is_interrupted or all(of_rank.is_outdated for of_rank in everywhere)

    def goes_on(self, everywhere: Sequence[Standing]) -> bool:
        """Whether a generation that has ended so goes on with the newer weights that wait."""
        is_interrupted = any(of_rank.is_interrupted for of_rank in everywhere)
        return not self.rule.is_over(everywhere, self.learner) and not is_interrupted
