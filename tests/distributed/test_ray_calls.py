from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hybrid_rl.batch import BatchRef
from hybrid_rl.controller import RankMesh
from hybrid_rl.controller.placement import Node, RayOptions
from hybrid_rl.controller.ray_backend import RayActors, RayCluster
from hybrid_rl.controller.remote import RemoteBackend
from hybrid_rl.errors import ConfigError
from tests.distributed import workers
from tests.distributed.conftest import wait_until
from tests.distributed.workers import Probe, sample_batch, split_whole_groups
from tests.support.groups import OpenGroup
from tests.support.inside.ranks import places_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenGroup]:
    """Two ranks for everything that breaks nothing."""
    backend = RemoteBackend(
        "policy",
        Probe,
        mesh=RankMesh(dp_shard=2),
        splitter=split_whole_groups,
        ranks=RayActors(cluster),
        options=RayOptions(env_vars={"CHOSEN": "yes"}),
        log_folder=tmp_path_factory.mktemp("logs"),
    )
    group = OpenGroup(Probe, backend)
    yield group
    group.close()


def test_every_rank_knows_its_place(group: OpenGroup) -> None:
    about = group.about()
    assert [(a["role"], a["rank"], a["num_ranks"], a["device"]) for a in about] == [
        ("policy", rank, 2, "cpu") for rank in (0, 1)
    ]
    assert len({a["pid"] for a in about} | {psutil.Process().pid}) == 3


def test_environment_and_threads_are_pinned(group: OpenGroup) -> None:
    cores = len(psutil.Process().cpu_affinity())
    for about in group.about():
        env = about["env"]
        assert env["OMP_NUM_THREADS"] == str(max(1, cores // 2)) and about["threads"] == max(1, cores // 2)
        assert env["TOKENIZERS_PARALLELISM"] == "false" and env["CHOSEN"] == "yes"
        assert env["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.usefixtures("forked_ranks")
def test_threads_and_variables_of_the_user_win(make_group: Callable[..., OpenGroup]) -> None:
    about = make_group(1, threads_per_rank=3, env_vars={"TOKENIZERS_PARALLELISM": "true"}).about()[0]
    assert about["env"]["OMP_NUM_THREADS"] == "3" and about["env"]["TOKENIZERS_PARALLELISM"] == "true"


def test_ranks_are_spawned_not_forked(group: OpenGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MARK", "of the driver")
    assert [about["mark"] for about in group.about()] == ["none", "none"]


@pytest.mark.usefixtures("forked_ranks")
def test_a_node_that_came_during_the_wait_for_room(make_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the wait there was only another one."""
    nodes, asked = RayCluster.nodes, []

    def changing(self: RayCluster, **options: Any) -> list[Node]:
        asked.append(options)
        return [Node("gone", "10.0.0.1", {"CPU": 9.0})] if len(asked) == 1 else nodes(self, **options)

    monkeypatch.setattr(RayCluster, "nodes", changing)
    assert make_group(1).gather("x") == [[(0, "x")]] and len(asked) > 1


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


def test_arguments_reach_every_rank(group: OpenGroup) -> None:
    factor = 3
    assert [f(2) for _, f, _ in group.shown(lambda x: x * factor, (1, 2))] == [6, 6]
    assert group.shown("a", (1, 2)) == [(0, "a", (1, 2)), (1, "a", (1, 2))]
    large = "x" * 1_000_000
    assert [value == large for _, value, _ in group.shown(large)] == [True, True]


def test_an_argument_that_cannot_travel_is_named(group: OpenGroup) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"the arguments of shown\(\)\[0\]\['guard'\]: a lock cannot be sent"):
        group.shown({"guard": lock, "other": 1})
    with pytest.raises(ConfigError, match=r"shown\(\)\[0\] \(function <lambda>\) -> lock: a lock cannot be sent"):
        group.shown(lambda: lock)


def test_methods_lease_what_they_need(group: OpenGroup) -> None:
    before = len(group.about()[0]["leased"])
    assert [leased[before:] for leased in group.leasing()] == [[["actor", "kv_cache"]]] * 2


def test_items_are_dealt_out_and_joined(group: OpenGroup) -> None:
    batch, ranks = group.rollout([10, 11, 12, 13, 14], 4)
    assert isinstance(batch, BatchRef) and ranks == [0, 1]
    assert batch["trajectory"].tolist() == [10, 12, 14, 11, 13]
    assert batch.columns == {"prompt_ids", "completion_ids", "group", "trajectory", "row"}
    assert set(batch) == {"group", "trajectory"}, "only [N]-sized columns come to the driver"
    assert batch.load()["completion_ids"].lengths.tolist() == [4] * 5


def test_groups_stay_whole_and_order_comes_back(group: OpenGroup) -> None:
    batch = sample_batch(5, 3)
    scored = group.score(batch, 2.0)
    assert scored["trajectory"].tolist() == list(range(15))
    assert scored["rewards"].tolist() == [0.0] * 3 + [1.0] * 3 + [0.0] * 3 + [1.0] * 3 + [0.0] * 3
    expected = torch.arange(15).repeat_interleave(3) * 2.0
    assert torch.equal(scored.load()["old_logprobs"].values, expected)
    assert scored.load()["row"] == [{"place": i} for i in range(15)]


def test_columns_are_added_to_a_batch_that_lies_on_the_ranks(group: OpenGroup) -> None:
    batch, _ = group.rollout([3, 1, 2, 0], 2)
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


def test_a_rank_may_get_nothing(group: OpenGroup) -> None:
    batch, _ = group.rollout([7], 2)
    scored = group.score(batch, 1.0)
    assert scored["rewards"].tolist() == [0.0]
    assert [ids for ids, *_ in group.seen(scored)] == [[7], []]


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
def test_concat_wants_a_batch(make_group: Callable[..., OpenGroup]) -> None:
    with pytest.raises(TypeError, match=r"not_a_batch\(\) is collected by concat: it must return a batch.*'int'"):
        make_group(1).not_a_batch(sample_batch(2, 1))


@pytest.mark.usefixtures("forked_ranks")
def test_replicas_get_the_same_and_leaders_answer(make_group: Callable[..., OpenGroup]) -> None:
    group = make_group({"dp_shard": 2, "tp": 2})
    batch = sample_batch(3, 2)
    assert [ids for ids, *_ in group.seen(batch)] == [[0, 1, 4, 5]] * 2 + [[2, 3]] * 2
    scored = group.score_replicated(batch)
    assert scored["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert scored.load().num_samples == 6


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_keep_their_order_over_restarts(make_group: Callable[..., OpenGroup], tmp_path: Path) -> None:
    orders = []
    for _ in range(2):
        group = make_group(3)
        orders.append([place.bundle for place in places_of(group)])
        assert [about["rank"] for about in group.about()] == [0, 1, 2]
        group.close()
    assert orders == [[0, 1, 2]] * 2


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
def test_closures_make_workers(make_group: Callable[..., OpenGroup]) -> None:
    started = []

    class Local(Probe):
        def close(self) -> None:
            started.append(self)

    assert make_group(1, make_worker=lambda context: Local(context)).gather("x") == [[(0, "x")]]


@pytest.mark.usefixtures("forked_ranks")
def test_what_makes_workers_must_travel(make_group: Callable[..., OpenGroup]) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"make_worker \(function <lambda>\) -> lock: a lock cannot be sent"):
        make_group(1, make_worker=lambda context: (lock, Probe(context))[1])


def test_no_room_says_what_there_is(make_group: Callable[..., OpenGroup]) -> None:
    has = r"2 ranks of 1 CPU, 1 GPU each do not fit .* room for 0 \(127.0.0.1: 1024 CPU, 0 GPU\)"
    with pytest.raises(ConfigError, match=has):
        make_group(2, gpus_per_rank=1)


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
