"""What vLLM as an engine is made of: tests break it, or look at what it holds. Imports no vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def llm_of(engine: Any) -> Any:
    """vLLM's own engine."""
    return engine._llm


def num_known_requests(llm: Any) -> int:
    """Requests that a stand-in of vLLM holds."""
    return len(llm._requests)


def writer_of(engine: Any) -> Any:
    """What writes the weights."""
    return engine._writer


def wrap_plan(patch: pytest.MonkeyPatch, writer: Any, edit: Any) -> None:
    """Have the writer write by `edit(plan, source)` of the plan that it makes."""
    plan = writer._plan
    patch.setattr(writer, "_plan", lambda source: edit(plan(source), source))


def load_with(patch: pytest.MonkeyPatch, writer: Any, weights: Any) -> None:
    """Have the writer know other weights than those that it traced."""
    patch.setattr(writer._loading, "weights", weights)


def adapters_of(slot: Any) -> dict[str, Any]:
    """vLLM's layers with adapters, by name."""
    layers: dict[str, Any] = slot._manager.modules
    return layers


def remove_adapters(slot: Any) -> None:
    """Have vLLM forget the adapters of a slot."""
    slot._manager.remove_all_adapters()


def configure(engine: Any, config: Any) -> None:
    """Put another configuration in the place of an engine's."""
    engine._config = config


def forget_failure(engine: Any) -> None:
    """Let an engine go on that has failed."""
    engine._failure = None


def forget_requests(engine: Any) -> bool:
    """Abort what the engine has at its next step, also if it is paused. Returns whether it has anything."""
    engine._aborted = set(engine._ids)
    return bool(engine._ids)


def count_anew(engine: Any, config: Any, *, max_num_seqs: int, max_num_waiting: int, counters: Any) -> None:
    """Leave an engine as it was when it had just been made, with these settings."""
    engine._config = replace(config, max_num_seqs=max_num_seqs)
    engine._max_num_waiting = max_num_waiting
    engine.counters = counters
    engine._restarts_noise = True
