"""What prompts have in common is computed once, is right, and is forgotten when it must be."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from hybrid_rl.engines.base import RolloutRequest
from tests.support.inside.engines import model_of
from tests.support.inside.wrapping import wrap
from tests.unit.engines.engines import (
    IN_PLACE,
    TOKEN_BYTES,
    break_off,
    finish,
    forward_logprobs,
    inplace,
    inplace_compiled,
    prompt,
    request,
    same_samples,
)
from tests.unit.models.families import VOCABULARY

BLOCK = 16


def after(common: int, length: int, identity: int, max_tokens: int = 4, **params) -> RolloutRequest:
    """A prompt of `length` tokens, the first `common` of which are those of every other."""
    own = tuple((11 * identity + 5 * i) % (VOCABULARY - 2) + 2 for i in range(length - common))
    made = request(identity, 1, max_tokens, **params)
    return replace(made, prompt_ids=(*prompt(common), *own))


def alone(requests):
    return samples_alone(tuple(requests))


@functools.cache
def samples_alone(requests):
    rig = inplace_compiled(max_num_seqs=1, enable_prefix_caching=False).ready()
    return [rig.run([replace(one, group=None)])[0] for one in requests]


def counters(rig):
    stats = rig.engine.stats()
    return stats.num_prompt_tokens, stats.num_prefix_tokens


def test_groups_share_with_each_other_and_within():
    rig = inplace_compiled().ready()
    requests = [replace(after(32, 37, i // 3), id=i, group=i // 3, params=request(i).params) for i in range(6)]
    samples = rig.run(requests)
    assert counters(rig) == (37 + 5, 32)
    assert rig.engine.stats().num_shared_prompt_tokens == 4 * 37
    same_samples(samples, alone(requests))


@pytest.mark.parametrize("make", [inplace, inplace_compiled])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_siblings_of_equal_tokens_decode_once_and_get_what_each_would_alone(make, dtype, monkeypatch):
    """Two of five draw by the same noise and never part; the others part from them, and two from each other, at some
    place of some block."""
    rig = make(dtype=dtype).ready()
    num_rows = []
    wrap(
        monkeypatch,
        model_of(rig.engine),
        "hidden_states",
        lambda own, *inputs: num_rows.append(len(inputs[0])) or own(*inputs),
    )
    seeds = (7, 7, 8, 9, 10)
    requests = [request(i, 6, 20, group=0, seed=seed, temperature=0.4) for i, seed in enumerate(seeds)]
    samples = rig.run(requests)
    decoded = {tuple(sample.completion_ids[:place]) for sample in samples for place in range(1, 20)}
    assert num_rows[0] == 6 and sum(num_rows[1:]) == len(decoded) < 4 * 19
    assert samples[0].completion_ids == samples[1].completion_ids
    for sent, sample in zip(requests, samples, strict=True):
        expected = forward_logprobs(rig.module, sent, sample, 0.4)
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.2}[dtype]
        torch.testing.assert_close(torch.tensor(sample.logprobs).to(expected), expected, rtol=0, atol=tolerance)
    if dtype != torch.bfloat16:
        lone = make(dtype=dtype, max_num_seqs=1, enable_prefix_caching=False).ready()
        same_samples(samples, [lone.run([replace(sent, group=None)])[0] for sent in requests])


@pytest.mark.parametrize("length", [31, 32, 33, 40])
def test_a_prompt_that_is_in_the_cache_computes_its_last_token_only(length):
    """The first that comes later does; who comes in the same pass (no group) finds only what fills blocks."""
    rig = inplace_compiled().ready()
    requests = [request(i, length, 6) for i in range(4)]
    rig.engine.submit(requests[:2], 1)
    assert rig.engine.step() == []
    whole = (length - 1) // BLOCK * BLOCK
    assert counters(rig) == (length + length - whole, whole)
    samples = []
    for number in (2, 3):  # while the others write after it, and when all have left
        rig.engine.submit(requests[number : number + 1], 1)
        samples += finish(rig.engine)
        assert counters(rig) == (length + length - whole + number - 1, whole + (number - 1) * (length - 1))
    same_samples(samples, alone(requests))


def test_switched_off_nothing_is_found():
    rig = inplace_compiled(enable_prefix_caching=False).ready()
    requests = [request(i, 40, 3) for i in range(3)]
    same_samples(rig.run(requests), alone(requests))
    assert counters(rig) == (3 * 40, 0)


def test_the_prefix_least_recently_used_is_evicted():
    """Ten blocks: one of a request that stays, and three prefixes of two and the token after them."""
    rig = inplace_compiled(kv_cache_memory_bytes=10 * BLOCK * TOKEN_BYTES).ready()

    def prefix(number, identity):
        return replace(request(identity, 1, 1), prompt_ids=tuple(3 + (number + 2) * i % 90 for i in range(33)))

    stay = request(99, 2, 14)  # keeps the engine busy, so that nothing is forgotten for that it is empty
    rig.engine.submit([stay], 1)
    for number in (0, 1, 2, 0):  # 0 is used again, so 1 is the oldest
        rig.engine.submit([prefix(number, number)], 1)
        rig.engine.step()
    found = rig.engine.stats().num_prefix_tokens
    assert found == 32
    for number, expected in ((3, 0), (0, 32), (2, 32), (1, 0)):  # 3 takes the three blocks of 1
        rig.engine.submit([prefix(number, number)], 1)
        before = rig.engine.stats().num_prefix_tokens
        rig.engine.step()
        assert rig.engine.stats().num_prefix_tokens - before == expected


# -------------------------------------------------------------------------------------------------- forgotten


def test_another_version_finds_nothing_of_the_old_one():
    rig = inplace_compiled().ready()
    requests = [after(32, 40, i, 9) for i in range(2)]
    rig.engine.submit(requests, 1)
    for _ in range(3):
        rig.engine.step()
    going_on = break_off(rig, requests)
    rig.perturb()
    rig.publish(2)
    before = counters(rig)
    late = after(32, 40, 5, 9)
    rig.engine.submit([*going_on, late], 2)
    samples = {}
    while rig.engine.num_unfinished:
        samples.update((event.id, event) for event in rig.engine.step())
    # The first is computed whole under the new weights, and the others find its blocks, not the old ones.
    assert counters(rig) == (before[0] + 43 + 11 + 8, before[1] + 2 * 32)
    for sent in (*requests, late):
        sample = samples[sent.id]
        new = torch.tensor(sample.versions) == 2
        expected = forward_logprobs(rig.module, sent, sample)
        torch.testing.assert_close(torch.tensor(sample.logprobs)[new], expected[new], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", IN_PLACE.values(), ids=IN_PLACE)
def test_the_bits_of_a_rollout_do_not_depend_on_what_ran_before(make):
    rollout = [after(20, 25 + i, i, 7, group=i // 2) for i in range(4)] + [request(9, 33, 9, temperature=0.0)]
    fresh = make().ready()
    expected = fresh.run(rollout)
    used = make().ready()
    # Evaluations, of the same prompts among others, in other company; one of them broken off.
    used.run(rollout[:1])
    used.run([replace(one, id=one.id + 50) for one in reversed(rollout)] + [request(99, 21, 5)])
    used.engine.submit(rollout[2:], 1)
    used.engine.step()
    used.engine.abort_all()
    before = counters(used)
    assert used.run(rollout) == expected  # to the bit, logprobs too
    assert tuple(now - then for now, then in zip(counters(used), before, strict=True)) == counters(fresh)


def test_after_a_night_nothing_is_found():
    rig = inplace_compiled().ready()
    rig.run([request(0, 40, 3)])
    rig.engine.sleep({"kv_cache"})
    rig.engine.wake({"kv_cache"})
    same_samples(rig.run([request(1, 40, 3)]), alone([request(1, 40, 3)]))
    assert counters(rig) == (80, 0)


# ------------------------------------------------------------------------------------------------- copied tails


@pytest.mark.parametrize(("length", "num_steps"), [(15, 1), (16, 1), (16, 2), (18, 5)])
def test_a_leader_that_is_aborted_takes_nothing_with_it(length, num_steps):
    requests = [request(i, length, 9, group=1) for i in range(3)]
    rig = inplace().ready()
    rig.engine.submit(requests, 1)
    for _ in range(num_steps):
        rig.engine.step()
    rig.engine.abort([0])
    events = rig.engine.step()
    assert [(event.id, len(event.completion_ids)) for event in events] == [(0, num_steps)]
    rig.engine.submit([replace(requests[0], id=7, group=None, params=request(7, max_tokens=9).params)], 1)
    samples = []
    while rig.engine.num_unfinished:
        samples += rig.engine.step()
    expected = alone([*requests[1:], replace(request(7, length, 9), group=None)])
    same_samples(sorted(samples, key=lambda event: event.id), expected)
    assert rig.engine.stats().kv_cache_used_share == 0
