"""What collectors and streams are made of: tests give them other plans, or look at what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.inside.wrapping import Wrapper, wrap

if TYPE_CHECKING:
    import pytest

    from hybrid_rl.rollout.collector import Collector
    from hybrid_rl.rollout.lengths import LengthRecord


def plan_of(collector: Collector) -> Any:
    """What the steps of a collector take."""
    return collector._plan


def set_plan(collector: Collector, plan: Any) -> None:
    """Have the steps of a collector take something else from now on."""
    collector._plan = plan


def open_groups(collector: Collector, step: int) -> Sequence[Any]:
    """The prompts whose groups are held after a training step."""
    held: Sequence[Any] = collector._open.held(step)
    return held


def lengths_of(collector: Collector) -> LengthRecord:
    """How long the completions of each prompt were."""
    return collector._lengths


def note_use(tally: Any, use: Any) -> None:
    """Count how full the engine was in a call."""
    tally._uses.append(use)


def loads_of(tasks: Any) -> Any:
    """How many tokens each rank is expected to have, as far as tasks were dealt."""
    return tasks._loads


def begin_group(stream: Any, task: Any, call: Any) -> Any:
    """Make the group of a task, of which nothing is generated."""
    return stream._begin(task, call)


def is_idle(client: Any) -> bool:
    """Whether nobody waits for anything that the engine has to generate."""
    return not (client.engine.num_unfinished or client._handles)


def asks_of(stream: Any) -> Any:
    """The turns that agents wait for."""
    return stream._turns._asks


def settings_of(stream: Any) -> Any:
    """What the trajectories of a stream are made with."""
    return stream._settings


def set_settings(stream: Any, settings: Any) -> None:
    """Make the trajectories of a stream with something else from now on."""
    stream._settings = settings


def refuse_turn_rewards(stream: Any, why: str) -> None:
    """Have rewards of turns refused, as if the loss could not use them."""
    stream._settings = replace(stream._settings, turn_rewards_problem=why)


def wrap_begin(patch: pytest.MonkeyPatch, wrapper: Wrapper) -> None:
    """Have `wrapper(begin, stream, task, call)` called where a stream of completions makes a group."""
    from hybrid_rl.rollout.completion_stream import CompletionStream

    wrap(patch, CompletionStream, "_begin", wrapper)


def set_lengths(collector: Collector, lengths: LengthRecord) -> None:
    """Put another record into the place of what the collector knows of lengths."""
    collector._lengths = lengths
