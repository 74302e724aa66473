"""Adapters in the plan, by hand: rank 4 on all linear layers of the tiny model are 2048 parameters in 28 tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_rl.extras.plan.handoff_plan import adapter_handoff
from hybrid_rl.extras.plan.rates import GPUS
from hybrid_rl.extras.plan.step_time import step_time
from hybrid_rl.extras.plan.step_work import step_work
from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS, KV_CACHE, OPTIMIZER, REFERENCE
from hybrid_rl.planning.activations import CannotCount
from hybrid_rl.planning.adapter_memory import slot_numel, slot_rank
from hybrid_rl.planning.ledger import GRADIENTS, HANDOFF, VERSIONS, Budget
from hybrid_rl.training.run_cycle import memory_phases
from hybrid_rl.weights.plain import is_adapted
from tests.unit.planning.made import memory
from tests.unit.planning.tiny_run import settings

# Of a layer, in + out times 4: queries and output 32, keys and values 24, the three of the MLP 48.
OUTPUTS = 2 * 4 * (16 + 8 + 8 + 16 + 32 + 32 + 16)
INPUTS = 2 * 4 * (16 * 6 + 32)
TRAINED, BASE, COUNTERS = INPUTS + OUTPUTS, 5472, 28 * 4


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {ACTOR: (BASE + TRAINED) * 4, OPTIMIZER: TRAINED * 8 + COUNTERS}),
        ({"dtype": "bfloat16"}, {ACTOR: (BASE + TRAINED) * 2, OPTIMIZER: TRAINED * 12 + COUNTERS}),
        (  # 45 rows of the embedding become 46; the base stays in bfloat16, adapters are their own masters
            {"dtype": "bfloat16", "num_ranks": 2},
            {
                ACTOR: (BASE + 16) // 2 * 2 + TRAINED // 2 * 4,
                OPTIMIZER: TRAINED // 2 * 8 + COUNTERS,
                ENGINE_WEIGHTS: (BASE + TRAINED) * 2,
            },
        ),
    ],
)
def test_only_adapters_have_an_optimizer_and_there_is_no_reference(step_of, overrides, expected) -> None:
    assert TRAINED == 2048
    step = step_of(settings(**{"lora.r": 4, "kl": "loss", "beta": 0.1}, **overrides))
    found = step.residents(0)
    assert {tag: share.num_bytes for tag, share in found.items() if tag != KV_CACHE} == expected
    assert REFERENCE not in found
    assert "score_reference" in [memory.phase for memory in step.phases(0)]


def test_gradients_are_those_of_the_adapters(step_of) -> None:
    step = step_of(settings(**{"lora.r": 4}))
    last = step.phases(0)[-2]
    assert (last.name, last.bytes_of(GRADIENTS)) == ("update: optimizer step", TRAINED * 4)
    assert not is_adapted(step.passes.shape.models.policy)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, 2 * TRAINED * 4),
        ({"num_ranks": 2}, 2 * TRAINED // 2 * 4),
        ({"engine": "vllm"}, 2 * TRAINED * 4 + BASE * 4),
        ({"engine": "vllm", "peft.modules_to_save": ["norm"]}, 2 * (BASE + TRAINED + 5 * 16) * 4),
    ],
)
def test_versions_for_ranks_that_only_generate_are_of_adapters(step_of, overrides, expected) -> None:
    """Beside vLLM also of the base, once; of all weights if modules are trained whole, here five norms."""
    config = settings(**{"lora.r": 4, "rollout_ranks": 2}, **overrides)
    phases = replace(step_of(config), generates=False).phases(0)
    assert {phase.host_bytes_of(VERSIONS) for phase in phases} == {expected}


@pytest.mark.parametrize(("dtype", "copied"), [("float32", 0), ("bfloat16", TRAINED)])
def test_a_merging_handoff_has_the_factors_in_float32(step_of, dtype: str, copied: int) -> None:
    step = step_of(settings(**{"lora.r": 4}, engine="vllm", dtype=dtype))
    publish = next(memory for memory in step.phases(0) if memory.name == "publish: handoff")
    assert publish.bytes_of(HANDOFF) == (copied + OUTPUTS) * 4


def test_vllms_slot_is_padded_and_cut(step_of) -> None:
    keys = {"lora.r": 4, "engine": "vllm", "rollout.handoff.lora": "adapter"}
    step, without = step_of(settings(**keys)), step_of(settings(**keys | {"rollout.handoff.lora": "merged"}))
    module = step.passes.module("policy", step.config)
    assert (slot_rank(module), slot_numel(module, step.config)) == (8, 2 * TRAINED)
    more = step.residents(0)[ENGINE_WEIGHTS].num_bytes - without.residents(0)[ENGINE_WEIGHTS].num_bytes
    assert more == 2 * TRAINED * 4
    assert not next(memory for memory in step.phases(0) if memory.phase == "publish").bytes_of(HANDOFF)
    halves = step_of(settings(**keys, num_ranks=2, tensor_parallel_size=2))
    # Outputs of queries, keys, values, gate and up are cut, inputs of the others.
    layer = (16 + 8) + 2 * (16 + 4) + (16 // 2 + 16) + 2 * (16 + 16) + (32 // 2 + 16)
    assert slot_numel(halves.passes.module("policy", halves.config), halves.config) == 2 * 8 * layer


def test_a_handoff_of_adapters_moves_nothing_else(step_of) -> None:
    step = step_of(settings(**{"lora.r": 4, "rollout.handoff.lora": "adapter"}, engine="vllm", num_ranks=2))
    plan = adapter_handoff(step.config, step.passes.module("policy", step.config), ranks_per_host=2)
    assert {name: part.read_bytes for name, part in plan.links.items() if part.read_bytes} == {
        "local": TRAINED * 4 // 2,
        "host": TRAINED * 4 // 2,
    }


def test_adapters_are_proposed_where_all_weights_do_not_fit(found_where) -> None:
    def words(fits) -> list[str]:
        return found_where(lambda config, _: fits(config), settings(), Budget(1, None, 1))

    adapters = "lora.r=16 (which trains adapters instead of all weights)"
    assert words(lambda it: it.lora.is_on) == [adapters]
    assert words(lambda it: it.model.gradient_checkpointing or it.lora.is_on)[-1] == adapters
    assert words(lambda it: it.lora.is_on and it.model.gradient_checkpointing) == [
        "model.gradient_checkpointing=true and lora.r=16 (which trains adapters instead of all weights)"
    ]


def test_a_remedy_that_cannot_be_counted_is_left_out(found_where) -> None:
    def fits(config, _) -> bool:
        if config.lora.is_on:
            raise CannotCount("a model whose adapters do not run on meta")
        return config.model.gradient_checkpointing

    assert found_where(fits, settings(), Budget(1, None, 1)) == ["model.gradient_checkpointing=true"]


def test_a_backward_pass_through_frozen_weights_costs_half(step_of) -> None:
    def work(**keys):
        step = step_of(settings(**keys))
        cycle = memory_phases(step.config, has_reward_models=False).cycle
        policy = step.passes.module("policy", step.config)
        told = {"prompt_tokens": 8, "handoff_bytes": {}, "kv_bytes_per_token": 1, "others": {}}
        return step_work(step.config, policy, cycle, memory(), **told)

    full, frozen = work(), work(**{"lora.r": 4})
    assert (full.frozen, frozen.frozen) == (frozenset(), frozenset({"policy"}))
    assert (full.trained["policy"][1], frozen.trained["policy"][1]) == (BASE, TRAINED)
    # Of the same model: three forward passes' worth against two; the optimizer has nothing to do here.
    policy = full.trained["policy"][0]
    both = [
        step_time(replace(one, trained={"policy": (policy, 0)}), GPUS["H100"]).seconds["update"]
        for one in (full, frozen)
    ]
    assert both[0] == pytest.approx(1.5 * both[1])
