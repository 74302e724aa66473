"""The cycle of a training step: its phases, and what each needs in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TypeVar

ACTOR = "actor"  # weights of the policy on this rank: its shards, or all of it with one rank
OPTIMIZER = "optimizer"  # masters and Adam moments of the policy
ENGINE_WEIGHTS = "engine_weights"  # the engine's own copy
KV_CACHE = "kv_cache"
REFERENCE = "reference"
TEACHER = "teacher"
CRITIC = "critic"
CRITIC_OPTIMIZER = "critic_optimizer"
REWARD_MODELS = "reward_models"

TRAINED = (ACTOR, OPTIMIZER, CRITIC, CRITIC_OPTIMIZER)
FROZEN = (REFERENCE, TEACHER, REWARD_MODELS)
ENGINE = (ENGINE_WEIGHTS, KV_CACHE)
RESIDENTS = (*TRAINED, *FROZEN, *ENGINE)
GENERATING = ("publish", "check", "generate", "reward")  # phases of ranks that generate

# What tables say of a resident in a phase.
NEEDED, STAYS, ON_HOST, GIVEN_UP = "needed", "stays", "host", "-"
STATES = {
    NEEDED: "the phase works with it",
    STAYS: "not needed, and not moved",
    ON_HOST: "not needed, in host memory",
    GIVEN_UP: "not needed, released",
}

Part = TypeVar("Part")


@dataclass(frozen=True)
class Phase:
    """A part of a training step. tags: the residents that it needs; all others may sleep meanwhile."""

    name: str
    tags: frozenset[str]

    @property
    def is_taken(self) -> bool:
        """Whether the run has this phase at all."""
        return bool(self.tags)


@dataclass(frozen=True)
class Cycle:
    """All phases of a run, in the order of a step. A phase of a model that the run does not have needs nothing, and is
    not taken.

    publish: the engine gets the actor's weights. check: the engine computes its half of the probe; the trainer's half
    belongs to `publish`. generate: the rollout, with judges that the engine runs. reward: reward models score the
    samples. score_*: one model at a time, those that are updated next last: they need not leave in between. save, load:
    one phase for checkpoints.
    """

    publish: Phase
    check: Phase
    generate: Phase
    reward: Phase
    score_reference: Phase
    score_teacher: Phase
    score_actor: Phase
    score_critic: Phase
    update_critic: Phase
    update: Phase
    save: Phase

    @classmethod
    def of(
        cls,
        *,
        residents: frozenset[str],
        engine_is_actor: bool,
        update_reads_reference: bool,
        moves_reference: bool,
        scores_actor: bool = True,
        rewards_beside_engine: bool = False,
        reference_is_actor: bool = False,
    ) -> Cycle:
        """Return the cycle of a run.

        residents: tags of what the run has. engine_is_actor: the engine generates with the trainer's own tensors.
        update_reads_reference: the loss computes the reference's distribution. moves_reference: the reference follows
        the policy after updates, and is part of checkpoints. scores_actor: the policy computes something of a batch
        before the update. rewards_beside_engine: the engine stays awake while reward models score, because they never
        leave memory and it may have more to generate. reference_is_actor: the reference is the policy without its
        adapters.
        """
        unknown = residents - set(RESIDENTS)
        if unknown:
            raise ValueError(f"residents {sorted(unknown)} do not exist; they are {RESIDENTS}")
        actor = {ACTOR} if engine_is_actor else set()
        reference = {REFERENCE} if update_reads_reference or moves_reference else set()
        needs = {
            "publish": {ACTOR, ENGINE_WEIGHTS},
            "check": {ENGINE_WEIGHTS, KV_CACHE} | actor,
            "generate": {ENGINE_WEIGHTS, KV_CACHE} | actor,
            "reward": {REWARD_MODELS},
            "score_reference": {ACTOR if reference_is_actor else REFERENCE},
            "score_teacher": {TEACHER},
            "score_actor": {ACTOR} if scores_actor else set(),
            "score_critic": {CRITIC},
            "update_critic": {CRITIC, CRITIC_OPTIMIZER},
            "update": {ACTOR, OPTIMIZER} | reference,
            "save": {*TRAINED} | ({REFERENCE} if moves_reference else set()),
        }
        if rewards_beside_engine and REWARD_MODELS in residents:
            needs["reward"] |= needs["generate"]
        return cls(**{name: Phase(name, frozenset(tags) & residents) for name, tags in needs.items()})

    def of_ranks(self, *, trains: bool, generates: bool) -> Cycle:
        """Return the cycle of ranks that only train or only generate: the phases of the others need nothing here."""
        not_taken = {phase.name for phase in self if not (generates if phase.name in GENERATING else trains)}
        return replace(self, **{name: Phase(name, frozenset()) for name in not_taken})

    def __iter__(self) -> Iterator[Phase]:
        """Iterate over the phases, in order."""
        return iter(getattr(self, item.name) for item in fields(self))


def joined(parts: Iterable[tuple[Phase, Part]], movable: Set[str]) -> list[tuple[frozenset[str], list[Part]]]:
    """Join parts of a call that follow each other: what one lease needs, and the parts under it. Neighbours that differ
    only in residents that never move share a lease, so that nothing is agreed on that changes nothing.

    parts: each with its phase. movable: tags of the residents that can sleep.
    """
    leases = []
    for _, neighbours in groupby(parts, key=lambda part: part[0].tags & movable):
        phases, its = zip(*neighbours, strict=True)
        leases.append((frozenset().union(*(phase.tags for phase in phases)), list(its)))
    return leases


def cycle_table(cycle: Cycle, residents: Set[str], movable: Set[str]) -> str:
    """Return the phases of a step in order, one line each, and what every resident does in them.

    residents: tags of what the run has. movable: those that can sleep; the others are always there.
    """
    shown = [tag for tag in RESIDENTS if tag in residents]
    rows = [["phase", *shown]]
    for phase in cycle:
        if phase.is_taken:
            rows.append([phase.name, *(_mark(tag, phase, movable) for tag in shown)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    states = {state for row in rows[1:] for state in row[1:]}
    return "\n".join([*lines, states_explained(states)])


def states_explained(states: Set[str]) -> str:
    """Return what these states of residents mean, in one line."""
    return "; ".join(f"{state}: {meaning}" for state, meaning in STATES.items() if state in states)


def _mark(tag: str, phase: Phase, movable: Set[str]) -> str:
    if tag in phase.tags:
        return NEEDED
    if tag not in movable:
        return STAYS
    return GIVEN_UP if tag in ENGINE else ON_HOST
