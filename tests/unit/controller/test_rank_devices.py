"""Which GPU is a rank's own: numbers, UUIDs, MIG instances, restricted machines; and who computes on it."""

from __future__ import annotations

import os
import subprocess
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.controller import LocalBackend, RankContext, RankMesh, dispatch
from hybrid_rl.controller.placement import RayOptions, rank_environment
from hybrid_rl.controller.ranks import VISIBLE, gpu_place, take_device
from hybrid_rl.controller.server import Call, RankServer, Seat
from hybrid_rl.controller.travel import Driver, pack
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.in_process import CallThread, on_device
from hybrid_rl.rewards.pool import RewardProcess
from tests.support.groups import OpenGroup
from tests.support.inside.ranks import restore_taken_devices, served_worker

UUIDS = "GPU-8932f937,GPU-1c2d5a6b"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Eight GPUs are pretended; what is asked of CUDA, in order."""
    made: list[tuple[str, Any]] = []
    for name in ("set_device", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: made.append((name, device)) or torch.no_grad())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    restore_taken_devices(monkeypatch)
    monkeypatch.delenv(VISIBLE, raising=False)
    return made


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "place"),
    [
        ([], None, None),
        ([], "0,1", None),
        (["5"], None, 5),
        (["5"], "", 5),
        (["5"], "3,5,7", 1),
        (["7"], "3, 5, 7", 2),
        (["GPU-1c2d5a6b"], UUIDS, 1),
        (["MIG-b"], "MIG-a,MIG-b", 1),
        (["0"], "0,-1,1", 0),
    ],
)
def test_the_place_among_what_is_visible(gpu_ids: list[str], visible: str | None, place: int | None) -> None:
    assert gpu_place(gpu_ids, {} if visible is None else {VISIBLE: visible}) == place


@pytest.mark.parametrize(
    ("gpu_ids", "visible"),
    [
        (["0", "1"], "0,1"),
        (["2"], "0,1"),
        (["1"], "0,-1,1"),  # CUDA sees what comes before the first entry that is not valid
        (["1"], "0,,1"),
        (["1"], "GPU-8932f937,none,1"),
        (["0"], "-1"),
    ],
)
def test_a_gpu_that_is_not_one(gpu_ids: list[str], visible: str) -> None:
    with pytest.raises(ConfigError, match=f"given the GPUs {', '.join(gpu_ids)}, and {VISIBLE}='{visible}'"):
        gpu_place(gpu_ids, {VISIBLE: visible})


@pytest.mark.parametrize("name", ["GPU-1c2d5a6b", "MIG-b"])
@pytest.mark.parametrize("environment", [{}, {VISIBLE: ""}])
def test_a_gpu_by_name_has_no_place_where_nothing_is_named(name: str, environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"given GPU {name} by name.*set {VISIBLE} to the names"):
        gpu_place([name], environment)


def test_more_gpus_than_there_are(calls: list[Any]) -> None:
    """A cluster may be told of any number."""
    with pytest.raises(ConfigError, match="was given GPU 8, and PyTorch finds 8 here"):
        take_device(["8"])
    assert calls == []


def test_a_mig_instance_is_all_that_its_rank_sees(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "MIG-a,MIG-b")
    assert take_device(["MIG-b"]) == torch.device("cuda:0")
    assert os.environ[VISIBLE] == "MIG-b" and calls == [("set_device", torch.device("cuda:0"))]


class Worker:
    def __init__(self, context: RankContext) -> None:
        torch.cuda.device("made")  # type: ignore[arg-type]
        self.context = context

    @dispatch()
    def where(self) -> str:
        torch.cuda.device("called")  # type: ignore[arg-type]
        return str(self.context.device)

    def close(self) -> None: ...


def served(gpu_ids: list[str], folder: Path) -> tuple[RankServer, list[Any]]:
    """A rank that has started, and its outcomes so far."""
    server = RankServer(lambda value: value, lambda value: value, lambda value: False, lambda: gpu_ids)
    mesh = RankMesh(dp_shard=1)
    seat = Seat("policy", 0, mesh, ("", 0), folder / "log", timedelta(seconds=9), Driver.here())
    data, handles = pack(Worker, lambda value: False, "make_worker")
    return server, [server.start(1, seat, data, handles)]


def test_a_rank_takes_its_gpu_before_anything_else(calls: list[Any], tmp_path: Path) -> None:
    """And again in every call, which may come in another thread: a thread begins on the first GPU."""
    server, (started,) = served(["5"], tmp_path)
    mine = torch.device("cuda:5")
    assert started.failure is None, started.failure
    first = [name for name, _ in calls].index("device")
    assert calls[:first] == [("set_device", mine)] * first and first >= 1
    calls.clear()
    data, handles = pack(_no_arguments(), lambda value: False, "arguments")
    thread = threading.Thread(target=lambda: started_in.append(server.call(Call(2, "where"), data, handles)))
    started_in: list[Any] = []
    thread.start()
    thread.join()
    assert started_in[0].failure is None, started_in[0].failure
    assert calls == [("set_device", mine), ("device", "called")]


def _no_arguments() -> Any:
    from hybrid_rl.controller.exchange import Arguments

    return Arguments(())


def test_a_rank_without_a_gpu_touches_none(calls: list[Any], tmp_path: Path) -> None:
    """GPUs of the machine or not."""
    server, (started,) = served([], tmp_path)
    assert started.failure is None and calls == [("device", "made")]
    assert served_worker(server).context.device == torch.device("cpu")


def test_rewards_compute_on_the_gpu_of_their_rank(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the rank, and processes that it starts: functions say `cuda` and mean the one that is theirs."""
    monkeypatch.setenv(VISIBLE, UUIDS)
    take_device(["GPU-1c2d5a6b"])
    calls.clear()
    thread = CallThread("reward call", on_device)
    thread.stop()
    thread.thread.join()
    assert calls == [("set_device", torch.device("cuda:1"))]
    seen: list[str] = []

    def popen(*_: Any, env: dict[str, str], **__: Any) -> Any:
        seen.append(env[VISIBLE])
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError):  # noqa: PT011 - raised above
        RewardProcess()
    assert seen == ["GPU-1c2d5a6b"]


def test_the_only_rank_computes_on_its_device_inside_calls(calls: list[Any]) -> None:
    """The process is the user's, and so is its current GPU."""
    group = OpenGroup(Worker, LocalBackend("policy", Worker, torch.device("cuda:3")))
    assert group.where() == "cuda:3"
    group.close()
    mine = ("device", torch.device("cuda:3"))
    assert calls == [mine, ("device", "made"), mine, ("device", "called"), mine]


def test_gpu_ranks_see_all_gpus_and_others_none() -> None:
    with_gpu = rank_environment(RayOptions(gpus_per_rank=1), 8, 1)
    assert with_gpu["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1" and VISIBLE not in with_gpu
    assert rank_environment(RayOptions(), 8, 1)[VISIBLE] == ""
