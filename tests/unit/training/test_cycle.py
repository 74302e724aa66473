"""What a configuration holds, when, and what it cannot move."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_rl.config import load_config, resolve
from hybrid_rl.errors import ConfigError
from hybrid_rl.memory.cycle import Cycle, Phase, joined
from hybrid_rl.training.run_cycle import MemoryPhases, memory_phases

VLLM = {"engine": "vllm"}


def phases(*, has_reward_models: bool = False, num_ranks: int = 1, **keys: Any) -> MemoryPhases:
    loaded, given = load_config({"num_generations": 2, "num_ranks": num_ranks, **keys})
    return memory_phases(resolve(loaded, given), has_reward_models=has_reward_models)


def needs(cycle: Cycle) -> dict[str, set[str]]:
    """The phases that a run has, with what they need."""
    return {phase.name: set(phase.tags) for phase in cycle if phase.is_taken}


def test_in_place_on_one_rank_the_actor_is_the_engine() -> None:
    found = phases(beta=0.1)
    assert found.residents == {"actor", "optimizer", "reference", "kv_cache"}
    assert needs(found.cycle) == {
        "publish": {"actor"},
        "check": {"actor", "kv_cache"},
        "generate": {"actor", "kv_cache"},
        "score_reference": {"reference"},
        "update": {"actor", "optimizer"},
        "save": {"actor", "optimizer"},
    }


@pytest.mark.parametrize("keys", [VLLM, {"num_ranks": 2}], ids=["vllm", "gathered"])
def test_an_engine_with_weights_of_its_own_generates_without_the_actor(keys: dict[str, Any]) -> None:
    found = phases(**keys, **{"memory.offload": ["actor"]})
    assert needs(found.cycle)["publish"] == {"actor", "engine_weights"}
    assert needs(found.cycle)["generate"] == needs(found.cycle)["check"] == {"engine_weights", "kv_cache"}


def test_ppo_has_a_phase_for_the_critic() -> None:
    found = needs(phases(algorithm="ppo", num_generations=1, **VLLM).cycle)
    assert found["update_critic"] == {"critic", "critic_optimizer"}
    assert found["update"] == {"actor", "optimizer"} and found["score_critic"] == {"critic"}
    assert found["save"] == {"actor", "optimizer", "critic", "critic_optimizer"}


def test_the_reference_is_there_for_a_loss_that_reads_its_distribution_or_if_it_moves() -> None:
    exact = {"beta": 0.1, "kl_estimator": "exact", "use_bias_correction_kl": False}
    for keys, is_saved in ((exact, False), ({"beta": 0.1, "ref_model_sync_steps": 5}, True)):
        found = needs(phases(**keys).cycle)
        assert "reference" in found["update"] and ("reference" in found["save"]) == is_saved


def test_reward_models_score_without_the_engine_if_they_move_and_beside_it_if_not() -> None:
    """An engine that gave its weights up for models that stay would have to be given them again for more samples."""
    still = phases(has_reward_models=True, **VLLM)
    assert needs(still.cycle)["reward"] == {"reward_models", "engine_weights", "kv_cache"}
    moving = phases(has_reward_models=True, **VLLM, **{"memory.offload": ["reward_models"]})
    assert needs(moving.cycle)["reward"] == {"reward_models"}


def test_the_table_says_who_is_where() -> None:
    found = phases(num_ranks=2, beta=0.1, **{"memory.offload": ["actor", "reference"]})
    assert found.table().splitlines() == [
        "phase            actor   optimizer  reference  engine_weights  kv_cache",
        "publish          needed  stays      host       needed          -",
        "check            host    stays      host       needed          needed",
        "generate         host    stays      host       needed          needed",
        "score_reference  host    stays      needed     -               -",
        "update           needed  needed     host       -               -",
        "save             needed  needed     host       -               -",
        "needed: the phase works with it; stays: not needed, and not moved; host: not needed, in host memory; "
        "-: not needed, released",
    ]
    on_cpu = phases(**VLLM, **{"memory.offload": ["actor"]})  # where vLLM does not sleep
    assert on_cpu.movable == {"actor"}
    assert on_cpu.table().splitlines()[-2].split() == ["save", "needed", "needed", "stays", "stays"]


def test_a_model_that_is_updated_next_scores_last() -> None:
    """It would go to host memory and come back in between."""
    order = [phase.name for phase in phases(beta=0.1, algorithm="ppo").cycle if phase.name.startswith("score_")]
    assert order == ["score_reference", "score_teacher", "score_actor", "score_critic"]


def test_neighbours_that_differ_in_what_never_moves_share_a_lease() -> None:
    parts = [(Phase("a", frozenset({"x"})), 1), (Phase("b", frozenset({"y"})), 2), (Phase("c", frozenset({"z"})), 3)]
    assert joined(parts, {"z"}) == [({"x", "y"}, [1, 2]), ({"z"}, [3])]
    assert joined(parts, {"x", "y", "z"}) == [({"x"}, [1]), ({"y"}, [2]), ({"z"}, [3])]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"memory.offload": ["critic"], **VLLM},
            r"^this run has no critic \(algorithm=ppo, vapo and impala have one\); memory.offload can name actor, "
            "optimizer$",
        ),
        (
            {"memory.offload": ["teacher", "reference"]},
            r"^this run has no reference \(beta=0\); this run has no teacher \(algorithm=distillation has one\); "
            "memory.offload can name optimizer$",
        ),
        (
            {"memory.offload": ["reference"], "beta": 0.1, "num_ranks": 2, "reference_ranks": 1},
            r"no reference \(controller.reference_ranks=1 puts it on ranks of its own\); .* name actor, optimizer$",
        ),
        ({"memory.offload": ["reward_models"]}, r"no reward_models \(all its rewards are functions\)"),
        ({"memory.offload": ["actor"]}, "rollout.engine=inplace on one rank the engine generates from the actor's own"),
        ({"memory.offload": ["actor"], "handoff.adopt_weights": True, **VLLM}, "adopt_weights=true on one rank"),
        ({"memory.offload": ["optimizer", "optimizer"]}, "names something twice"),
        ({"memory.offload": ["kv_cache"]}, "kv_cache"),
        ({"memory.on_host": ["optimizer"]}, "everything is in host memory anyway"),
    ],
)
def test_what_cannot_move_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        phases(**keys)
