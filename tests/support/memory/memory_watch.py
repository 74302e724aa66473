"""A watch over the residents of a run: what each rank's transitions say is held against the cycle's table."""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_rl.memory.cycle import Cycle, Phase
from hybrid_rl.memory.history import Span, StepMemory

if TYPE_CHECKING:  # the watch itself needs neither transformers nor a Trainer, which take four seconds to import
    from hybrid_rl import Trainer


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
        phases = sorted(step.phases, key=lambda phase: phase.start)
        for move in step.moves:
            while phases and phases[0].start < move.start:
                found += self._phase_problems(phases.pop(0), step, awake)
            tag = move.tag
            if tag not in self._movable:
                found.append(f"{tag} moves, and should always be there")
            if move.awake:
                others = [other for other in sorted(awake) if frozenset({tag, other}) in self._apart]
                found += [f"{tag} wakes while {other} is awake" for other in others]
            if (tag in awake) == move.awake:
                found.append(f"{tag} wakes awake" if move.awake else f"{tag} goes to sleep asleep")
            (awake.add if move.awake else awake.discard)(tag)
        for phase in phases:
            found += self._phase_problems(phase, step, awake)
        for tag in sorted(self._movable):
            verbs = {move.awake for move in step.moves if move.tag == tag}
            found += [f"{tag} never {word}" for word, verb in (("woke", True), ("slept", False)) if verb not in verbs]
        missing = self._names - {phase.name for phase in step.phases}
        return found + [f"there was no {name}" for name in sorted(missing)]

    def _phase_problems(self, phase: Span, step: StepMemory, awake: set[str]) -> list[str]:
        found = []
        wanted = self._phases[phase.name].tags & self._movable
        if awake != wanted:
            found.append(f"{phase.name} needs {sorted(wanted)}, but {sorted(awake)} are awake")
        inside = sorted({move.tag for move in step.moves if phase.start < move.start < phase.end})
        return found + [f"{tag} moves in the middle of {phase.name}" for tag in inside]


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


def held_bytes(*ids: int) -> int:
    """Memory of processes, of this one if none are named: their own pages, and those of memory files, which they need
    not have mapped."""
    own, files = 0, dict[int, int]()
    for pid in ids or (os.getpid(),):
        status = Path(f"/proc/{pid}/status").read_text()
        own += next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if "/memfd:hybrid_rl" in _target(path):
                files[path.stat().st_ino] = path.stat().st_blocks * 512
    return own + sum(files.values())


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # of the listing itself
        return ""


def slope(values: Sequence[float]) -> float:
    """The median slope of all pairs: a jump of somebody else's does not count."""
    return statistics.median((values[b] - values[a]) / (b - a) for a, b in combinations(range(len(values)), 2))
