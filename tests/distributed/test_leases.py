"""Leases on two real processes: agreed before anything moves, refused on all ranks, and no rank hangs."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.arena import HostArena
from hybrid_rl.memory.leases import Leases, Resident
from hybrid_rl.memory.offload import OffloadedTensors
from hybrid_rl.memory.region import Region
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow


class Rank:
    """One rank's residents: what they did is written down, and a wake may fail, or may be a collective."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.log: list[str] = []
        self.num_gathers = 0

    def gather(self, mine: Any) -> list[Any]:
        self.num_gathers += 1
        return self.all_of(mine)

    def all_of(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(everyone, mine)
        return everyone

    def resident(
        self,
        tag: str,
        *,
        after: tuple[str, ...] = (),
        collective: bool = False,
        atomic: bool = False,
        fails: bool = False,
    ) -> Resident:
        def wake() -> None:
            told = f"{tag} of {self.all_of(tag)}" if collective else tag
            if fails:
                raise RuntimeError("out of memory")
            self.log.append(f"wake {told}")

        def sleep(_: frozenset[str]) -> None:
            self.log.append(f"sleep {tag}")

        return Resident(tag, lambda: 10, sleep, wake, after, atomic=atomic, collective=collective)

    def attempt(self, leases: Leases, *tags: str) -> str:
        """Take a lease: "held", or the error's text."""
        try:
            with leases.lease(tags):
                return "held"
        except (MemoryStateError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def agreement(mine: Rank) -> Any:
    leases = Leases([mine.resident("kv"), mine.resident("optimizer")], mine.gather)
    said = [mine.attempt(leases, "kv"), mine.attempt(leases, "kv"), mine.attempt(leases, "optimizer")]
    with leases.lease(("kv",)), leases.lease(("kv",)):
        pass  # an inner lease asks no other rank
    return said, mine.log, mine.num_gathers


def other_wishes(mine: Rank) -> Any:
    leases = Leases([mine.resident("kv"), mine.resident("optimizer")], mine.gather)
    said = [mine.attempt(leases, "kv"), mine.attempt(leases, ("kv", "optimizer")[mine.rank])]
    return [*said, mine.attempt(leases, "optimizer")], mine.log


def unknown_tag(mine: Rank) -> Any:
    leases = Leases([mine.resident("kv")], mine.gather)
    return [mine.attempt(leases, ("kv", "critic")[mine.rank]), mine.attempt(leases, "kv")], mine.log


def other_residents(mine: Rank) -> Any:
    leases = Leases([mine.resident(tag) for tag in ("kv", "critic")[: 1 + mine.rank]], mine.gather)
    return mine.attempt(leases, "kv"), mine.log


def broken_rank(mine: Rank) -> Any:
    leases = Leases([mine.resident("engine"), mine.resident("kv", fails=mine.rank == 1)], mine.gather)
    said = [mine.attempt(leases, *tags) for tags in (("engine",), ("kv",), ("engine",), ())]
    return said, mine.log, sorted(leases.awake)


def undone(mine: Rank) -> Any:
    """The wake that fails on rank 1 comes between two collectives: both ranks go through the first one back and forth,
    and none enters the second."""
    collectives = [mine.resident(tag, collective=True) for tag in ("early", "late")]
    leases = Leases([*collectives, mine.resident("kv", atomic=True, fails=mine.rank == 1)], mine.gather)
    said = [mine.attempt(leases, *tags) for tags in (("early",), ("kv", "late"), ("early", "late"))]
    return said, mine.log, sorted(leases.awake)


def failed_collective(mine: Rank) -> Any:
    """Rank 1 fails at the end of a collective and cannot wait for rank 0, which waits for it until it speaks again."""
    leases = Leases([mine.resident("engine", collective=True, atomic=True, fails=mine.rank == 1)], mine.gather)
    return [mine.attempt(leases, "engine") for _ in range(2 + mine.rank)], sorted(leases.awake)


def offloaded(mine: Rank) -> Any:
    """Real tensors, one of them in memory that the other rank maps; rank 1 has no host memory for the second."""
    region = Region("actor", capacity_bytes=2 * mmap.PAGESIZE)
    shared = region.allocate((mmap.PAGESIZE // 4,), torch.float32).fill_(mine.rank + 0.5)
    critic = torch.arange(3 * mmap.PAGESIZE, dtype=torch.uint8)
    pids, fds = zip(*mine.all_of((os.getpid(), region.fd)), strict=True)
    peer = os.open(f"/proc/{pids[1 - mine.rank]}/fd/{fds[1 - mine.rank]}", os.O_RDWR)
    mapped = torch.frombuffer(mmap.mmap(peer, mmap.PAGESIZE), dtype=torch.float32)
    os.close(peer)
    arena = HostArena("cpu", limit_bytes=3 * mmap.PAGESIZE if mine.rank else None)
    moving = [
        OffloadedTensors("actor", lambda: [shared], arena, [region]),
        OffloadedTensors("critic", lambda: [critic], arena),
    ]
    leases = Leases([tensors.resident() for tensors in moving], mine.gather)
    said = []
    for tags in (("critic",), ("actor", "critic"), (), ("actor",), ("critic",), ("actor", "critic")):
        said.append(
            (
                mine.attempt(leases, *tags),
                sorted(leases.awake),
                region.occupied_bytes,
                critic.untyped_storage().nbytes(),
            )
        )
        mine.all_of(None)  # before the other one maps pages again
    expected = torch.arange(3 * mmap.PAGESIZE, dtype=torch.uint8)
    same = bool((shared == mine.rank + 0.5).all()) and bool((mapped == 1.5 - mine.rank).all())
    mine.all_of(None)
    return said, same and torch.equal(critic, expected)


def one_order(mine: Rank) -> Any:
    """Every wake is a collective: ranks that walked in another order would meet in different ones, or wait for ever."""
    residents = [
        mine.resident("cache", after=("weights",), collective=True),
        mine.resident("adapter", collective=True),
        mine.resident("weights", collective=True),
    ]
    leases = Leases(residents if mine.rank == 0 else residents[::-1], mine.gather)
    return [mine.attempt(leases, "cache", "weights", "adapter"), mine.attempt(leases)], mine.log


SCENARIOS = (
    agreement,
    other_wishes,
    unknown_tag,
    other_residents,
    broken_rank,
    undone,
    failed_collective,
    offloaded,
    one_order,
)


def run_all(rank: int, num_ranks: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(Rank(rank, num_ranks)) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, deadline_seconds=60.0)


def both(ranks: list[dict[str, Any]], name: str) -> Any:
    """Return what both ranks report, if it is the same."""
    assert ranks[0][name] == ranks[1][name]
    return ranks[0][name]


def test_one_gather_per_outermost_lease_and_per_move(ranks) -> None:
    said, log, num_gathers = both(ranks, "agreement")
    assert said == ["held"] * 3 and num_gathers == 4 + 5
    assert log == ["wake kv", "sleep kv", "wake optimizer", "sleep optimizer", "wake kv"]


def test_other_wishes_are_refused_on_both_and_nothing_moves(ranks) -> None:
    said, log = both(ranks, "other_wishes")
    assert said[0] == said[2] == "held" and log == ["wake kv", "sleep kv", "wake optimizer"]
    assert said[1] == (
        "MemoryRefusedError: nothing was moved in memory on any rank, because the ranks differ in what is wanted: "
        "rank 0: ['kv']; rank 1: ['optimizer']; every rank must make the same calls"
    )


def test_a_tag_that_one_rank_does_not_know_is_refused_on_both(ranks) -> None:
    said, log = both(ranks, "unknown_tag")
    assert "on any rank: rank 1: residents ['critic'] do not exist; the registered ones are ['kv']" in said[0]
    assert said[1] == "held" and log == ["wake kv"]


def test_other_residents_are_refused_on_both(ranks) -> None:
    said, log = both(ranks, "other_residents")
    assert "differ in what is registered: rank 0: ['kv']; rank 1: ['critic', 'kv']" in said and log == []


def test_a_rank_that_failed_stops_all_at_once(ranks) -> None:
    (well, well_log, well_awake), (sick, sick_log, sick_awake) = (rank["broken_rank"] for rank in ranks)
    cause = "memory is in an unknown state since this failure: rank 1: wake of 'kv': RuntimeError: out of memory"
    assert well[:2] == ["held", f"PeerBrokenError: {cause}"]
    assert sick[:2] == ["held", "RuntimeError: out of memory"]
    # Both refuse from now on, the healthy one too, and both name the cause.
    assert (
        well[2:] == sick[2:] == [f"MemoryStateError: nothing was moved in memory on any rank: ranks 0, 1: {cause}"] * 2
    )
    assert well_log == ["wake engine", "sleep engine", "wake kv"] and well_awake == ["kv"]
    assert sick_log == ["wake engine", "sleep engine"] and sick_awake == []


def test_a_move_that_fails_on_one_rank_is_undone_on_both(ranks) -> None:
    (well, well_log, well_awake), (sick, sick_log, sick_awake) = (rank["undone"] for rank in ranks)
    assert (well[0], well[2]) == (sick[0], sick[2]) == ("held", "held")
    cause = (
        "rank 1: wake of 'kv': RuntimeError: out of memory; memory was put back as it was before, and work can go on."
    )
    assert well[1].startswith(f"PeerRefusedError: {cause} In memory were kv 10 B; to make room")
    assert sick[1].startswith(f"MemoryRefusedError: {cause} In memory were nothing else; to make room")
    woken = {tag: f"wake {tag} of {[tag] * 2}" for tag in ("early", "late")}
    back = ["sleep early", woken["early"], woken["late"]]
    assert sick_log == [woken["early"], *back] and well_awake == sick_awake == ["early", "late"]
    assert well_log == [woken["early"], "sleep early", "wake kv", "sleep kv", woken["early"], woken["late"]]


def test_a_collective_that_fails_on_one_rank_breaks_both(ranks) -> None:
    (well, well_awake), (sick, sick_awake) = (rank["failed_collective"] for rank in ranks)
    cause = "memory is in an unknown state since this failure: wake of 'engine': RuntimeError: out of memory"
    assert well[0] == f"PeerBrokenError: memory is in an unknown state since this failure: rank 1: {cause}"
    assert sick[0] == "RuntimeError: out of memory"
    assert all(told.startswith("MemoryStateError: nothing was moved") and cause in told for told in well[1:] + sick[1:])
    assert (well_awake, sick_awake) == (["engine"], [])


def test_tensors_of_all_ranks_sleep_or_none(ranks) -> None:
    (well, well_same), (sick, sick_same) = (rank["offloaded"] for rank in ranks)
    assert well_same and sick_same
    page, both = mmap.PAGESIZE, ["actor", "critic"]
    for said in (well, sick):
        assert said[0] == ("held", ["critic"], 0, 3 * page) and said[1] == ("held", both, page, 3 * page)
        # Rank 1 has no room for the critic, whose sleep comes first; then the actor has not moved either.
        for told, awake, occupied, critic_bytes in (said[2], said[3]):
            assert "rank 1: sleep of 'critic': MemoryStateError: memory.host_memory is too small for critic" in told
            assert (awake, occupied, critic_bytes) == (both, page, 3 * page)
        assert said[4] == ("held", ["critic"], 0, 3 * page) and said[5] == ("held", both, page, 3 * page)
    assert well[2][0].startswith("PeerRefusedError") and sick[2][0].startswith("MemoryRefusedError")


def test_all_ranks_walk_in_one_order(ranks) -> None:
    said, log = both(ranks, "one_order")
    assert said == ["held", "held"]
    assert log == [
        "wake adapter of ['adapter', 'adapter']",
        "wake weights of ['weights', 'weights']",
        "wake cache of ['cache', 'cache']",
        "sleep cache",
        "sleep weights",
        "sleep adapter",
    ]
