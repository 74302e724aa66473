"""Leases on two real processes: agreed before anything moves, refused on all ranks, and no rank hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from hybrid_rl.engines.base import KV_CACHE, WEIGHTS, EngineState
from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.leases import Leases, Resident
from tests.distributed.ranks import run_ranks
from tests.engine_faults import Fault
from tests.sleeping_region import SleepingRegion
from tests.unit.engines.engines import contract

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
        self, tag: str, *, after: tuple[str, ...] = (), collective: bool = False, fails: bool = False
    ) -> Resident:
        def wake() -> None:
            if fails:
                raise RuntimeError("out of memory")
            told = f"{tag} of {self.all_of(tag)}" if collective else tag
            self.log.append(f"wake {told}")

        return Resident(tag, lambda: 10, lambda tags: self.log.append(f"sleep {tag}"), wake, after)

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


def one_order(mine: Rank) -> Any:
    """Every wake is a collective: ranks that walked in another order would meet in different ones, or wait for ever."""
    residents = [
        mine.resident("cache", after=("weights",), collective=True),
        mine.resident("adapter", collective=True),
        mine.resident("weights", collective=True),
    ]
    leases = Leases(residents if mine.rank == 0 else residents[::-1], mine.gather)
    return [mine.attempt(leases, "cache", "weights", "adapter"), mine.attempt(leases)], mine.log


def engines(mine: Rank) -> Any:
    """Engines that really sleep: what each rank's memory holds after every lease. Rank 1's second wake fails."""
    rig = contract(faults=[Fault("wake", "raise", 3)] if mine.rank == 1 else ())
    engine = rig.engine

    def resident(tag: str, region: SleepingRegion, *after: str) -> Resident:
        return Resident(
            tag,
            lambda: region.num_bytes,
            lambda tags: engine.sleep(tags),
            lambda: engine.wake({tag}),
            after,
        )

    residents = [resident(KV_CACHE, engine.kv_region, WEIGHTS), resident(WEIGHTS, engine.weights_region)]
    leases = Leases(residents, mine.gather)
    said = []
    for version, tags in enumerate(((WEIGHTS, KV_CACHE), (), (WEIGHTS, KV_CACHE), ())):
        said.append(mine.attempt(leases, *tags))
        if engine.state is EngineState.READY and tags:
            rig.publish(version)
        occupied = engine.weights_region.occupied_bytes + engine.kv_region.occupied_bytes
        said.append((sorted(leases.awake), engine.state.value, occupied > 0))
    return said


SCENARIOS = (engines, agreement, other_wishes, unknown_tag, other_residents, broken_rank, one_order)


def run_all(rank: int, num_ranks: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(Rank(rank, num_ranks)) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, deadline_seconds=60.0)


def both(ranks: list[dict[str, Any]], name: str) -> Any:
    """Return what both ranks report, if it is the same."""
    assert ranks[0][name] == ranks[1][name]
    return ranks[0][name]


def test_one_gather_per_outermost_lease(ranks) -> None:
    said, log, num_gathers = both(ranks, "agreement")
    assert said == ["held"] * 3 and num_gathers == 4
    assert log == ["wake kv", "sleep kv", "wake optimizer", "sleep optimizer", "wake kv"]


def test_other_wishes_are_refused_on_both_and_nothing_moves(ranks) -> None:
    said, log = both(ranks, "other_wishes")
    assert said[0] == said[2] == "held" and log == ["wake kv", "sleep kv", "wake optimizer"]
    assert said[1] == (
        "MemoryStateError: nothing was moved in memory on any rank, because the ranks differ in what is wanted: "
        "rank 0: ['kv']; rank 1: ['optimizer']; every rank must make the same calls"
    )


def test_a_tag_that_one_rank_does_not_know_is_refused_on_both(ranks) -> None:
    said, log = both(ranks, "unknown_tag")
    assert "on any rank: rank 1: residents ['critic'] do not exist; the registered ones are ['kv']" in said[0]
    assert said[1] == "held" and log == ["wake kv"]


def test_other_residents_are_refused_on_both(ranks) -> None:
    said, log = both(ranks, "other_residents")
    assert "differ in what is registered: rank 0: ['kv']; rank 1: ['critic', 'kv']" in said and log == []


def test_a_rank_that_failed_speaks_at_once_and_then_stops_all(ranks) -> None:
    (well, well_log, well_awake), (sick, sick_log, sick_awake) = (rank["broken_rank"] for rank in ranks)
    assert well[:2] == ["held", "held"] and sick[:2] == ["held", "RuntimeError: out of memory"]
    # Both refuse from now on, the healthy one too, and both name the cause.
    for later in (well[2:], sick[2:]):
        assert len(later) == 2 and all(
            "nothing was moved in memory on any rank: rank 1: memory is in an unknown state since this "
            "failure: wake of 'kv': RuntimeError: out of memory" in text
            for text in later
        )
    assert well_log == ["wake engine", "sleep engine", "wake kv"] and well_awake == ["kv"]
    assert sick_log == ["wake engine", "sleep engine"] and sick_awake == []


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


def test_engines_of_all_ranks_sleep_and_wake_together_or_not_at_all(ranks) -> None:
    well, sick = (rank["engines"] for rank in ranks)
    night, day = ([], "asleep", False), (["kv_cache", "weights"], "ready", True)
    assert well[:4] == sick[:4] == ["held", day, "held", night]
    assert well[4:6] == ["held", day] and sick[4:6] == ["InjectedFault: wake number 3 was asked to fail", night]
    refusal = "MemoryStateError: nothing was moved in memory on any rank: rank 1: memory is in an unknown"
    assert well[6].startswith(refusal) and sick[6].startswith(refusal)
    assert (well[7], sick[7]) == (day, night)
