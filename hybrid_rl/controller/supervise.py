"""Supervision of one call: it ends when a rank fails, dies or hangs, or the user presses Ctrl-C."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from hybrid_rl.controller.failures import Failure, Site, error_of
from hybrid_rl.controller.placement import RayOptions
from hybrid_rl.controller.server import Health, Outcome
from hybrid_rl.process import progress
from hybrid_rl.process.interrupts import deferred_interrupt, interrupt_requested

logger = logging.getLogger("hybrid_rl")

POLL_SECONDS = 0.2
MAX_HEALTH_SECONDS = 10.0
# How often ranks are asked if somebody watches their progress, and for how many of them.
WATCHED_SECONDS, WATCHED_RANKS = 1.0, 16


class Transport(Protocol):
    """How the driver reaches ranks."""

    def wait(self, ranks: Collection[int], timeout: float) -> Mapping[int, Outcome]:
        """Wait for all of these ranks, at most `timeout` seconds; the outcomes that have come, each returned once."""

    def health(self, ranks: Collection[int]) -> Mapping[int, Health]:
        """Ask these ranks for their health without waiting; the answers since the last call."""

    def interrupt(self, ranks: Collection[int], call_id: int) -> None:
        """Ask these ranks to end the call at a safe point."""

    def describe(self, rank: int) -> str:
        """Describe the process of a rank that does not answer, as seen from outside."""

    def kill(self) -> None:
        """End all ranks at once."""


def supervise(
    transport: Transport, site: Site, call_id: int, doing: str, options: RayOptions, send: Callable[[], None]
) -> dict[int, Any]:
    """Send a call to all ranks, with `send`, and return their answers.

    Raises one error if it fails, after killing the ranks, unless all came back and can still talk to each other. A
    Ctrl-C is passed on to the ranks and raised here when they are back; a second one kills them.
    """
    watch = _Watch(transport, site, call_id, options)
    # From before the call is sent: a Ctrl-C that came in between would leave ranks at work that nobody waits for.
    with deferred_interrupt():
        try:
            send()
            watch.run()
            if failures := watch.failures.values():
                is_broken = bool(watch.pending) or any(f.is_end or f.is_disconnected for f in failures)
                if is_broken:
                    transport.kill()
                elif all(map(_is_of_interrupt, failures)):
                    raise KeyboardInterrupt
                raise error_of(site, doing, watch.failures)
        except BaseException:
            # A second Ctrl-C, or a SIGTERM: do not wait for the call under way.
            if watch.pending:
                transport.kill()
            raise
        finally:
            progress.forget(site.role)
    return watch.answers


def _is_of_interrupt(failure: Failure) -> bool:
    """Whether a rank broke off because of a Ctrl-C that it or a peer saw. One that cannot talk to its peers any more
    has lost them instead."""
    if failure.is_disconnected:
        return False
    return failure.is_interrupt or (failure.is_echo and interrupt_requested())


class _Watch:
    """One call under way. failures are in the order in which they came."""

    def __init__(self, transport: Transport, site: Site, call_id: int, options: RayOptions) -> None:
        self.pending = set(range(site.num_ranks))
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self._transport, self._site, self._call_id, self._options = transport, site, call_id, options
        start = time.monotonic()
        # For each rank: when it last made progress, as far as the driver knows, and its stack then.
        self._moved = dict.fromkeys(self.pending, start)
        self._stacks: dict[int, str] = {}
        self._waiting: set[int] = set()  # ranks whose stack ended in a collective when they last answered
        self._answered = dict.fromkeys(self.pending, start)
        self._health_every = min(MAX_HEALTH_SECONDS, max(POLL_SECONDS, options.watchdog_seconds / 4))

    def run(self) -> None:
        """Wait until all are back, or no more can be expected."""
        deadline: float | None = None
        is_interrupted = False
        next_health = time.monotonic() + self._interval()
        while self.pending:
            self._take(self._transport.wait(self.pending, POLL_SECONDS))
            now = time.monotonic()
            if self.pending and deadline is None and not all(map(_is_of_interrupt, self.failures.values())):
                self._transport.interrupt(self.pending, self._call_id)
                deadline = now + self._options.grace_seconds
            if deadline is not None and now > deadline:
                return
            if interrupt_requested() and not is_interrupted and self.pending:
                self._transport.interrupt(self.pending, self._call_id)
                is_interrupted = True
            if now > next_health and self.pending and deadline is None:
                next_health = now + self._interval()
                self._look(now)

    def _interval(self) -> float:
        """Return seconds until ranks are asked how they are: sooner if somebody watches, and less often if there are
        many."""
        watched = WATCHED_SECONDS * max(1.0, self._site.num_ranks / WATCHED_RANKS)
        return min(watched, self._health_every) if progress.is_watched() else self._health_every

    def _take(self, outcomes: Mapping[int, Outcome]) -> None:
        for rank, outcome in outcomes.items():
            self.pending.discard(rank)
            if outcome.failure is None:
                self.answers[rank] = outcome.value
            else:
                self.failures[rank] = outcome.failure
        _forward_warnings(self._site.role, outcomes)

    def _look(self, now: float) -> None:
        reports = self._transport.health(self.pending)
        for rank, health in reports.items():
            self._moved[rank] = max(self._moved[rank], now - health.idle_seconds)
            self._answered[rank], self._stacks[rank] = now, health.stack
            (self._waiting.add if health.is_in_collective else self._waiting.discard)(rank)
        progress.hear(self._site.role, {rank: health.progress for rank, health in reports.items()})
        _forward_warnings(self._site.role, reports)
        # A rank may wait for another one as long as it takes: the call hangs only if none makes progress.
        if now - max(self._moved[rank] for rank in self.pending) > self._options.watchdog_seconds:
            self._hang(now)

    def _hang(self, now: float) -> None:
        silent = {r for r in self.pending if now - self._answered[r] > 2 * self._health_every + POLL_SECONDS}
        # Ranks in a collective wait for the one that does not come to it, or whose process does not even answer.
        first = min(silent or self.pending - self._waiting or self.pending, key=lambda rank: self._moved[rank])
        stacks = []
        for rank in sorted(self.pending):
            where = self._stacks.get(rank, "")
            if rank in silent:
                where = f"  does not answer: {self._transport.describe(rank)}\n" + where
            stacks.append(f"rank {rank}, without progress for {now - self._moved[rank]:.0f} s:\n{where}")
        self.failures[first] = Failure(
            "hang",
            f"no rank made progress for {self._options.watchdog_seconds:g} s; this rank is blocking the others. If a "
            f"step may take longer, raise controller.ray.watchdog_seconds",
            "\n".join(stacks),
            is_end=True,
        )
        self._options = replace(self._options, grace_seconds=0.0)


def _forward_warnings(role: str, reports: Mapping[int, Outcome | Health]) -> None:
    """Log the warnings of ranks; what several ranks say is logged once."""
    said: dict[tuple[int, str], list[int]] = {}
    for rank, report in sorted(reports.items()):
        for warning in report.warnings:
            said.setdefault(warning, []).append(rank)
    for (level, message), ranks in said.items():
        noun = "rank" if len(ranks) == 1 else "ranks"
        logger.log(level, "[%s %s %s] %s", role, noun, ", ".join(map(str, ranks)), message)
