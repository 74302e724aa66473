"""The prompts of groups that were begun and not trained on yet, as the driver knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hybrid_rl.batch import AnyBatch
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.errors import CheckpointError, ConfigError, counted
from hybrid_rl.rollout.hold_rule import HeldPrompt, HoldRule


class PendingPrompts:
    """Prompts by group, by the training step after which they are held. A step that is taken back begins again from
    what was held after the one before, with the same ids: ids order groups, and judges' noise depends on them."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[dict[int, PromptRow], Mapping[int, int]]] = {}  # with the loads of ranks
        self._first = (0, 0)  # the last step that was begun, and its first id

    def begin(self, step: int, next_id: int) -> int:
        """Return the first id of a training step. next_id: the first that is free."""
        begun, first_id = self._first
        self._first = step, first_id if begun == step else next_id
        return self._first[1]

    def held(self, step: int) -> dict[int, PromptRow]:
        """Return the prompts that are held after a training step, by group."""
        return self._open.get(step, ({}, {}))[0]

    def deliver(
        self, batch: AnyBatch, begun: Mapping[int, PromptRow], step: int, loads: Mapping[int, int], *, drops: bool
    ) -> list[PromptRow]:
        """Return the prompts of the groups of a batch, in its order, and note that the others are held, or dropped.
        begun: all prompts by group. loads: as `loads` returns them."""
        groups = batch["group"].unique_consecutive().tolist()
        left = {} if drops else {group: row for group, row in begun.items() if group not in {*groups}}
        self._open = {at: held for at, held in self._open.items() if at >= step - 1} | {step: (left, loads)}
        return [begun[group] for group in groups]

    def loads(self, step: int) -> Mapping[int, int]:
        """Return how many tokens each rank may be expected to generate for what it holds after a training step, by its
        number among those that have samples of their own."""
        return self._open.get(step, ({}, {}))[1]

    def check(self, step: int, was: Mapping[str, float], now: Mapping[str, float]) -> None:
        """Check that settings are what they were, if groups are held after a training step; what a step held that was
        taken back is forgotten. Raises ConfigError."""
        if self.held(step):
            _check_same(was, now)

    def state_dict(self, step: int, next_id: int) -> dict[str, Any]:
        """Return what a resumed run needs after a training step: the next free id, and which groups are held."""
        begun, first_id = self._first
        return {"next_id": first_id if begun > step else next_id, "held": sorted(self.held(step))}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        held: Mapping[int, HeldPrompt],
        step: int,
        rule: HoldRule | None,
        settings: Mapping[str, float],
    ) -> None:
        """Continue after a training step, with the prompts of the groups that are held then. settings: of this run, by
        the names that HeldPrompt has.

        Raises CheckpointError if groups are missing, ConfigError if they cannot go on in this run.
        """
        expected = state.get("held", [])
        if expected and (rule is None or rule.drops):
            raise ConfigError(
                f"the checkpoint holds {counted(len(expected), 'group')} of samples that were begun and not trained "
                "on, which this run would lose: resume with rollout.partial=true or rollout.async_level as it was "
                "written, and without unfinished=drop"
            )
        if sorted(held) != expected:
            raise CheckpointError(
                f"the checkpoint holds groups {expected}, but its files have {sorted(held)}; resume from another one"
            )
        if rule is not None:
            for prompt in held.values():
                _check_same({name: getattr(prompt, name) for name in settings}, settings)
            rule.check(held.values(), step)
        loads = Counter[int]()
        for prompt in held.values():
            loads[prompt.data_rank] += prompt.num_missing
        self._open = {step: ({group: prompt.row for group, prompt in held.items()}, loads)}


def _check_same(was: Mapping[str, float], now: Mapping[str, float]) -> None:
    """Raise ConfigError if settings differ: a batch has one size of groups, and one temperature."""
    for name in now:
        if was[name] != now[name]:
            raise ConfigError(
                f"{name}={now[name]} cannot be joined with the groups that are held, which were begun with "
                f"{name}={was[name]}: leave it at {was[name]}, or start a new run from these weights"
            )
