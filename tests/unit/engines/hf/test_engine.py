"""What the engine over a model's own forward does beyond the contract: every family, cohorts, memory."""

import pytest
import torch

from hybrid_rl.engines.hf.hf_engine import HFEngine
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.cache import CacheSize, check_cache
from tests.support.engines.engine_settings import hf_settings
from tests.unit.engines.engines import (
    Rig,
    break_off,
    decode,
    finish,
    forward_logprobs,
    hf,
    inplace,
    mixed_requests,
    request,
    same_samples,
)
from tests.unit.models.families import build
from tests.unit.models.hybrids import HYBRIDS, MORE, NOT_CACHED, build_hybrid

FAMILIES = [*HYBRIDS, *(pytest.param(name, marks=pytest.mark.sweep) for name in MORE)]


def hybrid(name, **settings):
    module = build_hybrid(name)
    config = hf_settings(**{"max_num_seqs": 16, **settings})
    return Rig(HFEngine(CausalLM(module, "unpacked"), config, max_length=48, decode=decode), module)


def test_samples_are_those_of_the_in_place_engine():
    same_samples(hf().ready().run(mixed_requests()), inplace().ready().run(mixed_requests()))


def test_penalties_stop_strings_and_truncation_are_those_of_the_in_place_engine():
    requests = [
        request(0, 5, 12, repetition_penalty=1.7),
        request(1, 5, 12, repetition_penalty=0.6, temperature=0.0),
        request(2, 7, 16, stop_strings=("b", "cd")),
        request(3, 5, 12, top_k=3),
        request(4, 5, 12, top_p=0.5, min_p=0.1, temperature=0.8),
    ]
    same_samples(hf().ready().run(requests), inplace().ready().run(requests))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_generates_what_it_generates_by_itself(name):
    """Groups, stops and prompts of several lengths at once: cohorts start, shrink and end while others run."""
    rig = hybrid(name).ready()
    sent = [request(3 * g + i, 4 + g // 2, 5 + 2 * i, group=g) for g in range(4) for i in range(3)]
    sent += [request(20, 5, 8, temperature=0.0), request(21, 1, 6, temperature=0.0)]
    samples = rig.run(sent)
    for one, sample in zip(sent, samples, strict=True):
        expected = forward_logprobs(rig.module, one, sample)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=1e-4, atol=1e-4)
    for one, sample in zip(sent[-2:], samples[-2:], strict=True):
        ids = torch.tensor([one.prompt_ids])
        own = rig.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=one.params.max_tokens,
            min_new_tokens=one.params.max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        assert sample.completion_ids == own[0, len(one.prompt_ids) :].tolist()
    # A sample does not depend on what it shares its cohort with.
    few = hybrid(name, max_num_seqs=1).ready()
    for one, sample in list(zip(sent, samples, strict=True))[::5]:
        assert few.run([one])[0].completion_ids == sample.completion_ids


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_what_was_broken_off_goes_on_as_if_undisturbed(name):
    rig = hybrid(name).ready()
    requests = [request(i, 4 + i // 2, 6, group=i // 2) for i in range(4)]
    undisturbed = rig.run(requests)
    rig.engine.submit(requests, 1)
    for _ in range(3):
        rig.engine.step()
    going_on = break_off(rig, requests)
    rig.publish(2)
    same_samples(rig.run(going_on, 2), undisturbed)


def test_a_group_is_computed_once_and_decodes_as_one_batch(monkeypatch):
    rig = hf().ready()
    shapes = []
    forward = CausalLM.own_forward
    monkeypatch.setattr(
        CausalLM, "own_forward", lambda self, ids, **kw: shapes.append(tuple(ids.shape)) or forward(self, ids, **kw)
    )
    rig.run([request(i, 6, 3 + i, group=1) for i in range(3)])
    assert shapes == [(1, 6), (3, 1), (3, 1), (2, 1), (1, 1)]


def test_prompts_of_one_length_are_computed_together_as_far_as_the_budget_goes():
    rig = hf(max_num_batched_tokens=12).ready()
    rig.engine.submit([request(i, 5, 4) for i in range(3)] + [request(7, 4, 4), request(8, 20, 4)], 1)
    running = []
    for _ in range(4):
        rig.engine.step()
        running.append(rig.engine.num_running)
    assert running == [2, 4, 5, 5 - 2]  # two of 5 tokens; one with the one of 4; the one that is over the budget


def test_memory_is_counted_at_full_length_before_a_request_is_admitted():
    size = CacheSize.of(CausalLM(build_hybrid("lfm2"), "unpacked"))
    assert size.fixed_bytes == 32 * 3 * 4  # a convolution's window of 3 over 32 channels
    assert size.token_bytes == 2 * 2 * 8 * 4  # keys and values of 2 heads of 8 in the one layer of attention
    rig = hybrid("lfm2", kv_cache_memory_bytes=2 * size.num_bytes(10)).ready()
    assert rig.engine.kv_cache_tokens == 20 + size.fixed_bytes // size.token_bytes
    rig.engine.submit([request(i, 4, 6) for i in range(3)], 1)
    rig.engine.step()
    stats = rig.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_used_share) == (2, 1, 1.0)
    assert len(finish(rig.engine)) == 3


def test_a_model_that_recomputes_activations_generates_all_the_same():
    """transformers gives no cache in training mode then, and says so in a warning only."""
    module = build("qwen2")
    model = CausalLM(module, "unpacked")
    rig = Rig(HFEngine(model, hf_settings(), max_length=48), module).ready()
    expected = rig.run([request(0), request(1, 6)])
    model.enable_gradient_checkpointing()
    training = [child.training for child in module.modules()]
    assert any(training)
    again = Rig(HFEngine(model, hf_settings(), max_length=48), module).ready()
    same_samples(again.run([request(0), request(1, 6)]), expected)
    assert [child.training for child in module.modules()] == training


def test_a_pass_that_fails_loses_nobody(monkeypatch):
    rig = hybrid("lfm2").ready()
    requests = [request(i, 4 + i % 2, 8, group=i % 2) for i in range(4)]
    expected = rig.run(requests)
    forward, calls = CausalLM.own_forward, []

    def fails(self, ids, **arguments):
        calls.append(ids.shape)
        if len(calls) in (2, 5, 8):
            raise RuntimeError("out of memory")
        return forward(self, ids, **arguments)

    monkeypatch.setattr(CausalLM, "own_forward", fails)
    rig.engine.submit(requests, 1)
    events = []
    for _ in range(40):
        try:
            events += rig.engine.step()
        except RuntimeError:
            rig.engine.abort([77])
    assert len(calls) > 8 and not rig.engine.num_unfinished
    same_samples(sorted(events, key=lambda event: event.id), expected)


@pytest.mark.parametrize("name", NOT_CACHED)
def test_a_cache_that_cannot_be_used_is_refused(name):
    with pytest.raises(ModelError, match="rollout.engine=hf cannot generate with it"):
        hybrid(name)


def test_a_cache_that_goes_wrong_is_refused(monkeypatch):
    model = CausalLM(build_hybrid("lfm2"), "unpacked")
    assert check_cache(model) < 1e-5
    monkeypatch.setattr("transformers.cache_utils.LinearAttentionLayer.reorder_cache", lambda self, rows: None)
    with pytest.raises(
        ModelError, match="does not decode with rows of its own cache|different results with and without its cache"
    ):
        check_cache(model)


def test_equal_prompts_of_other_groups_are_computed_for_each():
    rig = hf().ready()
    rig.run([request(i, 6, 2, group=i % 2) for i in range(4)])
    assert rig.engine.stats().num_prompt_tokens == 12
