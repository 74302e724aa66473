"""Declarations of worker methods."""

from __future__ import annotations

import pytest

from hybrid_rl.controller.dispatch import Dispatch, dispatch, dispatch_of
from hybrid_rl.errors import ConfigError
from tests.support.groups import dispatched_methods


class Worker:
    @dispatch(split="groups", collect="concat", needs=frozenset({"actor", "kv_cache"}))
    def declared(self) -> int:
        """Its own docstring."""
        return 41

    @dispatch()
    def plain(self) -> None: ...

    @dispatch(needs=frozenset(), objects=True)
    def without_memory(self) -> None: ...

    def undeclared(self) -> None: ...


class Child(Worker):
    @dispatch(collect="all")
    def plain(self) -> None: ...

    def declared(self) -> int:
        return 42


def test_what_was_declared_and_the_method_stays_itself() -> None:
    """Objects stay where they are unless asked for; needing nothing is not leaving memory alone."""
    assert dispatch_of(Worker.declared) == Dispatch("groups", "concat", frozenset({"actor", "kv_cache"}))
    assert dispatch_of(Worker.plain) == Dispatch("replicate", "leader", None, objects=False)
    assert dispatch_of(Worker.without_memory) == Dispatch(needs=frozenset(), objects=True)
    assert Worker().declared() == 41 and Worker.declared.__doc__ == "Its own docstring."


def test_subclasses_declare_what_they_override() -> None:
    assert dispatch_of(Child.plain).collect == "all"
    assert dispatch_of(Child.without_memory) == dispatch_of(Worker.without_memory)
    with pytest.raises(TypeError, match=r"Child.declared cannot be called on a group: declare it with @dispatch"):
        dispatch_of(Child.declared)


def test_what_is_not_declared_cannot_be_called() -> None:
    with pytest.raises(TypeError, match=r"Worker.undeclared cannot be called on a group: declare it with @dispatch"):
        dispatch_of(Worker.undeclared)
    assert sorted(dispatched_methods(Worker)) == ["declared", "plain", "without_memory"]


def test_ways_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"split='samples', collect='leader': use \('replicate', 'groups', 'items'\)"):
        dispatch(split="samples")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"collect='sum': use .*\('concat', 'leader', 'all'\)"):
        dispatch(collect="sum")  # type: ignore[arg-type]
