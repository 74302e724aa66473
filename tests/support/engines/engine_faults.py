"""Faults of an engine on request, so that whoever guards an engine can be tested against one that misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hybrid_rl.errors import ConfigError

Call = Literal["sleep", "wake", "update_weights", "step"]
Effect = Literal["raise", "hang", "drop_buffers", "stale_weights", "ignore", "skip_byte"]

EFFECTS: dict[Call, frozenset[Effect]] = {
    "sleep": frozenset({"raise", "hang", "drop_buffers"}),
    "wake": frozenset({"raise", "hang", "stale_weights"}),
    "update_weights": frozenset({"raise", "hang", "stale_weights", "ignore", "skip_byte"}),
    "step": frozenset({"raise", "hang"}),
}


class InjectedFault(RuntimeError):
    """Raised by an engine that was asked to fail."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in the number-th call (from 1) of a method; calls that the contract refuses do not count.

    raise: InjectedFault; an update has then written half of the weights, a step has planned its pass, the other calls
    have done nothing. hang: the call waits for `Faults.let_go`, then goes on. drop_buffers: buffers sleep without being
    saved. stale_weights: the weights are those of the first version while all numbers say otherwise. ignore: nothing is
    done, and reported as done. skip_byte: the last byte of the last weight is not written.

    Raises ConfigError for an effect that the call cannot have.
    """

    call: Call
    effect: Effect
    number: int = 1

    def __post_init__(self) -> None:
        if self.call not in EFFECTS or self.effect not in EFFECTS[self.call] or self.number < 1:
            known = "; ".join(f"{call}: {', '.join(sorted(effects))}" for call, effects in EFFECTS.items())
            raise ConfigError(f"{self} cannot be injected; there are {known}; calls count from 1")


class Faults:
    """Counts the calls of an engine and says what is to go wrong. hangs: set once a call hangs; let_go: set it to let
    that call go on."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._effects = {(fault.call, fault.number): fault.effect for fault in faults}
        self._num_calls: dict[Call, int] = dict.fromkeys(EFFECTS, 0)
        self.hangs = threading.Event()
        self.let_go = threading.Event()

    def enter(self, call: Call) -> Effect | None:
        """Count a call and return its effect; hangs where that is the effect."""
        self._num_calls[call] += 1
        effect = self._effects.get((call, self._num_calls[call]))
        if effect == "hang":
            self.hangs.set()
            self.let_go.wait()
        return effect

    def fail(self, call: Call) -> None:
        """Raise InjectedFault for the call under way."""
        raise InjectedFault(f"{call} number {self._num_calls[call]} was asked to fail")
