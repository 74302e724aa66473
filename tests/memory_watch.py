"""A watch over the residents of a run: what each rank's transitions say is held against the cycle's table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations

from hybrid_rl import Trainer
from hybrid_rl.memory.cycle import Cycle, Phase
from hybrid_rl.memory.history import StepMemory
from hybrid_rl.training.cycle import MemoryPhases, memory_phases


class MemoryWatch:
    """Holds consecutive steps of one rank against the table.

    movable: residents that can sleep, and must whenever a phase does not need them. names: the phases that every step
    has; others of the table may come too.
    """

    def __init__(self, cycle: Cycle, movable: Collection[str], names: Collection[str]) -> None:
        self._phases: dict[str, Phase] = {phase.name: phase for phase in cycle}
        self._movable, self._names = frozenset(movable), frozenset(names)
        together = {frozenset(pair) for phase in cycle for pair in combinations(sorted(phase.tags), 2)}
        self._apart = {frozenset(pair) for pair in combinations(sorted(self._movable), 2)} - together

    def problems(self, steps: Sequence[StepMemory]) -> list[str]:
        """Return what went wrong, in words."""
        found: list[str] = []
        moves = [move for step in steps for move in step.moves]
        # What first goes to sleep was awake.
        awake = {tag for tag in self._movable if next((not move.awake for move in moves if move.tag == tag), False)}
        for number, step in enumerate(steps, start=1):
            found += [f"step {number}: {problem}" for problem in self._problems(step, awake)]
        return found

    def _problems(self, step: StepMemory, awake: set[str]) -> list[str]:
        """The same for a step; `awake` is kept up to date."""
        found: list[str] = []
        events: list[tuple[float, int, str, str]] = []  # at one moment memory is first given back, then taken
        for move in step.moves:
            end = move.start + move.seconds
            events.append((move.start, 2, "wake", move.tag) if move.awake else (end, 0, "sleep", move.tag))
            if move.awake:
                events.append((end, 2, "is awake", move.tag))
            else:
                events.append((move.start, 1, "leaves", move.tag))
        for phase in step.phases:
            events += [(phase.start, 3, "begin", phase.name), (phase.end, 1, "end", phase.name)]
        running: list[str] = []
        for _, _, what, name in sorted(events):
            if what in ("wake", "sleep", "is awake", "leaves"):
                if name not in self._movable:
                    found.append(f"{name} moves, and should always be there")
                if running:
                    found.append(f"{name} moves in the middle of {running}")
            if what == "begin":
                running.append(name)
                wanted = self._phases[name].tags & self._movable
                if awake != wanted:
                    found.append(f"{name} needs {sorted(wanted)}, but {sorted(awake)} are awake")
            elif what == "end":
                running.remove(name)
            elif what == "wake":
                if name in awake:
                    found.append(f"{name} wakes awake")
                others = [other for other in sorted(awake) if frozenset({name, other}) in self._apart]
                found += [f"{name} wakes while {other} is awake" for other in others]
                awake.add(name)
            elif what == "sleep":
                if name not in awake:
                    found.append(f"{name} goes to sleep asleep")
                awake.discard(name)
        for tag in sorted(self._movable):
            verbs = {move.awake for move in step.moves if move.tag == tag}
            found += [f"{tag} never {word}" for word, verb in (("woke", True), ("slept", False)) if verb not in verbs]
        missing = self._names - {phase.name for phase in step.phases}
        return found + [f"there was no {name}" for name in sorted(missing)]


def phases_of(trainer: Trainer) -> MemoryPhases:
    """Return residents and cycle of a Trainer."""
    return memory_phases(
        trainer.config, has_reward_models=bool(trainer._run.rewards.runner(trainer.config).entries.models)
    )


class Recorder:
    """Collects the steps of every rank of a Trainer: call it after each."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.ranks: list[list[StepMemory]] = [[] for _ in range(trainer.policy.num_ranks)]

    def step(self) -> dict[str, float]:
        """Take a training step; returns its metrics."""
        metrics = self._trainer.step().metrics
        for mine, steps in zip(self.ranks, self._trainer.policy.memory_history(), strict=True):
            mine.append(steps[-1])
        return metrics
