"""The state machine of memory: order, nesting, policies, and what happens after a transition that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hybrid_rl.errors import MemoryRefusedError, MemoryStateError
from hybrid_rl.memory.agreement import Failure
from hybrid_rl.memory.leases import Leases, Resident


class Memory:
    """Residents whose sleeps and wakes are written down, and checked: no one wakes twice, nor sleeps asleep."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.present: set[str] = set()
        self.fails: dict[str, BaseException] = {}

    def resident(self, tag: str, num_bytes: int) -> Resident:
        return Resident(tag, lambda: num_bytes, self.act("sleep", tag), self.act("wake", tag))

    def act(self, verb: str, tag: str) -> Callable[..., None]:
        def act(tags: frozenset[str] = frozenset()) -> None:
            assert tags == (frozenset() if verb == "wake" else {tag})
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
            memory.resident("kv", 100),
            memory.resident("optimizer", 20),
            memory.resident("engine", 3),
            Resident("actor", lambda: 7),
        ]
    )


def test_at_the_start_only_what_is_kept_is_awake(leases: Leases) -> None:
    assert leases.awake == {"actor"}
    assert leases.resident_bytes() == {"kv": 0, "optimizer": 0, "engine": 0, "actor": 7}


def test_what_starts_awake_goes_to_sleep_first(memory: Memory) -> None:
    memory.present.add("kv")
    leases = Leases([replace(memory.resident("kv", 100), starts_awake=True), memory.resident("engine", 3)])
    assert leases.awake == {"kv"}
    with leases.lease({"engine"}):
        assert memory.log == ["sleep kv", "wake engine"]


def test_sleep_comes_before_wake(leases: Leases, memory: Memory) -> None:
    """Were kv (first in the alphabet and in the list) woken first, both would be in memory together."""
    with leases.lease({"engine", "optimizer"}):
        assert memory.present == {"engine", "optimizer"}
    with leases.lease({"kv", "actor"}):
        assert memory.present == {"kv"} and leases.awake == {"kv", "actor"}
        assert leases.resident_bytes() == {"kv": 100, "optimizer": 0, "engine": 0, "actor": 7}
    assert memory.log == ["wake engine", "wake optimizer", "sleep optimizer", "sleep engine", "wake kv"]


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
        with (
            pytest.raises(MemoryStateError, match=r"cannot lease \['engine'\] while a lease on"),
            leases.lease({"engine"}),
        ):
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


@pytest.mark.parametrize("failing", ["wake kv", "sleep engine"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_after_a_failed_move_every_lease_refuses(
    leases: Leases, memory: Memory, failing: str, error: BaseException
) -> None:
    with leases.lease({"engine"}):
        pass
    memory.fails[failing] = error
    with pytest.raises(type(error)), leases.lease({"kv"}):
        raise AssertionError("the block must not run")
    assert ("engine" in leases.awake, "kv" in leases.awake) == (failing == "sleep engine", False)
    memory.fails.clear()
    verb, tag = failing.split()
    cause = f"unknown state since this failure: {verb} of '{tag}': {type(error).__name__}"
    for tags in ({"kv"}, set(), {"actor"}):
        with pytest.raises(MemoryStateError, match=cause), leases.lease(tags):
            pass


class Atomic(Memory):
    """Memory whose failed moves have changed nothing."""

    def resident(self, tag: str, num_bytes: int) -> Resident:
        return replace(super().resident(tag, num_bytes), atomic=True)


def atomic_leases(*, fails: str, error: BaseException) -> tuple[Leases, Memory]:
    """ "engine" and "optimizer" are awake, "actor" and "kv" asleep; `fails` does so once they are leased instead."""
    memory = Atomic()
    sizes = {"actor": 7, "engine": 3, "kv": 100, "optimizer": 2**30}
    residents = [memory.resident(tag, size) for tag, size in sizes.items()]
    leases = Leases([*residents, Resident("reward", lambda: 5)], give_back=lambda: memory.log.append("give back"))
    with leases.lease({"engine", "optimizer"}):
        pass
    memory.log.clear()
    leases.drain_transitions()
    memory.fails[fails] = error
    return leases, memory


def test_a_wake_without_memory_puts_everything_back() -> None:
    leases, memory = atomic_leases(fails="wake kv", error=RuntimeError("out of memory"))
    with pytest.raises(MemoryRefusedError) as refused, leases.lease({"actor", "kv"}):
        raise AssertionError("the block must not run")
    assert str(refused.value) == (
        "wake of 'kv': RuntimeError: out of memory; memory was put back as it was before, and work can go on. In "
        "memory were actor 7 B, reward 5 B; to make room, name more residents in memory.offload, or lower "
        "rollout.kv_cache_memory_bytes or optimizer.tokens_per_micro_batch"
    )
    assert str(refused.value.__cause__) == "out of memory"
    forth = ["sleep optimizer", "sleep engine", "give back", "wake actor"]
    assert memory.log == [*forth, "sleep actor", "give back", "wake engine", "wake optimizer"]
    assert leases.awake == {"engine", "optimizer", "reward"} and memory.present == {"engine", "optimizer"}
    assert leases.broken is None
    moved = [(t.tag, t.awake, t.num_bytes) for t in leases.drain_transitions()]
    assert moved == [
        ("optimizer", False, 2**30),
        ("engine", False, 3),
        ("actor", True, 7),
        ("actor", False, 7),
        ("engine", True, 3),
        ("optimizer", True, 2**30),
    ]
    memory.fails.clear()
    with leases.lease({"actor", "kv"}):
        assert memory.present == {"actor", "kv"}


@pytest.mark.parametrize("fails", ["sleep optimizer", "sleep engine", "wake actor", "wake kv"])
def test_an_interrupted_move_is_undone_and_the_interrupt_goes_on(fails: str) -> None:
    leases, memory = atomic_leases(fails=fails, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), leases.lease({"actor", "kv"}):
        raise AssertionError("the block must not run")
    assert memory.present == {"engine", "optimizer"} == leases.awake - {"reward"} and leases.broken is None
    memory.fails.clear()
    with leases.lease({"engine"}):
        assert memory.present == {"engine"}


def test_a_failed_sleep_says_nothing_of_room() -> None:
    leases, _ = atomic_leases(fails="sleep engine", error=MemoryStateError("host memory is full"))
    with pytest.raises(MemoryRefusedError, match=r"'engine': .*host memory is full; .* engine 3 B, reward 5 B$"):
        leases.lease({"kv"}).__enter__()


@pytest.mark.parametrize("undoing", ["sleep actor", "wake optimizer"])
def test_if_undoing_fails_too_both_are_told_and_every_lease_refuses(undoing: str) -> None:
    leases, memory = atomic_leases(fails="wake kv", error=RuntimeError("out of memory"))
    memory.fails[undoing] = OSError("gone")
    if undoing == "wake optimizer":
        del memory.fails["wake kv"]
        memory.fails["wake actor"] = RuntimeError("out of memory")
    with pytest.raises(OSError, match="gone") as raised, leases.lease({"actor", "kv"}):
        pass
    assert "then, while memory was put back" in raised.value.__notes__[0]
    memory.fails.clear()
    verb, tag = undoing.split()
    cause = f"RuntimeError: out of memory; then, while memory was put back, {verb} of '{tag}': OSError: gone"
    with pytest.raises(MemoryStateError, match=cause) as later, leases.lease(()):
        pass
    assert not isinstance(later.value, MemoryRefusedError) and leases.broken is not None


def test_what_cannot_be_undone_breaks_memory_also_after_what_can() -> None:
    leases, memory = atomic_leases(fails="wake vllm", error=RuntimeError("half mapped"))
    leases.add(Memory.resident(memory, "vllm", 1))
    with pytest.raises(RuntimeError, match="half mapped"), leases.lease({"actor", "vllm"}):
        pass
    assert leases.broken == "wake of 'vllm': RuntimeError: half mapped" and leases.awake == {"actor", "reward"}


# ------------------------------------------------------------------------------------------------------------- order


def resident(memory: Memory, tag: str, *after: str) -> Resident:
    return replace(memory.resident(tag, 1), after=after)


def test_waking_follows_what_comes_after_what_and_sleeping_goes_back(memory: Memory) -> None:
    """By name "a" would be first; it waits for "b", which waits for "z". "m" waits for none."""
    chain = [resident(memory, "a", "b"), resident(memory, "m"), resident(memory, "b", "z"), resident(memory, "z")]
    leases = Leases(chain)
    with leases.lease({"a", "b", "m", "z"}):
        pass
    with leases.lease(()):
        pass
    assert memory.log == [f"wake {tag}" for tag in "mzba"] + [f"sleep {tag}" for tag in "abzm"]


def test_order_is_only_among_what_moves(memory: Memory) -> None:
    """after says when, not that: a lease wakes what it names and nothing else."""
    leases = Leases([resident(memory, "kv", "weights", "of another rank"), resident(memory, "weights")])
    with leases.lease({"kv"}):
        assert memory.present == {"kv"}
    with leases.lease({"weights"}):
        pass
    assert memory.log == ["wake kv", "sleep kv", "wake weights"]


def test_residents_that_wait_for_each_other_are_refused(memory: Memory) -> None:
    leases = Leases([resident(memory, "a", "b")])
    with pytest.raises(MemoryStateError, match=r"wait for each other to wake: (a -> b -> a|b -> a -> b)"):
        leases.add(resident(memory, "b", "a"))
    with pytest.raises(MemoryStateError, match=r"\['b'\] do not exist"), leases.lease({"b"}):
        pass
    leases.add(resident(memory, "b"))


# ---------------------------------------------------------------------------------------------- one owner of several


@pytest.fixture
def owned(memory: Memory) -> Leases:
    """An engine with two residents, and one of another owner; `give back` returns the free memory."""

    def sleep_all(tags: frozenset[str]) -> None:
        assert tags <= memory.present
        memory.present -= tags
        memory.log.append(f"sleep {'+'.join(sorted(tags))}")

    def owns(tag: str, *after: str) -> Resident:
        return Resident(tag, lambda: 5, wake=memory.act("wake", tag), after=after, sleep=sleep_all)

    others = [memory.resident("m", 1), Resident("actor", lambda: 7)]
    return Leases([owns("kv", "weights"), owns("weights"), *others], give_back=lambda: memory.log.append("give back"))


def test_residents_of_one_owner_go_to_sleep_in_one_call(owned: Leases, memory: Memory) -> None:
    with owned.lease({"kv", "weights", "m"}):
        pass
    memory.log.clear()
    with owned.lease({"actor"}):
        assert memory.log == ["sleep kv+weights", "sleep m"] and memory.present == set()
    moved = owned.drain_transitions()[-3:]
    assert [(t.tag, t.awake) for t in moved] == [("kv", False), ("weights", False), ("m", False)]
    assert moved[0].seconds > 0 and moved[1].seconds == 0


def test_those_that_stay_are_not_put_to_sleep_with_their_owners_others(owned: Leases, memory: Memory) -> None:
    with owned.lease({"kv", "weights"}):
        pass
    with owned.lease({"weights"}):
        assert memory.present == {"weights"}
    with owned.lease({"m"}):
        assert memory.present == {"m"}
    assert [word for word in memory.log if word.startswith("sleep")] == ["sleep kv", "sleep weights"]


def test_free_memory_is_given_back_once_between_the_last_sleep_and_the_first_wake(
    owned: Leases, memory: Memory
) -> None:
    with owned.lease({"kv", "weights"}):
        assert memory.log == ["give back", "wake weights", "wake kv"]
    with owned.lease({"m"}):
        assert memory.log[3:] == ["sleep kv+weights", "give back", "wake m"]
    with owned.lease({"m", "actor"}):
        pass
    with owned.lease(()):
        assert memory.log[6:] == ["sleep m"]  # nothing wakes, so it is not needed


def test_after_a_failure_between_sleep_and_wake_every_lease_refuses(memory: Memory) -> None:
    def fail() -> None:
        raise RuntimeError("a kernel failed")

    leases = Leases([memory.resident("kv", 1)], give_back=fail)
    with pytest.raises(RuntimeError, match="a kernel failed"), leases.lease({"kv"}):
        pass
    cause = "giving free memory back: RuntimeError: a kernel failed"
    with pytest.raises(MemoryStateError, match=cause), leases.lease(()):
        pass
    assert leases.awake == frozenset()


# ------------------------------------------------------------------------------------------------------------ ranks


class Told:
    """A gather: what this rank says is kept, and the other ranks' part is given by the test."""

    def __init__(self, *others: Callable[[Any], Any]) -> None:
        self.others = others
        self.mine: list[Any] = []

    def __call__(self, mine: Any) -> list[Any]:
        self.mine.append(mine)
        return [mine, *(other(mine) for other in self.others)]


def same(mine: Any) -> Any:
    return mine


def test_every_outermost_lease_asks_before_anything_moves_and_after_each_move(memory: Memory) -> None:
    told = Told(lambda mine: memory.log.append("asked") or mine)
    leases = Leases([memory.resident("kv", 1)], told)
    for _ in range(2):
        with leases.lease({"kv"}), leases.lease({"kv"}):
            pass
    assert memory.log == ["asked", "wake kv", "asked", "asked"]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"awake": ["kv"]}, r"differ in what is awake: ranks 0, 1, 3: \[\]; rank 2: \['kv'\]"),
        ({"wanted": []}, r"differ in what is wanted: ranks 0, 1, 3: \['kv'\]; rank 2: \[\]"),
        ({"registered": ["kv", "ref"]}, r"in what is registered: ranks 0, 1, 3: \['kv'\]; rank 2: \['kv', 'ref'\]"),
        (Failure("no memory", is_final=False), "on any rank: rank 2: no memory"),
    ],
)
def test_one_rank_that_differs_stops_all(memory: Memory, theirs: dict[str, Any] | Failure, message: str) -> None:
    told = Told(same, lambda mine: (theirs, mine[1]) if isinstance(theirs, Failure) else (None, mine[1] | theirs), same)
    leases = Leases([memory.resident("kv", 1)], told)
    with pytest.raises(MemoryStateError, match=message), leases.lease({"kv"}):
        raise AssertionError("the block must not run")
    assert memory.log == []
    told.others = (same, same, same)
    with leases.lease({"kv"}):
        assert memory.log == ["wake kv"]


def test_many_ranks_are_told_shortly(memory: Memory) -> None:
    told = Told(*[same] * 6, lambda mine: (None, mine[1] | {"wanted": ["kv"]}))
    leases = Leases([memory.resident("kv", 1)], told)
    with pytest.raises(MemoryStateError, match=r"ranks 0, 1, 2, 3 and 3 more: \[\]; rank 7"), leases.lease(()):
        pass


def test_a_rank_that_cannot_take_part_says_so_to_the_others(memory: Memory) -> None:
    told = Told(same)
    leases = Leases([memory.resident("kv", 1)], told)
    with pytest.raises(MemoryStateError, match="ranks 0, 1: residents"), leases.lease({"critic"}):
        pass
    memory.fails["wake kv"] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"), leases.lease({"kv"}):
        pass
    with pytest.raises(MemoryStateError, match="ranks 0, 1: memory is in an unknown state"), leases.lease({"kv"}):
        pass
    assert [bool(problem) for problem, _ in told.mine] == [True, False, True, True]


def test_a_gather_that_fails_has_moved_nothing(memory: Memory) -> None:
    def fail(_: Any) -> Any:
        raise ConnectionError("rank 1 is gone")

    told = Told(fail)
    leases = Leases([memory.resident("kv", 1)], told)
    with pytest.raises(ConnectionError), leases.lease({"kv"}):
        pass
    assert memory.log == [] and leases.awake == frozenset()


# ----------------------------------------------------------------------------------------------------- declarations


def test_unknown_tag_moves_nothing(leases: Leases, memory: Memory) -> None:
    with pytest.raises(MemoryStateError, match=r"\['critic'\] do not exist; the registered ones are .*'optimizer'"):
        leases.lease({"kv", "critic"}).__enter__()
    assert memory.log == []


def test_a_tag_names_one_resident(leases: Leases) -> None:
    with pytest.raises(MemoryStateError, match="'actor' is already registered"):
        leases.add(Resident("actor", lambda: 0))


@pytest.mark.parametrize("given", ["sleep", "wake"])
def test_what_sleeps_also_wakes(given: str) -> None:
    with pytest.raises(ValueError, match="'kv' needs sleep and wake, or neither"):
        Resident("kv", lambda: 0, **{name: lambda *_: None for name in given.split()})
