"""The state machine of memory: order, nesting, policies, and what happens after a transition that failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory import Leases, Resident


class Memory:
    """Residents whose sleeps and wakes are written down, and checked: no one wakes twice, nor sleeps asleep."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.present: set[str] = set()
        self.fails: dict[str, BaseException] = {}

    def resident(self, tag: str, num_bytes: int, policy: str) -> Resident:
        return Resident(tag, lambda: num_bytes, policy, self._act("sleep", tag), self._act("wake", tag))  # type: ignore[arg-type]

    def _act(self, verb: str, tag: str) -> Callable[[], None]:
        def act() -> None:
            if error := self.fails.get(f"{verb} {tag}"):
                raise error
            assert (tag in self.present) == (verb == "sleep")
            self.present ^= {tag}
            self.log.append(f"{verb} {tag}")

        return act


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def leases(memory: Memory) -> Leases:
    return Leases(
        [
            memory.resident("kv", 100, "discard"),
            memory.resident("optimizer", 20, "offload"),
            memory.resident("engine", 3, "offload"),
            Resident("actor", lambda: 7),
        ]
    )


def test_at_the_start_only_what_is_kept_is_awake(leases: Leases) -> None:
    assert leases.awake == {"actor"}
    assert leases.resident_bytes() == {"kv": 0, "optimizer": 0, "engine": 0, "actor": 7}


def test_sleep_comes_before_wake(leases: Leases, memory: Memory) -> None:
    """Were kv (first in the alphabet and in the list) woken first, both would be in memory together."""
    with leases.lease({"engine", "optimizer"}):
        assert memory.present == {"engine", "optimizer"}
    with leases.lease({"kv", "actor"}):
        assert memory.present == {"kv"} and leases.awake == {"kv", "actor"}
        assert leases.resident_bytes() == {"kv": 100, "optimizer": 0, "engine": 0, "actor": 7}
    assert memory.log == ["wake engine", "wake optimizer", "sleep engine", "sleep optimizer", "wake kv"]


def test_what_is_leased_again_does_not_move(leases: Leases, memory: Memory) -> None:
    for _ in range(3):
        with leases.lease({"kv"}):
            pass
    with leases.lease({"kv", "engine"}):
        pass
    assert memory.log == ["wake kv", "wake engine"] and leases.awake == {"kv", "engine", "actor"}


def test_a_lease_of_nothing_empties_memory(leases: Leases, memory: Memory) -> None:
    with leases.lease({"kv"}), pytest.raises(MemoryStateError), leases.lease({"engine"}):
        pass
    with leases.lease(()):
        assert memory.present == set() and leases.awake == {"actor"}


def test_transitions_are_told_once_in_order(leases: Leases) -> None:
    with leases.lease({"kv"}):
        pass
    with leases.lease({"optimizer"}):
        pass
    moved = leases.drain_transitions()
    assert [(t.tag, t.awake, t.num_bytes) for t in moved] == [
        ("kv", True, 100),
        ("kv", False, 100),
        ("optimizer", True, 20),
    ]
    assert all(t.seconds >= 0 for t in moved) and leases.drain_transitions() == []


# --------------------------------------------------------------------------------------------------------- nesting


@pytest.mark.parametrize("inner", [{"kv"}, {"actor"}, set(), {"kv", "actor"}])
def test_an_inner_lease_of_what_is_held_moves_nothing(leases: Leases, memory: Memory, inner: set[str]) -> None:
    with leases.lease({"kv", "actor"}):
        with leases.lease(inner):
            assert memory.present == {"kv"}
        assert memory.present == {"kv"}
        with pytest.raises(MemoryStateError), leases.lease({"engine"}):
            pass  # the outer lease is still the one that counts
    assert memory.log == ["wake kv"]


@pytest.mark.parametrize("outer", [{"kv"}, set()], ids=["kv", "nothing"])
def test_an_inner_lease_cannot_have_more(leases: Leases, memory: Memory, outer: set[str]) -> None:
    with leases.lease(outer):
        before = list(memory.log)
        with pytest.raises(MemoryStateError, match=r"\['engine'\] cannot be had inside it"), leases.lease({"engine"}):
            pass
        assert memory.log == before
    with leases.lease({"engine"}):
        assert memory.present == {"engine"}


def test_an_exception_inside_ends_the_lease(leases: Leases, memory: Memory) -> None:
    with pytest.raises(RuntimeError, match="work failed"), leases.lease({"kv"}):
        raise RuntimeError("work failed")
    with leases.lease({"engine"}):
        assert memory.present == {"engine"}


# ---------------------------------------------------------------------------------------------------------- failure


@pytest.mark.parametrize("nothing_wrong_with", [{"kv"}, set(), {"actor"}])
@pytest.mark.parametrize("failing", ["wake kv", "sleep engine"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_after_a_failed_move_every_lease_refuses(
    leases: Leases, memory: Memory, failing: str, error: BaseException, nothing_wrong_with: set[str]
) -> None:
    with leases.lease({"engine"}):
        pass
    memory.fails[failing] = error
    with pytest.raises(type(error)), leases.lease({"kv"}):
        raise AssertionError("the block must not run")
    assert ("engine" in leases.awake, "kv" in leases.awake) == (failing == "sleep engine", False)
    memory.fails.clear()
    verb, tag = failing.split()
    cause = f"unknown state since this failed: {verb} of '{tag}': {type(error).__name__}"
    with pytest.raises(MemoryStateError, match=cause), leases.lease(nothing_wrong_with):
        pass


# ----------------------------------------------------------------------------------------------------- declarations


def test_unknown_tag_moves_nothing(leases: Leases, memory: Memory) -> None:
    with pytest.raises(MemoryStateError, match=r"\['critic'\] do not exist; there are .*'optimizer'"):
        leases.lease({"kv", "critic"}).__enter__()
    assert memory.log == []


def test_a_tag_names_one_resident(leases: Leases) -> None:
    with pytest.raises(MemoryStateError, match="'actor' is registered already"):
        leases.add(Resident("actor", lambda: 0))


@pytest.mark.parametrize("policy", ["discard", "offload"])
def test_what_sleeps_says_how(policy: str) -> None:
    with pytest.raises(ValueError, match=f"'kv' with policy={policy} needs sleep and wake"):
        Resident("kv", lambda: 0, policy, sleep=lambda: None)  # type: ignore[arg-type]


def test_what_is_kept_is_never_put_to_sleep(memory: Memory) -> None:
    leases = Leases([memory.resident("actor", 1, "keep"), memory.resident("kv", 1, "discard")])
    for tags in ({"kv"}, {"actor"}, set()):
        with leases.lease(tags):
            assert "actor" in leases.awake
    assert memory.log == ["wake kv", "sleep kv"]
