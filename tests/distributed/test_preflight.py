"""Pre-flight over ranks in processes of their own. (What it finds to differ: tests/unit/workers.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rl.cli import main
from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.workers.preflight import ALL_REDUCE, COPY, PRODUCT, RankProbe, probe_rank
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow


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
