from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from hybrid_rl.checkpoint.owners import Owner
from hybrid_rl.config.schema import InPlaceRolloutConfig, RolloutConfig, VLLMRolloutConfig
from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.errors import ConfigError
from hybrid_rl.workers.replicas import check_replicas

HERE = ((Owner.here().kernel, os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else -1), "box")
CONTAINER = ((HERE[0][0], -7), "other")  # of this machine, with a /dev/shm of its own
OTHER = (("another kernel", HERE[0][1]), "other")
TWO, FOUR = (VLLMRolloutConfig(tensor_parallel_size=size) for size in (2, 4))


def context(places: list[Any], device: str = "cpu") -> RankContext:
    return RankContext(
        mesh=RankMesh(dp_shard=len(places)), device=torch.device(device), gather=lambda own: [own, *places[1:]]
    )


@pytest.mark.parametrize(
    ("config", "places", "device"),
    [
        (TWO, [HERE, HERE, OTHER, OTHER], "cpu"),  # each replica on a host
        (FOUR, [HERE, HERE, OTHER, OTHER], "cuda"),  # which meet by NCCL
        (VLLMRolloutConfig(), [HERE, OTHER], "cpu"),
        (InPlaceRolloutConfig(), [HERE, OTHER], "cpu"),
    ],
)
def test_replicas_that_can_meet(config: RolloutConfig, places: list[Any], device: str) -> None:
    check_replicas(config, context(places, device))


@pytest.mark.parametrize(
    ("config", "places", "says"),
    [
        (TWO, [HERE, HERE, HERE, OTHER], "tensor_parallel_size=2: ranks 2 to 3 are on box, other, and"),
        (TWO, [HERE, CONTAINER], "ranks 0 to 1 are on"),
        (FOUR, [HERE, HERE, OTHER, OTHER], "nodes with room for 4 ranks each"),
    ],
)
def test_replicas_that_cannot(config: RolloutConfig, places: list[Any], says: str) -> None:
    """Before a model is loaded, and on all ranks: none is left waiting for another."""
    with pytest.raises(ConfigError, match=says):
        check_replicas(config, context(places))
