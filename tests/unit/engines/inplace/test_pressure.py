"""An engine short of memory, slots or budget: preemption and prompts in chunks change when a token comes, not which."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.engines.base import KV_CACHE, TAGS, RolloutRequest
from hybrid_rl.engines.guards import RolloutEngine
from tests.unit.engines.engines import (
    IN_PLACE,
    TOKEN_BYTES,
    break_off,
    finish,
    forward_logprobs,
    inplace,
    prompt,
    request,
    same_samples,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=IN_PLACE)
def make(request):
    return IN_PLACE[request.param]


def is_empty(engine: RolloutEngine) -> bool:
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_cache_used_share) == (0, 0, 0.0)


def alone(make, requests: list[RolloutRequest]):
    return samples_alone(make, tuple(requests))


@functools.cache
def samples_alone(make, requests: tuple[RolloutRequest, ...]):
    rig = make(max_num_seqs=1, enable_prefix_caching=False, kv_cache_memory_bytes=64 * TOKEN_BYTES).ready()
    return [rig.run([replace(one, group=None)])[0] for one in requests]


# ------------------------------------------------------------------------------------------------------ preemption


@pytest.mark.parametrize(("enable_prefix_caching", "max_num_batched_tokens"), [(True, 5), (False, 8192)])
def test_who_is_pushed_out_comes_back_with_the_same_sample(make, enable_prefix_caching, max_num_batched_tokens):
    requests = [request(i, 5 + 7 * (i % 2), 26, group=i % 2) for i in range(6)]
    rig = make(
        kv_cache_memory_bytes=64 * TOKEN_BYTES,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=max_num_batched_tokens,
    ).ready()
    same_samples(rig.run(requests), alone(make, requests))
    stats = rig.engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_finished, stats.num_generated_tokens) == (6, 6 * 26)
    assert is_empty(rig.engine)


def test_who_was_pushed_out_can_be_aborted_with_what_it_has():
    rig = inplace(kv_cache_memory_bytes=24 * TOKEN_BYTES).ready()
    requests = [request(i, 5, 16) for i in range(2)]
    undisturbed = alone(inplace, requests)
    rig.engine.submit(requests, 1)
    while not rig.engine.stats().num_preemptions:
        assert rig.engine.step() == []
    assert (rig.engine.stats().num_running, rig.engine.stats().num_waiting) == (1, 1)
    rig.engine.abort([1])
    (aborted,) = rig.engine.step()
    assert (aborted.id, aborted.finish_reason) == (1, "abort")
    assert aborted.completion_ids == undisturbed[1].completion_ids[: len(aborted.completion_ids)]
    assert len(aborted.completion_ids) >= 4
    same_samples(finish(rig.engine), undisturbed[:1])
    assert is_empty(rig.engine)


def test_a_new_version_under_pressure_reaches_everybody(make):
    """Pushed out, broken off, and going on under other weights: each token comes from the weights of its version."""
    rig = make(kv_cache_memory_bytes=64 * TOKEN_BYTES, max_num_batched_tokens=7).ready()
    requests = [request(i, 9 + i, 30) for i in range(4)]
    rig.engine.submit(requests, 1)
    while not rig.engine.stats().num_preemptions:
        rig.engine.step()
    rig.engine.step()
    going_on = break_off(rig, requests)
    rig.perturb()
    rig.publish(2)
    samples = rig.run(going_on, 2)
    assert {tuple(sorted(set(sample.versions))) for sample in samples} >= {(1, 2)}
    for sent, sample in zip(requests, samples, strict=True):
        new = torch.tensor(sample.versions) == 2
        expected = forward_logprobs(rig.module, sent, sample)
        torch.testing.assert_close(torch.tensor(sample.logprobs)[new], expected[new], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("budget", "night"), [(1, None), (3, {KV_CACHE}), (8192, TAGS)], ids=["1", "3", "8192"])
def test_what_was_broken_off_goes_on_as_if_undisturbed_in_chunks_of_any_size(make, budget, night):
    requests = [request(i, 5 + i, 12, group=i // 2) for i in range(3)]
    rig = make(max_num_batched_tokens=budget).ready()
    rig.engine.submit(requests, 1)
    for _ in range(8):
        rig.engine.step()
    going_on = break_off(rig, requests)
    if night:
        rig.engine.sleep(night)
        rig.engine.wake(TAGS)
    rig.publish(2)
    samples = rig.run(going_on, 2)
    assert any(set(sample.versions) == {1, 2} for sample in samples)
    same_samples(samples, alone(make, requests))


SENT = [
    *(request(i, 13, 9, group=0) for i in range(3)),
    *(request(i, 20, 14, group=1) for i in range(3, 6)),
    request(6, 16, 1),
    request(7, 17, 17, temperature=0.0),
    request(8, 1, 20, group=2),
    replace(request(9, 8, 12, group=2), prompt_ids=prompt(8, start=5)),  # says it is of a group that it is not of
    request(10, 20, 8, temperature=0.8, top_k=9, top_p=0.95),
    request(11, 3, 11, repetition_penalty=1.4),
]


@pytest.fixture(scope="module")
def sent_alone():
    return alone(inplace, SENT)


any_engine = given(
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_tokens=st.integers(34, 130),
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.integers(1, 40),
    enable_prefix_caching=st.booleans(),
    order=st.permutations(range(len(SENT))),
)


@settings(max_examples=6)
@any_engine
def test_every_request_finishes_with_the_sample_it_has_alone(sent_alone, **engine):
    check_samples(sent_alone, **engine)


@pytest.mark.sweep
@settings(max_examples=100)
@any_engine
def test_every_request_finishes_in_many_more_engines(sent_alone, **engine):
    check_samples(sent_alone, **engine)


def check_samples(
    sent_alone, block_size, num_tokens, max_num_seqs, max_num_batched_tokens, enable_prefix_caching, order
):
    num_blocks = -(-num_tokens // block_size)
    rig = inplace(
        block_size=block_size,
        kv_cache_memory_bytes=num_blocks * block_size * TOKEN_BYTES,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    ).ready()
    same_samples(rig.run([SENT[i] for i in order]), [sent_alone[i] for i in order])
    assert is_empty(rig.engine)


# ------------------------------------------------------------------------------------------------- chunked prefill


def test_a_prompt_longer_than_the_budget_takes_several_passes(make):
    rig = make(max_num_batched_tokens=8).ready()
    requests = [request(i, 30, 4, group=0) for i in range(3)]
    rig.engine.submit(requests, 1)
    for number in range(3):
        assert rig.engine.step() == []
        stats = rig.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (1, 2)  # the others of its group wait for the prompt's end
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (8 * (number + 1), 0)
    rig.engine.step()
    stats = rig.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_generated_tokens) == (3, 0, 3)
    assert (stats.num_prompt_tokens, stats.num_shared_prompt_tokens) == (30, 2 * 30)
    same_samples(finish(rig.engine), alone(make, requests))


@pytest.mark.parametrize("leaving", [[0], [0, 1], [1], [0, 1, 2]], ids=str)
def test_an_abort_in_the_middle_of_a_prompt(make, leaving):
    rig = make(max_num_batched_tokens=9).ready()
    requests = [request(i, 30, 4, group=0) for i in range(3)] + [request(7, 12, 3)]
    rig.engine.submit(requests, 1)
    for _ in range(2):
        rig.engine.step()
    rig.engine.abort(leaving)
    events = rig.engine.step()
    assert [(e.id, e.completion_ids, e.finish_reason) for e in events] == [(i, [], "abort") for i in leaving]
    same_samples(finish(rig.engine), [s for s in alone(make, requests) if s.id not in leaving])
    assert is_empty(rig.engine)


def test_a_request_longer_than_the_engine_was_told_to_expect(make):
    """Only cache and positions limit a request."""
    rig = make().ready()
    requests = [request(0, 20, 44), request(1, 63, 1)]
    same_samples(rig.run(requests), alone(make, requests))
    for sent, sample in zip(requests, rig.run(requests), strict=True):
        expected = forward_logprobs(rig.module, sent, sample)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=1e-5, atol=1e-5)
