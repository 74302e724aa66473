"""Ranks on a Ray that is told of GPUs which are not there: which one each is given, and what it sees."""

from __future__ import annotations

import textwrap

import pytest

from tests.distributed.conftest import Start
from tests.distributed.test_ray_clusters import finish

pytestmark = pytest.mark.slow

START = """
import torch
from hybrid_rl.run.prepare import find_hardware
from hybrid_rl.config import load_config
from hybrid_rl.controller.ray_backend import RayActors, RayCluster
from tests.support.inside.ranks import place_ranks, places_of

def places(cluster, num_ranks):
    ranks = RayActors(cluster)
    place_ranks(ranks, "policy", num_ranks, RayOptions(gpus_per_rank=1))
    return ranks, [[place.gpu, place.visible] for place in places_of(ranks)]

"""


@pytest.mark.sweep
def test_ranks_have_gpus_of_their_own_and_see_all(start_fork: Start) -> None:
    """Of a machine that the user restricted to three, one named by its UUID: a second group gets what is left, as
    places among the three. num_ranks=auto of a running cluster counts all of its GPUs."""
    code = """
    os.environ["CUDA_VISIBLE_DEVICES"] = "5,GPU-1c2d5a6b,7"
    torch.cuda.device_count = lambda: 3
    cluster = RayCluster()
    policy, found = places(cluster, 2)
    reference, others = places(cluster, 1)
    tell(policy=found, reference=others, auto=find_hardware(load_config({"num_ranks": "auto"})[0]).num_gpus)
    for group in (policy, reference):
        group.close(0)
    cluster.close()
    """
    seen = "5,GPU-1c2d5a6b,7"
    (told,) = finish(start_fork(START + textwrap.dedent(code)))
    assert told["policy"] + told["reference"] == [[0, seen], [1, seen], [2, seen]]
    assert told["auto"] == 3
