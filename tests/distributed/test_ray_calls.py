from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid_rl.controller.placement import Node
from hybrid_rl.controller.ray_backend import RayCluster
from tests.distributed import workers
from tests.distributed.conftest import start_group, wait_until
from tests.distributed.workers import Probe
from tests.support.groups import OpenGroup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenGroup]:
    """Two ranks for everything that breaks nothing."""
    group = start_group(cluster, tmp_path_factory.mktemp("logs"), env_vars={"CHOSEN": "yes"})
    yield group
    group.close()


def test_every_rank_knows_its_place_and_has_its_environment(group: OpenGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MARK", "of the driver")
    about = group.about()
    assert [(a["role"], a["rank"], a["num_ranks"], a["device"]) for a in about] == [
        ("policy", rank, 2, "cpu") for rank in (0, 1)
    ]
    assert len({a["pid"] for a in about} | {psutil.Process().pid}) == 3
    threads = max(1, len(psutil.Process().cpu_affinity()) // 2)
    for its in about:
        assert its["env"] == {
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
            "CHOSEN": "yes",
        }
        assert its["threads"] == threads and its["mark"] == "none", "ranks are spawned, not forked"


@pytest.mark.usefixtures("forked_ranks")
def test_a_node_that_came_during_the_wait_for_room(make_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the wait there was only another one."""
    nodes, asked = RayCluster.nodes, []

    def changing(self: RayCluster, **options: Any) -> list[Node]:
        asked.append(options)
        return [Node("gone", "10.0.0.1", {"CPU": 9.0})] if len(asked) == 1 else nodes(self, **options)

    monkeypatch.setattr(RayCluster, "nodes", changing)
    assert make_group(1, make_worker=lambda context: Probe(context)).gather("x") == [[(0, "x")]] and len(asked) > 1


def test_only_loopback_is_listened_on(group: OpenGroup) -> None:
    """Sockets of the driver and of everything that it started."""
    driver = psutil.Process()
    processes = [driver, *driver.children(recursive=True)]
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"} and listening
    assert not any("dashboard.py" in " ".join(process.cmdline()) for process in processes)


def test_ranks_talk_to_each_other(group: OpenGroup) -> None:
    assert group.gather("x") == [[(0, "x"), (1, "x")]] * 2
    assert group.all_reduce() == [3.0, 3.0]
    large = "x" * 1_000_000
    assert [value == large for value in group.shown(large)] == [True, True]


def test_columns_are_added_to_a_batch_that_lies_on_the_ranks(group: OpenGroup) -> None:
    batch, _ = group.rollout([3, 1, 2, 0], 2)
    assert set(batch) == {"group", "trajectory"}, "only [N]-sized columns come to the driver"
    batch = batch.select(batch["trajectory"].argsort())
    scored = group.score(batch, 1.0)
    assert scored["trajectory"].tolist() == [0, 1, 2, 3] and scored["rewards"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert scored.columns == batch.columns | {"rewards", "old_logprobs"}
    assert group.seen_without_objects(scored)[0] == (
        [0, 2],
        ["completion_ids", "group", "old_logprobs", "prompt_ids", "rewards", "trajectory"],
    )
    ids, _, rows = group.seen(scored)[1]
    assert ids == [1, 3] and rows == [{"place": 0}] * 2


def test_blocks_are_freed_with_the_last_reference(group: OpenGroup) -> None:
    gc.collect()
    wait_until(lambda: group.references() == [0, 0], "blocks of earlier calls are left")
    batch, _ = group.rollout(list(range(8)), 1000)
    scored = group.score(batch, 1.0)
    assert min(group.references()) >= 3
    part = scored.select([0])
    del batch, scored
    gc.collect()
    wait_until(lambda: group.references()[1] == 0, "blocks without samples are kept")
    assert group.references()[0] == 3, "two blocks of the rollout, one of the scores"
    del part
    gc.collect()
    wait_until(lambda: group.references() == [0, 0], "blocks are kept without a reference")


@pytest.mark.usefixtures("forked_ranks")
def test_two_roles_side_by_side(make_group: Callable[..., OpenGroup], group: OpenGroup) -> None:
    """Each with processes and collectives of its own, on one cluster; a batch of one is read by the other."""
    critic = make_group(1, role="critic")
    batch, _ = group.rollout([0, 1, 2], 2)
    scored = critic.score(batch, 5.0)
    assert scored["rewards"].tolist() == [0.0] * 3 and scored["trajectory"].tolist() == [0, 2, 1]
    assert {a["role"] for a in critic.about()} == {"critic"} and group.all_reduce() == [3.0, 3.0]
    critic.close()
    assert group.all_reduce() == [3.0, 3.0]


@pytest.mark.usefixtures("forked_ranks")
def test_logs_of_ranks(
    make_group: Callable[..., OpenGroup],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Everything is in the rank's file; warnings also reach the driver, once if ranks say the same."""
    group = make_group(2)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        group.warn("thrice")
    assert [r.message for r in caplog.records] == ["[policy ranks 0, 1] warned thrice"]
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"policy-rank{rank}.log").read_text()
        assert "printed thrice\n" in text
        assert " INFO hybrid_rl.worker: informed thrice\n" in text
        assert " WARNING hybrid_rl.worker: warned thrice\n" in text
    assert "printed" not in "".join(capfd.readouterr())
