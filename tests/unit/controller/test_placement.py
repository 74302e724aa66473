from __future__ import annotations

import random

import pytest

from hybrid_rl.controller.placement import (
    Node,
    Place,
    RayOptions,
    check_addresses,
    check_room,
    rank_environment,
    rank_order,
)
from hybrid_rl.errors import ConfigError

NODES = [Node("a", "10.0.0.9", {"CPU": 8.0, "GPU": 4.0}), Node("b", "10.0.0.10", {"CPU": 3.0, "GPU": 8.0})]


def test_room_is_counted_per_node() -> None:
    check_room(7, {"CPU": 1.0, "GPU": 1.0}, NODES)
    with pytest.raises(ConfigError) as caught:
        check_room(8, {"CPU": 1.0, "GPU": 1.0}, NODES)
    assert str(caught.value) == (
        "8 ranks of 1 CPU, 1 GPU each do not fit into the cluster, which has room for 7 (10.0.0.9: 8 CPU, 4 GPU; "
        "10.0.0.10: 3 CPU, 8 GPU); use num_ranks=auto for a rank per GPU, or device=cpu for ranks on CPU cores"
    )
    with pytest.raises(ConfigError, match=r"room for 2 .*; ask for fewer ranks, less per rank, or add nodes"):
        check_room(3, {"CPU": 4.0}, NODES)
    with pytest.raises(ConfigError, match=r"room for 0 \(no node\)"):
        check_room(1, {"CPU": 1.0}, [])


def test_neighbours_are_near_each_other_in_any_order_of_arrival() -> None:
    """By address as numbers, then GPU, then bundle."""
    expected = [
        Place(5, "n1", "10.0.0.9", "h", 1, 2),
        Place(0, "n1", "10.0.0.9", "h", 2, 10),
        Place(3, "n0", "10.0.0.10", "h", 3),
        Place(4, "n0", "10.0.0.10", "h", 4),
    ]
    for seed in range(10):
        shuffled = list(expected)
        random.Random(seed).shuffle(shuffled)
        assert rank_order(shuffled) == expected


def test_threads_share_the_cores_and_variables_of_the_user_win() -> None:
    assert rank_environment(RayOptions(), 8, 3)["OMP_NUM_THREADS"] == "2"
    assert rank_environment(RayOptions(), 2, 4)["MKL_NUM_THREADS"] == "1"
    assert rank_environment(RayOptions(threads_per_rank=5), 2, 4)["OMP_NUM_THREADS"] == "5"
    env = rank_environment(RayOptions(env_vars={"TOKENIZERS_PARALLELISM": "true", "MINE": "1"}), 1, 1)
    assert env["TOKENIZERS_PARALLELISM"] == "true" and env["MINE"] == "1"


def test_ranks_meet_where_the_cluster_knows_their_nodes() -> None:
    """A single one meets nobody."""
    known, unknown = (Place(0, "n", "10.0.0.9", "box", 7, interface=name) for name in ("eth0", ""))
    check_addresses([known, known])
    check_addresses([unknown])
    with pytest.raises(
        ConfigError, match=r"no network interface of box has 10\.0\.0\.9; start Ray there with --node-ip"
    ):
        check_addresses([known, unknown])
