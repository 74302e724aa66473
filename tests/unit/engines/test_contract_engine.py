"""The contract engine: its numbers by hand, memory that really goes, and each fault caught by the guard against it."""

import math
import threading

import pytest
import torch

from hybrid_rl.engines.base import KV_CACHE, TAGS, WEIGHTS, EngineState, RolloutRequest, SamplingParams
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import ConfigError, EngineStateError, HandoffError, MemoryStateError
from hybrid_rl.memory.leases import Leases, Resident
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.support.engines.contract_engine import ContractEngine, ContractModel, layout_bytes
from tests.support.engines.engine_faults import EFFECTS, Fault, InjectedFault
from tests.support.engines.engine_settings import inplace_settings
from tests.unit.engines.engines import contract, finish, forward_logprobs, request, same_samples

DEADLINE_SECONDS = 60


def probe(rig, version):
    """What a trainer does after a handoff: compare logprobs on a prompt; raises HandoffError."""
    sent = request(-1, 5, 4, temperature=0.0)
    answer = EngineClient(rig.engine).generate([sent], version)[0]
    gap = float((forward_logprobs(rig.module, sent, answer) - torch.tensor(answer.logprobs)).abs().max())
    if not gap <= 1e-3:
        raise HandoffError(f"engine and trainer differ by {gap:.3g}")


# ---------------------------------------------------------------------------------------------------------- by hand


def test_tokens_and_logprobs_by_hand():
    """Three tokens, two dims, decay 1/2, embeddings (1, 0), (0, 1), (1, 1), head rows (1, 0), (0, 2), (-1, 1).

    Prompt 0, 1: keys (1, 0), (0, 1); hidden (0, 1) + (1, 1) / 2 = (.5, 1.5); logits .5, 3, 1: token 1. Then the keys
    add up to (1, 2); hidden (0, 1) + (.5, 1) = (.5, 2); logits .5, 4, 1.5: token 1 again.
    """
    module = ContractModel(3, 2)
    with torch.no_grad():
        module.embedding.copy_(torch.tensor([[1.0, 0], [0, 1], [1, 1]]))
        module.head.copy_(torch.tensor([[1.0, 0], [0, 2], [-1, 1]]))
    engine = ContractEngine(
        inplace_settings(block_size=1, max_num_seqs=1), vocab_size=3, hidden_size=2, max_positions=4
    )
    engine.wake(TAGS)
    report = engine.update_weights(TensorSource.of(module), 1)
    assert (report.num_bytes, report.num_tensors) == (4 * (6 + 6 + 1), 3)
    sample = EngineClient(engine).generate([RolloutRequest(0, (0, 1), SamplingParams(2, temperature=0.0))], 1)[0]
    assert sample.completion_ids == [1, 1]
    expected = [x - math.log(sum(map(math.exp, xs))) for x, xs in ((3, (0.5, 3, 1)), (4, (0.5, 4, 1.5)))]
    assert sample.logprobs == pytest.approx(expected, abs=1e-6)


def test_every_weight_and_every_cached_key_shows_in_the_logprobs():
    rig = contract().ready()
    sent = request(0, 5, 4)
    before = rig.run([sent])[0].logprobs
    for number, name in enumerate(("embedding", "head", "decay"), start=2):
        with torch.no_grad():
            TensorSource.of(rig.module).tensors[name].mul_(1.5)
        rig.publish(number)
        after = rig.run([sent], number)[0].logprobs
        assert after != before
        before = after
    rig.engine.begin_rollout()
    rig.engine.submit([sent], 4)
    rig.engine.step()
    rig.engine.keys[2] += 1  # the key of a prompt token
    assert finish(rig.engine)[0].logprobs[1:] != before[1:]


# ----------------------------------------------------------------------------------------------------------- memory


def occupied(rig):
    return rig.engine.weights_region.occupied_bytes, rig.engine.kv_region.occupied_bytes


@pytest.mark.parametrize("discard", [False, True], ids=["offload", "discard"])
def test_sleep_gives_the_memory_back_and_wake_keeps_addresses(discard):
    rig = contract(discard_weights=discard)
    assert occupied(rig) == (0, 0)
    rig.ready()
    sent = [request(0), request(1, 9)]
    before = rig.run(sent)
    addresses = {name: tensor.data_ptr() for name, tensor in rig.engine.own_weights.items()}
    weight_bytes, kv_bytes = occupied(rig)
    assert weight_bytes >= layout_bytes(TensorSource.of(rig.module).weight_layout()) and kv_bytes > 0
    rig.engine.sleep({KV_CACHE})
    assert occupied(rig) == (weight_bytes, 0)
    rig.engine.sleep({WEIGHTS})
    assert occupied(rig) == (0, 0)
    rig.engine.wake(TAGS)
    assert {name: tensor.data_ptr() for name, tensor in rig.engine.own_weights.items()} == addresses
    if discard:
        assert not any(bool(tensor.any()) for tensor in rig.engine.own_weights.values())
        with pytest.raises(EngineStateError, match="update its weights before generating"):
            rig.engine.submit(sent, 1)
        rig.publish(2)
    same_samples(rig.run(sent, 1 + discard), before)


def test_other_weights_than_the_engines_are_refused():
    rig = contract().ready()
    with pytest.raises(HandoffError, match="the engine's"):
        rig.engine.update_weights(TensorSource.of(ContractModel(97, 32)), 2)
    assert rig.engine.policy_version == 1
    probe(rig, 1)


def leases_of(engine):
    def resident(tag, region, *after):
        return Resident(
            tag,
            lambda: region.num_bytes,
            sleep=lambda tags: engine.sleep(tags),
            wake=lambda: engine.wake({tag}),
            after=after,
        )

    # By name the cache would wake first, which the engine refuses.
    return Leases([resident(KV_CACHE, engine.kv_region, WEIGHTS), resident(WEIGHTS, engine.weights_region)])


def test_under_leases_it_sleeps_whenever_it_is_not_needed():
    rig = contract()
    leases = leases_of(rig.engine)
    sent = [request(0), request(1, 9)]
    samples = []
    for version in (1, 2, 3):
        with leases.lease({WEIGHTS, KV_CACHE}):
            rig.publish(version)
            probe(rig, version)
            samples.append(rig.run(sent, version))
        with leases.lease(()):
            assert occupied(rig) == (0, 0) and rig.engine.state is EngineState.ASLEEP
    for other in samples[1:]:
        same_samples(other, samples[0])
    night = [("kv_cache", False), ("weights", False)]
    morning = [("weights", True), ("kv_cache", True)]
    assert [(moved.tag, moved.awake) for moved in leases.drain_transitions()] == (morning + night) * 3


# ----------------------------------------------------------------------------------------------------------- faults


def test_an_effect_that_a_call_cannot_have_is_refused():
    for call, effect, number in (("step", "ignore", 1), ("sleep", "skip_byte", 1), ("abort", "raise", 1)):
        with pytest.raises(ConfigError, match="cannot be injected; there are sleep: drop_buffers, hang, raise;"):
            Fault(call, effect, number)
    with pytest.raises(ConfigError, match="calls count from 1"):
        Fault("step", "raise", 0)


def test_only_the_named_call_goes_wrong():
    rig = contract(faults=[Fault("step", "raise", 3), Fault("step", "raise", 5)]).ready()
    rig.engine.submit([request(0)], 1)
    failed = []
    for number in range(1, 7):
        try:
            rig.engine.step()
        except InjectedFault as error:
            failed.append((number, str(error)))
    assert failed == [(number, f"step number {number} was asked to fail") for number in (3, 5)]


def test_a_step_that_fails_loses_no_request_and_changes_no_sample():
    sent = [request(i, 4 + i, 6, group=i // 2) for i in range(4)]
    undisturbed = contract().ready().run(sent)
    rig = contract(faults=[Fault("step", "raise", 3)]).ready()
    rig.engine.submit(sent, 1)
    rig.engine.step(), rig.engine.step()
    rig.engine.abort([3])
    with pytest.raises(InjectedFault):
        rig.engine.step()
    assert rig.engine.num_unfinished == 4
    samples = finish(rig.engine)
    same_samples(samples[:3], undisturbed[:3])
    assert (samples[3].finish_reason, samples[3].completion_ids) == ("abort", undisturbed[3].completion_ids[:2])


@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_a_sleep_or_wake_that_fails_is_caught_by_the_leases(call):
    rig = contract(faults=[Fault(call, "raise", 1)])
    leases = leases_of(rig.engine)
    with pytest.raises(InjectedFault):
        for tags in (TAGS, ()):
            with leases.lease(tags):
                pass
    first = {"sleep": KV_CACHE, "wake": WEIGHTS}[call]
    for tags in (TAGS, ()):
        with pytest.raises(MemoryStateError, match=f"{call} of '{first}': InjectedFault"), leases.lease(tags):
            pass


def test_an_update_that_fails_half_way_leaves_no_version_to_generate_with():
    rig = contract(faults=[Fault("update_weights", "raise", 2)]).ready()
    before = {name: tensor.clone() for name, tensor in rig.engine.own_weights.items()}
    rig.perturb()
    rig.module.decay.mul_(2)
    with pytest.raises(InjectedFault):
        rig.publish(2)
    moved = [name for name, tensor in rig.engine.own_weights.items() if not torch.equal(tensor, before[name])]
    assert 0 < len(moved) < len(before)
    for version in (1, 2):
        with pytest.raises(EngineStateError, match="update its weights"):
            rig.engine.submit([request(0)], version)
    rig.publish(2)
    probe(rig, 2)


def test_an_unwritten_byte_is_caught_by_the_count():
    rig = contract(faults=[Fault("update_weights", "skip_byte", 2)]).ready()
    rig.perturb()
    num_bytes = layout_bytes(TensorSource.of(rig.module).weight_layout())
    with pytest.raises(HandoffError, match=f"{num_bytes - 1} of {num_bytes} bytes of policy version 2"):
        rig.publish(2)
    with pytest.raises(EngineStateError, match="update its weights"):
        rig.engine.submit([request(0)], 2)
    rig.publish(3)
    probe(rig, 3)


def test_an_update_that_was_ignored_is_caught_by_the_version():
    rig = contract(faults=[Fault("update_weights", "ignore", 2)]).ready()
    rig.perturb()
    assert rig.publish(2).version == 2
    with pytest.raises(EngineStateError, match="holds policy version 1 but version 2 was expected"):
        probe(rig, 2)


@pytest.mark.parametrize(
    "fault",
    [Fault("update_weights", "stale_weights", 2), Fault("wake", "stale_weights", 2), Fault("sleep", "drop_buffers")],
    ids=lambda fault: f"{fault.effect} at {fault.call}",
)
def test_what_no_number_shows_is_caught_by_the_probe(fault):
    """Version, bytes and state are as they should be; only what the engine says differs from the trainer."""
    rig = contract(faults=[fault]).ready()
    probe(rig, 1)
    rig.perturb()
    report = rig.publish(2)
    if fault.call != "update_weights":
        probe(rig, 2)
        rig.engine.sleep(TAGS)
        rig.engine.wake(TAGS)
    assert (report.num_bytes, report.version) == (layout_bytes(TensorSource.of(rig.module).weight_layout()), 2)
    assert (rig.engine.policy_version, rig.engine.state) == (2, EngineState.READY)
    with pytest.raises(HandoffError, match="engine and trainer differ by"):
        probe(rig, 2)
    rig.publish(3)
    probe(rig, 3)


@pytest.mark.parametrize("call", EFFECTS)
def test_a_call_that_hangs_does_not_come_back_until_it_is_let_go(call):
    rig = contract(faults=[Fault(call, "hang")])
    calls = {
        "wake": lambda: rig.engine.wake(TAGS),
        "update_weights": lambda: rig.publish(1),
        "step": rig.engine.step,
        "sleep": lambda: rig.engine.sleep(TAGS),
    }
    before = list(calls)[: list(calls).index(call)]
    for name in before:
        calls[name]()
    thread = threading.Thread(target=calls[call], daemon=True)
    thread.start()
    assert rig.engine.faults.hangs.wait(DEADLINE_SECONDS) and thread.is_alive()
    rig.engine.faults.let_go.set()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert rig.engine.state is (EngineState.ASLEEP if call == "sleep" else EngineState.READY)
