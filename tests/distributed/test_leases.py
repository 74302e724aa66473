"""Leases on two real processes, with real tensors, collectives and engines. (What ranks agree on, refuse and undo:
tests/unit/memory.)"""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest
import torch

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.arena import HostArena
from hybrid_rl.memory.leases import Leases, Resident
from hybrid_rl.memory.offload import OffloadedTensors
from hybrid_rl.memory.region import Region
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import gather

pytestmark = pytest.mark.slow


class Rank:
    """One rank's residents: what they did is written down. Every wake is a collective, and may fail."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log: list[str] = []

    def resident(self, tag: str, *, after: tuple[str, ...] = (), atomic: bool = False, fails: bool = False) -> Resident:
        def wake() -> None:
            told = f"{tag} of {gather(tag)}"
            if fails:
                raise RuntimeError("out of memory")
            self.log.append(f"wake {told}")

        def sleep(_: frozenset[str]) -> None:
            self.log.append(f"sleep {tag}")

        return Resident(tag, lambda: 10, sleep, wake, after, atomic=atomic, collective=True)

    def attempt(self, leases: Leases, *tags: str) -> str:
        """Take a lease: "held", or the error's text."""
        try:
            with leases.lease(tags):
                return "held"
        except (MemoryStateError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def failed_collective(mine: Rank) -> Any:
    """Rank 1 fails at the end of a collective and cannot wait for rank 0, which waits for it until it speaks again."""
    leases = Leases([mine.resident("engine", atomic=True, fails=mine.rank == 1)], gather)
    return [mine.attempt(leases, "engine") for _ in range(2 + mine.rank)], sorted(leases.awake)


def offloaded(mine: Rank) -> Any:
    """Real tensors, one of them in memory that the other rank maps; rank 1 has no host memory for the second."""
    region = Region("actor", capacity_bytes=2 * mmap.PAGESIZE)
    shared = region.allocate((mmap.PAGESIZE // 4,), torch.float32).fill_(mine.rank + 0.5)
    critic = torch.arange(3 * mmap.PAGESIZE, dtype=torch.uint8)
    pids, fds = zip(*gather((os.getpid(), region.fd)), strict=True)
    peer = os.open(f"/proc/{pids[1 - mine.rank]}/fd/{fds[1 - mine.rank]}", os.O_RDWR)
    mapped = torch.frombuffer(mmap.mmap(peer, mmap.PAGESIZE), dtype=torch.float32)
    os.close(peer)
    arena = HostArena("cpu", limit_bytes=3 * mmap.PAGESIZE if mine.rank else None)
    moving = [
        OffloadedTensors("actor", lambda: [shared], arena, [region]),
        OffloadedTensors("critic", lambda: [critic], arena),
    ]
    leases = Leases([tensors.resident() for tensors in moving], gather)
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
        gather(None)  # before the other one maps pages again
    expected = torch.arange(3 * mmap.PAGESIZE, dtype=torch.uint8)
    same = bool((shared == mine.rank + 0.5).all()) and bool((mapped == 1.5 - mine.rank).all())
    gather(None)
    return said, same and torch.equal(critic, expected)


def one_order(mine: Rank) -> Any:
    """Every wake is a collective: ranks that walked in another order would meet in different ones, or wait for ever."""
    residents = [
        mine.resident("cache", after=("weights",)),
        mine.resident("adapter"),
        mine.resident("weights"),
    ]
    leases = Leases(residents if mine.rank == 0 else residents[::-1], gather)
    return [mine.attempt(leases, "cache", "weights", "adapter"), mine.attempt(leases)], mine.log


SCENARIOS = (failed_collective, offloaded, one_order)


def run_all(rank: int, num_ranks: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(Rank(rank)) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, deadline_seconds=60.0)


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
    assert ranks[0]["one_order"] == ranks[1]["one_order"]
    said, log = ranks[0]["one_order"]
    assert said == ["held", "held"]
    assert log == [
        "wake adapter of ['adapter', 'adapter']",
        "wake weights of ['weights', 'weights']",
        "wake cache of ['cache', 'cache']",
        "sleep cache",
        "sleep weights",
        "sleep adapter",
    ]
