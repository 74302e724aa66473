"""Plans: phases added up, what is auto decided, what cannot fit refused."""

import dataclasses
from types import SimpleNamespace

import pytest

from hybrid_rl.errors import ConfigError
from hybrid_rl.memory.cycle import ACTOR, KV_CACHE, OPTIMIZER, REFERENCE
from hybrid_rl.planning.auto import least_demanding, plan_memory, with_choices
from hybrid_rl.planning.ledger import ACTIVATIONS, ARENA, ENGINE_GRAPHS, GRADIENTS, VERSIONS, Budget
from hybrid_rl.planning.passes import Passes
from hybrid_rl.planning.remedies import Remedy, check_fits, find_remedies, too_much
from hybrid_rl.planning.size_text import size_text
from tests.unit.planning.made import memory as made_memory
from tests.unit.planning.made import share as made_share
from tests.unit.planning.tiny_run import settings, shape_of

KL = {"kl": "loss", "beta": 0.1}
# 1.3 million parameters: large enough that residents and not the engine's passes decide.
MIDDLE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 500}


def plan(config, device_bytes=None, host_bytes=None, passes=None, **changes):
    passes = passes or Passes(shape_of(config, **changes))
    return plan_memory(passes, config, Budget(device_bytes, host_bytes, 8, "given"))


def test_phases_add_up_what_is_awake():
    found = plan(settings(**KL, offload=["reference", "optimizer"]))
    names = [memory.name for memory in found.phases]
    assert names[:4] == ["publish", "check", "generate", "score_reference"]
    assert {share.resident for share in found.of("publish").device} == {ACTOR, ACTIVATIONS}  # of the probe's half
    assert found.of("score_reference").bytes_of(REFERENCE) == 5472 * 4
    assert found.of("score_reference").bytes_of(OPTIMIZER) == found.of("score_reference").bytes_of(KV_CACHE) == 0
    arena = 5472 * 4 + 5472 * 8 + 26 * 4
    assert {memory.host_bytes_of(ARENA) for memory in found.phases} == {arena}
    stays = plan(settings(**KL, offload=[]))
    assert stays.of("publish").bytes_of(REFERENCE) == 5472 * 4 and stays.host_peak.host_bytes == 0
    assert stays.of("update", "optimizer step").bytes_of(GRADIENTS) == 5472 * 4


def test_graphs_and_buffers_of_the_engine_lie_there_in_every_phase():
    """8 sequences x 100 tokens of the vocabulary x 4 B, and 1 GB of graphs; they stay while the engine sleeps."""
    keys = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 8}

    def standing(**more):
        found = plan(settings(**keys, **more), vocab_size=100)
        sizes = {memory.bytes_of(ENGINE_GRAPHS) for memory in found.phases}
        assert {"update", "score_actor", "save"} & {memory.phase for memory in found.phases} and len(sizes) == 1
        return sizes.pop()

    assert standing(engine="vllm", engine_args={"enforce_eager": True}) == 8 * 100 * 4
    assert standing(engine="vllm") == 8 * 100 * 4 + 10**9
    assert standing(engine="vllm", num_ranks=2, tensor_parallel_size=2) == 8 * 100 * 4 + 10**9 + 256 * 10**6
    assert standing(engine_args={"cuda_graphs": False}) == 0 < standing()
    assert plan(settings(device="cpu")).phases[0].bytes_of(ENGINE_GRAPHS) == 0


def test_gradients_of_masters_are_accumulated_once():
    few = settings(dtype="bfloat16", tokens_per_micro_batch=64)
    backward = plan(few).of("update", "backward")
    assert 5472 * 4 <= backward.bytes_of(GRADIENTS) <= 5472 * 6
    single = plan(settings(dtype="bfloat16")).of("update", "backward")
    assert single.bytes_of(GRADIENTS) <= 5472 * 2
    assert single.bytes_of(ACTIVATIONS) > backward.bytes_of(ACTIVATIONS)


def test_nothing_leaves_where_there_is_room():
    choices = plan(settings(**KL), 10**9).choices
    assert choices.offload == () and choices.reasons.keys() == {"kv_cache_memory_bytes"}
    assert choices.kv_cache_memory_bytes == 8 * 32 * 192
    # Two layers of one key head, 8 dims and as many padded to 16, and two scales.
    assert plan(settings(kv_cache_dtype="int8"), 10**9).choices.kv_cache_memory_bytes == 8 * 32 * 2 * (8 + 16 + 2 * 4)


def test_ranks_that_train_and_ranks_that_only_generate_are_counted_apart():
    """The first have no engine; the others no optimizer, and the cache gets what they alone have left."""
    config = settings(rollout_ranks=1, tokens_per_micro_batch=64)
    both = plan(config, 10**9)
    assert {memory.phase for memory in both.phases} == {"update", "save"}
    assert {share.resident for share in both.of("save").device} == {ACTOR, OPTIMIZER}
    assert both.host_peak.host_bytes_of(VERSIONS) == both.host_peak.host_bytes == 2 * 5472 * 4
    generating = both.generating
    assert [memory.name for memory in generating.phases] == ["publish", "check", "generate"]
    assert generating.of("publish").device_bytes == 5472 * 4  # the trainer's half of the probe is made elsewhere
    assert generating.of("check").bytes_of(KV_CACHE) == both.choices.kv_cache_memory_bytes == 8 * 32 * 192
    budget = generating.of("generate").device_bytes
    less = plan(config, budget)
    assert less.choices.kv_cache_memory_bytes == 8 * 32 * 192 - int(0.05 * budget)
    assert less.generating.choices.offload == ()
    assert less.generating.has_room
    chosen = with_choices(config, less.choices)
    assert chosen.rollout.kv_cache_memory_bytes == less.choices.kv_cache_memory_bytes


def test_cache_that_holds_no_sequence_is_told():
    """The engine would refuse it: 32 tokens x 192 B are 6144."""
    told = "kv_cache_memory_bytes=6143 cannot hold one sequence of 32 tokens, which takes 6,144 B"
    assert plan(settings(kv_cache_memory_bytes=6143)).notes[-1].startswith(told)
    assert "cannot hold" not in plan(settings(kv_cache_memory_bytes=6144)).notes[-1]
    with pytest.raises(ConfigError, match="cannot hold one completion of 24 tokens: a sequence of 32 takes 6,144"):
        plan(settings(kv_cache_memory_bytes=4607))  # 24 of 32 tokens are 4608 bytes


def test_residents_leave_in_order_until_it_fits():
    config = settings(**KL)
    passes = Passes(shape_of(config, **MIDDLE))
    roomy = plan(config, 10**9, passes=passes)
    # The reference is awake alone while it scores, so what must leave is whatever stands beside the update.
    tight = plan(config, roomy.peak.device_bytes - 1, passes=passes)
    assert tight.fits and tight.choices.offload == (OPTIMIZER, REFERENCE)
    assert "memory.offload" in tight.choices.reasons
    chosen = with_choices(config, tight.choices)
    assert chosen.memory.offload == [OPTIMIZER, REFERENCE] and chosen.rollout.kv_cache_memory_bytes
    assert chosen.optimizer == config.optimizer
    given = dataclasses.replace(config, memory=dataclasses.replace(config.memory, offload=[]))
    assert not plan(given, passes.shape and tight.peak.device_bytes - 1, passes=passes).choices.offload


def test_cache_takes_what_generating_leaves():
    config = settings(max_num_seqs=256, tokens_per_micro_batch=64)
    passes = Passes(shape_of(config, **MIDDLE))
    roomy = plan(config, 10**9, passes=passes)
    wanted = roomy.choices.kv_cache_memory_bytes
    budget = roomy.of("generate").device_bytes
    less = plan(config, budget, passes=passes)
    assert less.fits and less.choices.kv_cache_memory_bytes == wanted - int(0.05 * budget)
    reasons = [found.choices.reasons["kv_cache_memory_bytes"] for found in (roomy, less)]
    assert reasons[0].startswith("room for all 256 sequences")
    assert reasons[1].startswith("what others leave in generate, but 5% of the device; all 256 sequences")


def test_every_phase_leaves_a_reserve_where_some_choice_can():
    config = settings(device="cuda", dtype="bfloat16", max_completion_length=1000, num_generations=64)
    passes = Passes(shape_of(config, max_length=1100, **MIDDLE | {"max_position_embeddings": 2048}))
    peak = plan(config, 10**12, passes=passes).peak.device_bytes
    barely = plan(config, int(peak / 0.981), passes=passes)
    assert barely.fits and barely.free_bytes >= 0.02 * barely.budget.device_bytes
    assert barely.choices.tokens_per_micro_batch < 16384
    assert plan(config, int(peak / 0.979), passes=passes).choices.tokens_per_micro_batch == 16384
    # A reserve that no choice can leave refuses nothing. What leaves most is chosen, down to rows of a single sample.
    least = plan(config, 1, passes=passes)
    assert not least.fits and least.choices.tokens_per_micro_batch == 1100 and least.choices.optimizer_on_host
    tight = plan(config, int(least.of("update").device_bytes * 1.01), passes=passes)
    assert tight.fits and tight.choices.tokens_per_micro_batch == 1100


def test_smaller_micro_batches_come_before_the_optimizer_on_the_host():
    config = settings(device="cuda", dtype="bfloat16", max_completion_length=1000, num_generations=64)
    passes = Passes(shape_of(config, max_length=1024, **MIDDLE | {"max_position_embeddings": 1024}))
    roomy = plan(config, 10**12, passes=passes)
    assert roomy.choices.tokens_per_micro_batch == 16384 and not roomy.choices.optimizer_on_host
    some = plan(config, int(0.9 * roomy.peak.device_bytes), passes=passes)
    assert some.fits and 1024 <= some.choices.tokens_per_micro_batch < 16384 and not some.choices.optimizer_on_host
    assert with_choices(config, some.choices).optimizer.tokens_per_micro_batch == some.choices.tokens_per_micro_batch


def test_refusal_shows_the_arithmetic_and_keys_that_were_tried():
    config = settings(max_completion_length=1000, num_generations=16, max_num_seqs=1)
    changes = MIDDLE | {"max_position_embeddings": 1024, "num_hidden_layers": 3}
    passes = Passes(shape_of(config, max_length=1024, **changes))
    smallest = plan(config, 1, passes=passes)
    assert not smallest.fits
    budget = Budget(int(0.8 * smallest.peak.device_bytes), None, 8, "memory.device_memory=x")
    refused = plan_memory(passes, config, budget)
    with pytest.raises(ConfigError) as error:
        check_fits(refused, passes, config)
    text = str(error.value)
    for share in refused.peak.device:
        assert f"  {share.resident}" in text and share.formula in text
    assert "(memory.device_memory=x)" in text and "too much" in text
    found = find_remedies(passes, config, budget)
    assert "model.gradient_checkpointing=true" in text and found
    for remedy in found:
        assert remedy.words in text
        assert plan_memory(passes, remedy.apply(config), budget).fits


def test_hosts_are_counted_with_all_their_ranks():
    config = settings(num_ranks=2, offload=["optimizer"])
    passes = Passes(shape_of(config))
    arena = 2744 * 8 + 26 * 4
    assert plan_memory(passes, config, Budget(None, 2 * arena, 2)).fits
    tight = plan_memory(passes, config, Budget(None, 2 * arena - 1, 2, host="memory.host_memory=y"))
    assert not tight.fits
    assert "a host (2 x the following), which has" in too_much(tight) and "(memory.host_memory=y)" in too_much(tight)


def budget_for(device_bytes, host_bytes=None, ranks=1, gpus_per_host=8):
    return Budget(device_bytes, host_bytes, ranks, "given", "given", gpus_per_host)


@pytest.mark.parametrize(("device_gigabytes", "shown"), [(40.0, 8), (30.0, 32)])
def test_a_refusal_shows_what_asks_least_of_the_memory_that_is_too_small(device_gigabytes, shown):
    """Of the host if only that is too small; else the plan that keeps least on the device, whatever it takes there."""
    much = made_memory(device_gigabytes, 1.0)  # 4 ranks with 8 GB each on the host
    phases = (dataclasses.replace(phase, host=tuple(made_share(ARENA, 2) for _ in phase.host)) for phase in much.phases)
    little = dataclasses.replace(much, phases=tuple(phases))
    attempts = [SimpleNamespace(max_tokens=1, plan=lambda *_, it=it: it) for it in (little, much)]
    found = least_demanding(attempts, None, much.budget)
    assert not found.fits and found.bytes_of_host == shown * 10**9


def test_an_embedded_engine_gives_way_to_vllm_over_several_ranks():
    """Only so do engines share one copy of the weights; what was given for the engine stays."""
    config = settings(num_ranks=2, device="cuda", dtype="bfloat16", max_num_seqs=8, tokens_per_micro_batch=32)
    remedy = Remedy({"rollout.engine": "vllm", "rollout.tensor_parallel_size": 2})
    on_vllm = remedy.apply(config)
    assert on_vllm.rollout.engine == "vllm" and on_vllm.rollout.ranks_per_engine == 2
    assert on_vllm.rollout.max_num_seqs == 8
    assert on_vllm.rollout.max_completion_length == config.rollout.max_completion_length == 24
    assert plan_memory(Passes(shape_of(config, **MIDDLE)), on_vllm, budget_for(10**12, ranks=2)).fits


def test_more_ranks_are_counted_on_hosts_as_full_as_they_get(found_where):
    """Whoever needs 10 GB of a host for all ranks together finds no room on one host, however many of its GPUs."""
    config = settings(num_ranks=2)

    def fits(changed, budget):
        return changed.num_ranks >= 4 and 10 * budget.ranks_per_host <= 4 * changed.num_ranks

    found = found_where(fits, config, budget_for(10**9, ranks=2, gpus_per_host=4))
    assert found == ["num_ranks=16"]  # 2.5 hosts are enough, and hosts are full


def test_smaller_passes_of_the_engine_are_tried_with_all_else(found_where):
    config = settings(num_ranks=2, max_num_seqs=64)

    def fits(changed, _):
        engine = changed.rollout
        return (
            engine.max_num_seqs <= 8
            and engine.engine_args.max_num_batched_tokens <= 2048
            and changed.model.gradient_checkpointing
        )

    alone, *_ = found_where(fits, config, budget_for(10**9, ranks=2))
    assert sorted(alone.split(" and ")) == [
        "model.gradient_checkpointing=true",
        "rollout.engine_args.max_num_batched_tokens=2048",
        "rollout.max_num_seqs=8",
    ]


def test_vllm_is_tried_with_all_else_over_as_many_ranks_as_divide_the_heads(found_where):
    config = settings(device="cuda", dtype="bfloat16")

    def fits(changed, _):
        return changed.rollout.ranks_per_engine == 2 and changed.model.gradient_checkpointing

    found = found_where(fits, config, budget_for(10**9))
    (words,) = found  # heads: 2
    assert words.split(" and ") == [
        "rollout.engine=vllm",
        "rollout.tensor_parallel_size=2",
        "model.gradient_checkpointing=true",
        "num_ranks=2",
    ]


def test_nothing_is_named_if_nothing_helps(found_where):
    assert found_where(lambda *_: False, settings(num_ranks=2), budget_for(10**9, ranks=2)) == []


def test_a_host_that_is_too_small_is_told_how_much_would_do(found_where):
    config = settings(num_ranks=2, offload=["optimizer"])
    budget = budget_for(10**9, 1000, ranks=2, gpus_per_host=2)
    found = found_where(lambda *_: False, config, budget)
    assert found == ["memory.host_memory=1GB (if a host has so much)"]
    more = Remedy({"memory.host_memory": "2GB", "num_ranks": 4}).budget(budget)
    assert (more.host_bytes, more.ranks_per_host) == (2 * 10**9, 2)


def test_what_goes_to_the_host_names_what_it_needs_there(found_where):
    config = settings(num_ranks=2, device="cuda", dtype="bfloat16")
    budget = budget_for(10**12, ranks=2)
    (words,) = found_where(lambda changed, _: changed.memory.keeps_on_host("shards"), config, budget)
    on_host = dataclasses.replace(config, memory=dataclasses.replace(config.memory, on_host=["shards"]))
    needed = plan_memory(Passes(shape_of(config)), on_host, budget).bytes_of_host
    assert words == f"memory.on_host=[shards] (needs {size_text(needed)} per host)"


@pytest.mark.parametrize("part", ["optimizer", "activations"])
def test_on_one_gpu_activations_on_the_host_do_not_keep_the_optimizer_from_it(found_where, part):
    """If the run fits with checkpointing, and what is not named is decided by the plan: by the optimizer alone, or with
    activations."""

    def fits(changed, _):
        memory, checkpoints = changed.memory, changed.model.gradient_checkpointing
        decides = memory.on_host is None or memory.keeps_on_host("optimizer")
        return decides and checkpoints and (part == "optimizer" or memory.keeps_on_host(part))

    (words, *_) = found_where(fits, settings(device="cuda", dtype="bfloat16"), budget_for(10**9))
    expected = {
        "optimizer": "model.gradient_checkpointing=true",
        "activations": "memory.on_host=[optimizer,activations]",
    }
    assert expected[part] in words and (part == "optimizer") == ("on_host" not in words)


def test_more_ranks_keep_no_host_optimizer(found_where):
    config = settings(device="cuda", dtype="bfloat16", on_host=["optimizer", "activations"])
    budget = budget_for(10**9, gpus_per_host=2)
    found = found_where(lambda changed, _: changed.num_ranks > 1, config, budget)
    assert found == ["num_ranks=2 and memory.on_host=[activations]"]
