"""vLLM's own numbering of GPUs, in the environment that a rank has: it counts the ranks of a replica as GPUs."""

from __future__ import annotations

import os

import pytest
import torch
from vllm.distributed.device_communicators import custom_all_reduce
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform

from hybrid_rl.controller.placement import RayOptions, rank_environment
from hybrid_rl.controller.ranks import VISIBLE, gpu_place
from hybrid_rl.errors import ConfigError
from hybrid_rl.vllm.build_engine import check_platform
from tests.support.libraries.ray_names import show_gpus
from tests.support.libraries.vllm_names import can_reach

NUM_GPUS = 8
SEVEN = "GPU-7"


class Cuda(Platform):
    """The part of vLLM's CUDA platform that numbers GPUs, without a driver: of UUIDs it knows one."""

    device_control_env_var = VISIBLE

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        return 7 if device_id == SEVEN else int(device_id)


def enter_rank(monkeypatch: pytest.MonkeyPatch, gpu_id: str, visible: str | None) -> int:
    """Make this process look like a rank that Ray gave this GPU, where the program that started Ray sees `visible`; the
    number of its device."""
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    for name, value in rank_environment(RayOptions(gpus_per_rank=1), 8, 1).items():
        monkeypatch.setenv(name, value)
    # What Ray does at the start of an actor.
    show_gpus([gpu_id])
    place = gpu_place([gpu_id], os.environ)
    assert place is not None
    return place


@pytest.mark.parametrize("visible", [None, "0,1,2,3,4,5,6,7", f"2,5,6,{SEVEN}"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_a_replica_are_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, size: int) -> None:
    """LOCAL_RANK is the number of the rank's device, and means that device to vLLM; custom all-reduce asks whether the
    GPUs reach each other, by the places of the ranks in the replica, which must all be visible ones."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(custom_all_reduce, "current_platform", Cuda)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: asked.append((one, other)) or True)
    ids = visible.split(",") if visible else [str(number) for number in range(NUM_GPUS)]
    for number, gpu_id in enumerate(ids):
        device = enter_rank(monkeypatch, gpu_id, visible)
        assert Cuda.logical_device_id_to_visible_device_id(device) == device == number
        assert Cuda.visible_device_id_to_physical_device_id(device) == (7 if gpu_id == SEVEN else int(gpu_id))
        assert can_reach(number % size, size)
    assert len(asked) == len(ids) and all(one != other for one, other in asked)
    assert all(0 <= number < len(ids) for pair in asked for number in pair)


def test_a_rank_that_sees_its_own_gpu_only_cannot_share_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why all GPUs are visible: this is what Ray does by itself."""
    monkeypatch.setattr(custom_all_reduce, "current_platform", Cuda)
    monkeypatch.setenv(VISIBLE, "3")
    with pytest.raises(IndexError):
        can_reach(1, 2)


def test_a_vllm_for_another_kind_of_device() -> None:
    """It would generate on a GPU beside a trainer on the CPU, or the other way round."""
    ours, other = current_platform.device_type, "cuda" if current_platform.device_type == "cpu" else "cpu"
    check_platform(torch.device(ours))
    with pytest.raises(ConfigError, match=f"this vLLM computes on {ours}, and the model is on {other}"):
        check_platform(torch.device(other))
