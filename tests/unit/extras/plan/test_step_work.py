"""The work of a step, read from configs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hybrid_rl.extras.plan.request import Machine, planned_config
from hybrid_rl.extras.plan.step_time import Lengths, ModelWork, StepWork
from hybrid_rl.extras.plan.step_work import moved_bytes, num_trips, step_work
from hybrid_rl.memory.cycle import ACTOR, CRITIC, ENGINE_WEIGHTS, OPTIMIZER, Cycle
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from tests.unit.planning.made import CYCLE, GB, memory

MODEL = Path(__file__).parents[4] / "docs" / "plans" / "models" / "qwen2.5-0.5b"
PARAMETERS = 494_032_768


@pytest.fixture(scope="module")
def skeleton() -> PreTrainedModel:
    return build_on_meta(ModelRecipe.of_folder(str(MODEL)), DTYPES["bfloat16"])


def work_of(skeleton: PreTrainedModel, *keys: str, **changes: Any) -> StepWork:
    config = planned_config([f"model.path={MODEL}", "num_ranks=4", "prompts_per_step=6", *keys], Machine(4, "80GB"))
    plan = memory()
    plan = replace(plan, choices=replace(plan.choices, **changes))
    return step_work(
        config,
        skeleton,
        CYCLE,
        plan,
        prompt_tokens=100,
        handoff_bytes={"host": 7},
        kv_bytes_per_token=1000,
        others={CRITIC: skeleton},
    )


def test_every_resident_leaves_once_a_step() -> None:
    """The optimizer after the update; the actor after the handoff, to come back for scoring. The engine, too."""
    assert [num_trips(CYCLE, tag) for tag in (ACTOR, OPTIMIZER, ENGINE_WEIGHTS)] == [1, 1, 1]
    shared = Cycle.of(
        residents=frozenset({ACTOR, OPTIMIZER, ENGINE_WEIGHTS}),
        engine_is_actor=True,
        update_reads_reference=False,
        moves_reference=False,
    )
    assert num_trips(shared, ACTOR) == 0  # it is the engine
    assert moved_bytes(CYCLE, memory()) == 2 * 8 * GB


def test_the_policy_alone(skeleton: PreTrainedModel) -> None:
    work = work_of(skeleton)
    assert work.lengths == Lengths(6, 8, 100, 512)
    assert work.scored == {} and work.trained == {"policy": (ModelWork.of(skeleton), PARAMETERS // 4)}
    assert (work.passes, work.forward_passes, work.optimizer_steps) == (1, 1, 1)
    assert (work.moved_bytes, work.handoff_bytes, work.host_optimizers) == (16 * GB, {"host": 7}, frozenset())
    generation = work.generation
    assert generation is not None
    assert (generation.ranks_per_engine, generation.max_num_seqs, generation.kv_bytes) == (1, 256, 1000)
    # 25.5 GB of cache, 1000 bytes a token; weights of two bytes.
    assert (generation.kv_cache_tokens, generation.element_bytes, generation.extra_samples) == (25_500_000, 2, 0)


def test_what_configs_add(skeleton: PreTrainedModel) -> None:
    ppo = work_of(skeleton, "algorithm=ppo", "gradient_checkpointing=true", optimizer_on_host=True)
    assert set(ppo.trained) == {"policy", CRITIC} and ppo.trained[CRITIC][0].head == 0
    assert CRITIC in ppo.scored and ppo.forward_passes == 2 and ppo.host_optimizers == {"policy"}
    several = work_of(skeleton, "beta=0.1", "num_iterations=2", "prompts_per_mini_batch=3")
    assert set(several.scored) == {"policy", "reference"}  # old logprobs are recomputed where several updates use them
    assert (several.passes, several.optimizer_steps) == (2, 4)
    tensor_parallel = work_of(skeleton, "rollout.engine=vllm", "tensor_parallel_size=2").generation
    assert tensor_parallel is not None and tensor_parallel.kv_cache_tokens == 51_000_000
    remax = work_of(skeleton, "algorithm=remax").generation
    assert remax is not None and remax.extra_samples == 6
    sft = work_of(skeleton, "algorithm=sft")
    assert sft.generation is None and sft.lengths.num_generations == 1
    shards = work_of(skeleton, "dp_replicate=2").trained["policy"][1]
    assert shards == PARAMETERS // 2
