"""Pre-flight over ranks in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.cli import main
from hybrid_rl.controller import RankContext, RankMesh, dispatch
from hybrid_rl.controller.placement import RayOptions
from hybrid_rl.errors import HybridRLError
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.groups import RankGroup
from hybrid_rl.workers.preflight import ALL_REDUCE, COPY, PRODUCT, RankProbe, preflight, probe_rank
from tests.distributed.ranks import run_ranks
from tests.distributed.workers import split_whole_groups

pytestmark = pytest.mark.slow


class Odd(WorkerBase):
    """A rank that says other things than it found."""

    def __init__(self, changes: dict[int, dict[str, Any]], context: RankContext) -> None:
        super().__init__(context)
        self._changes = changes.get(context.rank, {})

    @dispatch(collect="all")
    def probe_rank(self) -> RankProbe:
        probe = super().probe_rank()
        versions = probe.versions | self._changes.get("versions", {})
        slower = self._changes.get("slower", 1.0)
        return replace(
            probe, versions=versions, seconds={test: slower * seconds for test, seconds in probe.seconds.items()}
        )


@pytest.fixture
def start(forked_ranks: Any, tmp_path: Path) -> Any:
    from hybrid_rl.controller.ray_backend import RayActors
    from hybrid_rl.controller.remote import RemoteBackend

    made: list[RankGroup] = []

    def make(make_worker: Callable[[RankContext], WorkerBase]) -> RankGroup:
        backend = RemoteBackend(
            "policy",
            make_worker,
            mesh=RankMesh(dp_shard=2),
            splitter=split_whole_groups,
            ranks=RayActors(forked_ranks),
            options=RayOptions(),
            log_folder=tmp_path,
        )
        made.append(RankGroup(backend))
        return made[-1]

    yield make
    for group in made:
        group.close()


def test_healthy_ranks_pass_and_were_measured(start: Any) -> None:
    group = start(WorkerBase)
    preflight(group)
    probes = group.probe_rank()
    assert [probe.rank for probe in probes] == [0, 1]
    assert all(set(probe.seconds) == {PRODUCT, COPY, ALL_REDUCE} for probe in probes)
    assert probes[0].versions == probes[1].versions


def test_what_differs_is_named_with_its_rank(start: Any) -> None:
    group = start(partial(Odd, {1: {"versions": {"torch": "2.0.0"}}}))
    with pytest.raises(HybridRLError) as raised:
        preflight(group)
    (problem,) = str(raised.value).splitlines()[1:]
    assert problem.startswith(" - torch is 2.0.0 on rank 1 (")


def test_a_slow_rank_is_warned_of(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    preflight(start(partial(Odd, {1: {"slower": 1000.0}})))
    slow = [record.getMessage() for record in caplog.records if record.name == "hybrid_rl"]
    for doubt, test in zip(slow, (PRODUCT, COPY, ALL_REDUCE), strict=True):
        assert doubt.startswith("rank 1 (") and f" s for {test}, " in doubt


def probe(rank: int, num_ranks: int) -> RankProbe:
    return probe_rank(RankContext(rank=rank, mesh=RankMesh(dp_shard=num_ranks)))


def test_without_a_controller_too() -> None:
    probes = run_ranks(probe, 2)
    assert [sorted(found.seconds) for found in probes] == [sorted((PRODUCT, COPY, ALL_REDUCE))] * 2


@pytest.mark.usefixtures("forked_ranks")
def test_doctor_starts_and_compares_ranks(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "num_ranks=2", f"output_dir={tmp_path}"]) == 0
    out = capfd.readouterr().out
    assert "an all-reduce" in out and out.endswith("no problems found\n")
    assert [line.split()[0] for line in out.splitlines() if line[:2] in ("0 ", "1 ")] == ["0", "1"]
    assert list(tmp_path.iterdir()) == []
