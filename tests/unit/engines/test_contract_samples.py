"""The RolloutEngine contract on every engine of FACTORIES: which tokens come out, with which numbers beside them."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.unit.engines.engines import (
    FACTORIES,
    TOKEN_BYTES,
    break_off,
    forward_logprobs,
    mixed_requests,
    prompt,
    request,
    same_samples,
)
from tests.unit.models.families import VOCABULARY

pytestmark = pytest.mark.slow


# engines/hf/test_engine.py compares its samples with those of the in-place engine.
ENGINES = [pytest.param(name, marks=pytest.mark.sweep if name == "hf" else ()) for name in FACTORIES]


@pytest.fixture(params=ENGINES)
def make(request):
    return FACTORIES[request.param]


@pytest.fixture
def rig(make):
    return make().ready()


@pytest.fixture
def alone(make):
    """Every request of the mix in an engine of its own batch of one."""
    return samples_alone(make)


@functools.cache
def samples_alone(make):
    rig = make(max_num_seqs=1).ready()
    return [rig.run([one])[0] for one in mixed_requests()]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 64, "block_size": 1},
        pytest.param({"max_num_seqs": 64, "block_size": 4}, marks=pytest.mark.sweep),
        {"max_num_seqs": 64, "block_size": 16},
        {"max_num_seqs": 2},  # groups are cut between two admissions
        {"max_num_seqs": 5, "max_num_batched_tokens": 1},
        pytest.param({"max_num_batched_tokens": 20}, marks=pytest.mark.sweep),
        {"kv_cache_memory_bytes": 32 * TOKEN_BYTES},  # the longest request alone, or a few short ones
        pytest.param({"kv_cache_memory_bytes": 29 * TOKEN_BYTES, "block_size": 1}, marks=pytest.mark.sweep),
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_a_sample_is_the_same_whatever_shares_its_batch_its_blocks_and_its_memory(make, alone, settings):
    rig = make(**settings).ready()
    same_samples(rig.run(mixed_requests()), alone)
    same_samples(rig.run(mixed_requests()[::-1]), alone[::-1])
    stats = rig.engine.stats()
    assert stats.kv_cache_used_share == stats.num_running == stats.num_waiting == 0


def test_a_group_shares_no_more_than_its_prompt(rig):
    together = [request(i, 9, 6, group=1) for i in range(8)]
    grouped = rig.run(together)
    assert len({tuple(sample.completion_ids) for sample in grouped}) == 8
    same_samples(grouped, rig.run([replace(one, group=None) for one in together]))
    assert rig.engine.stats().num_shared_prompt_tokens == 7 * 9 * rig.counts_shared


def test_requests_of_one_group_with_other_prompts_share_nothing(rig):
    odd = [replace(request(i, 6), prompt_ids=prompt(6, start=i), group=1) for i in range(3)]
    same_samples(rig.run(odd), [rig.run([one])[0] for one in odd])
    assert rig.engine.stats().num_shared_prompt_tokens == 0


def test_equal_seeds_give_equal_samples_and_other_seeds_others(rig):
    samples = rig.run([request(0, 5, 12, seed=1), request(1, 5, 12, seed=1), request(2, 5, 12, seed=2)])
    assert samples[0].completion_ids == samples[1].completion_ids != samples[2].completion_ids


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_tempered_distribution(rig, temperature):
    requests = [request(i, 3 + i, 10, temperature=temperature) for i in range(4)]
    for sent, sample in zip(requests, rig.run(requests), strict=True):
        expected = forward_logprobs(rig.module, sent, sample, temperature)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_greedy_takes_the_best_token_and_reports_the_models_own_logprobs(rig):
    greedy = request(0, 7, 12, temperature=0.0)
    token_ids = torch.tensor([greedy.prompt_ids])
    expected = rig.module.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    mixed = rig.run([request(1, 4), greedy, request(2, 8, top_k=2)])[1]
    assert mixed.completion_ids == expected[0, 7:].tolist()
    torch.testing.assert_close(
        torch.tensor(mixed.logprobs), forward_logprobs(rig.module, greedy, mixed), rtol=1e-5, atol=1e-5
    )
    assert rig.run([replace(greedy, params=replace(greedy.params, seed=7))])[0].completion_ids == mixed.completion_ids


@pytest.mark.parametrize("stop_at", [0, 3, 5])
def test_a_stop_token_ends_the_completion_and_is_its_last_token(rig, stop_at):
    full = rig.run([request(0, 4, 6)])[0]
    stop = full.completion_ids[stop_at]
    first = full.completion_ids.index(stop)
    never = next(token for token in range(VOCABULARY) if token not in full.completion_ids)
    stopped = rig.run([request(0, 4, 6, stop_token_ids=(never, stop)), request(1, 4, 6)])[0]
    assert stopped.completion_ids == full.completion_ids[: first + 1]
    assert stopped.finish_reason == "stop"  # also where the stop token is the last one that the length allows
    assert len(stopped.logprobs) == len(stopped.versions) == first + 1
    assert full.finish_reason == "length"


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_completion_of_one_token(rig, num_samples):
    samples = rig.run([request(i, 5, 1, group=0) for i in range(num_samples)])
    assert [(len(sample.completion_ids), sample.finish_reason) for sample in samples] == [(1, "length")] * num_samples
    longer = rig.run([request(i, 5, 4, group=0) for i in range(num_samples)])
    assert [s.completion_ids[0] for s in samples] == [s.completion_ids[0] for s in longer]


# ---------------------------------------------------------------------------------------------------- new versions


def test_every_token_comes_from_the_weights_of_its_version(rig):
    """Of completions that are broken off, and go on: the keys of old tokens, too, are those of the new weights."""
    requests = [request(0, 5, 8), request(1, 9, 8)]
    old = [forward_logprobs(rig.module, *pair) for pair in zip(requests, rig.run(requests), strict=True)]
    rig.engine.submit(requests, 1)
    for _ in range(3):
        rig.engine.step()
    going_on = break_off(rig, requests)
    rig.perturb()
    rig.publish(4)
    for sent, sample, under_old in zip(requests, rig.run(going_on, 4), old, strict=True):
        assert sample.versions == [1] * 3 + [4] * 5
        new = forward_logprobs(rig.module, sent, sample)
        assert (new[:3] - under_old[:3]).abs().max() > 1e-2  # the weights did move
        torch.testing.assert_close(torch.tensor(sample.logprobs[:3]), under_old[:3], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.tensor(sample.logprobs[3:]), new[3:], rtol=1e-5, atol=1e-5)
