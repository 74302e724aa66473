"""What a request may ask for, and what happens to it when a pass fails."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.errors import DataError, ModelError, QueueFullError
from hybrid_rl.models import CausalLM
from tests.support.engines.engine_settings import inplace_settings
from tests.support.inside.engines import model_of
from tests.unit.engines.engines import (
    IN_PLACE,
    TOKEN_BYTES,
    decode,
    finish,
    inplace,
    mixed_requests,
    request,
    same_samples,
)
from tests.unit.models.families import build

pytestmark = pytest.mark.slow


@pytest.fixture(params=IN_PLACE)
def make(request):
    return IN_PLACE[request.param]


# ----------------------------------------------------------------------------------------------------------- queue


def test_a_full_queue_refuses_all_and_names_the_key(make):
    rig = make(max_num_seqs=1, max_num_waiting=3).ready()
    assert rig.engine.stats().num_queueable == 3
    rig.engine.submit([request(0), request(1)], 1)
    message = "2 requests were submitted, but only 1 of max_num_waiting=3 may still wait"
    with pytest.raises(QueueFullError, match=message):
        rig.engine.submit([request(2), request(3)], 1)
    assert (rig.engine.num_unfinished, rig.engine.stats().num_queueable) == (2, 1)
    rig.engine.step()  # one of them runs
    rig.engine.submit([request(2), request(3)], 1)
    assert (rig.engine.num_unfinished, rig.engine.stats().num_queueable) == (4, 0)
    assert [sample.id for sample in finish(rig.engine)] == [0, 1, 2, 3]


def test_who_was_pushed_out_may_wait_beyond_the_limit():
    rig = inplace(max_num_seqs=2, max_num_waiting=2, kv_cache_memory_bytes=24 * TOKEN_BYTES).ready()
    rig.engine.submit([request(0, 5, 16), request(1, 5, 16)], 1)
    rig.engine.step()
    rig.engine.submit([request(2, 5, 16), request(3, 5, 16)], 1)
    while not rig.engine.stats().num_preemptions:
        rig.engine.step()
    assert (rig.engine.stats().num_waiting, rig.engine.stats().num_queueable) == (3, 0)
    assert rig.engine.submit([], 1) == []
    with pytest.raises(QueueFullError, match="1 requests were submitted, but only 0"):
        rig.engine.submit([request(4)], 1)
    assert [sample.id for sample in finish(rig.engine)] == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(("position", "num_letters"), [(0, 1), (5, 2), (15, 4)])
def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(make, position, num_letters):
    rig = make().ready()
    full = rig.run([request(0, 5, 20)])[0]
    text = decode(full.completion_ids)
    string = text[position : position + num_letters]
    length = text.index(string) + num_letters
    stopping = request(0, 5, 20, stop_strings=("ABC", string))
    stopped, *others = rig.run([stopping, request(1, 5, 20), request(2, 5, 20, stop_strings=("A",))])
    assert stopped.completion_ids == full.completion_ids[:length]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == len(stopped.versions) == length
    assert [(len(other.completion_ids), other.finish_reason) for other in others] == [(20, "length")] * 2


def test_a_stop_string_in_the_prompt_or_across_its_end_stops_nothing(make):
    rig = make().ready()
    sent = request(0, 5, 8)
    text = decode(sent.prompt_ids)
    full = rig.run([sent])[0]
    across = text[-1] + decode(full.completion_ids)[0]
    assert across not in decode(full.completion_ids) and text not in decode(full.completion_ids)
    stopping = replace(sent, params=replace(sent.params, stop_strings=(across, text)))
    same_samples(rig.run([stopping]), [full])


def test_the_last_token_that_the_length_allows_may_complete_a_stop_string(make):
    rig = make().ready()
    full = rig.run([request(0, 5, 6)])[0]
    string = decode(full.completion_ids)[-3:]
    stopped = rig.run([request(0, 5, 6, stop_strings=(string,))])[0]
    assert (stopped.completion_ids, stopped.finish_reason) == (full.completion_ids, "stop")


def test_stop_strings_without_a_way_to_text_are_refused():
    module = inplace().module
    engine = InPlaceEngine(CausalLM(module), inplace_settings(), max_length=48)
    rig = replace(inplace(), engine=engine, module=module).ready()
    with pytest.raises(DataError, match="request 1 has stop strings, but the engine was given no decode function"):
        engine.submit([request(0), request(1, stop_strings=("a",))], 1)
    assert engine.num_unfinished == 0
    assert len(rig.run([request(0)])[0].completion_ids) == 6


def test_a_request_beyond_the_rotary_limit_is_refused_and_changes_no_other():
    """One sequence beyond it would change the frequencies of all that are in its passes."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, **factors}
    module = build("qwen2", rope_parameters=rope, max_position_embeddings=128)
    model = CausalLM(module)
    model.verify()
    engine = InPlaceEngine(model, inplace_settings(block_size=4), max_length=48)
    rig = replace(inplace(), engine=engine, module=module).ready()
    short = [request(i, 4 + i, 8) for i in range(3)]
    alone = rig.run(short)
    with pytest.raises(DataError, match=r"exceed 24 tokens \(longrope rotary scaling changes the frequencies"):
        same_samples(rig.run([*short, request(9, 30, 6)])[:3], alone)
    same_samples(rig.run(short), alone)


# ----------------------------------------------------------------------------------------------- penalty, truncation


def test_logprobs_under_a_penalty_are_those_of_the_penalised_distribution(make):
    rig = make().ready()
    sent = request(0, 9, 12, temperature=0.8, repetition_penalty=1.7)
    sample = rig.run([sent, request(1)])[0]
    tokens = [*sent.prompt_ids, *sample.completion_ids]
    with torch.no_grad():
        logits = rig.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    for index, (token, logprob) in enumerate(zip(sample.completion_ids, sample.logprobs, strict=True)):
        row = logits[8 + index]
        for seen in set(tokens[: 9 + index]):
            row[seen] = row[seen] / 1.7 if row[seen] > 0 else row[seen] * 1.7
        assert logprob == pytest.approx(float((row / 0.8).log_softmax(0)[token]), abs=1e-5)


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}], ids=str)
def test_the_only_token_left_has_all_the_probability(make, truncation):
    rig = make().ready()
    sample, greedy = rig.run([request(1, 7, 12, **truncation), request(0, 7, 12, temperature=0.0)])
    assert sample.completion_ids == greedy.completion_ids
    assert sample.logprobs == pytest.approx([0.0] * 12, abs=1e-6)


# ----------------------------------------------------------------------------------------------------- failed passes


class Fails:
    """In the place of a method: raises at one of its calls, before or after what it does."""

    def __init__(self, method, at: int, error: BaseException, *, late: bool) -> None:
        self.method, self.left, self.error, self.late = method, at, error, late

    def __call__(self, *arguments):
        self.left -= 1
        if self.left == 0 and not self.late:
            raise self.error
        result = self.method(*arguments)
        if self.left == 0:
            raise self.error
        return result


@functools.cache
def undisturbed(make):
    return make().ready().run(mixed_requests())


@pytest.mark.parametrize(
    ("at", "name", "late"),
    [(1, "hidden_states", False), (1, "logits", True), (2, "logits", False), (4, "hidden_states", True)],
)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.sweep),
        {"max_num_batched_tokens": 7},
        {"kv_cache_memory_bytes": 48 * TOKEN_BYTES},
    ],
)
def test_a_failed_pass_can_be_repeated(make, monkeypatch, at, name, late, settings):
    requests = mixed_requests()
    expected = undisturbed(make)
    rig = make(**settings).ready()
    rig.engine.submit(requests, 1)
    error = RuntimeError("out of memory") if at < 4 else KeyboardInterrupt()
    model = model_of(rig.engine)
    monkeypatch.setattr(model, name, Fails(getattr(model, name), at, error, late=late))
    events = []
    with pytest.raises(type(error)):
        while True:
            events += rig.engine.step()
    assert rig.engine.num_unfinished == len(requests) - len(events)
    assert (rig.engine.stats().num_running, rig.engine.stats().kv_cache_used_share) == (0, 0.0)
    samples = sorted([*events, *finish(rig.engine)], key=lambda event: event.id)
    same_samples(samples, expected)
    assert rig.engine.stats().kv_cache_used_share == 0


@pytest.mark.parametrize("at", [1, 3])
def test_after_a_failed_pass_everybody_can_be_aborted_and_nothing_stale_is_found(make, monkeypatch, at):
    """The blocks of the failed pass count as written when it is planned; what comes next must not find them."""
    requests = [request(i, 40, 4) for i in range(3)]
    expected = make().ready().run(requests)
    rig = make(max_num_batched_tokens=30).ready()
    rig.engine.submit([replace(one, id=one.id + 10) for one in requests], 1)
    model = model_of(rig.engine)
    monkeypatch.setattr(model, "hidden_states", Fails(model.hidden_states, at, RuntimeError("broken"), late=False))
    with pytest.raises(RuntimeError, match="broken"):
        while True:
            rig.engine.step()
    rig.engine.abort([10, 11])
    rig.engine.submit(requests, 1)  # the engine is not empty, so that it would not forget for that
    samples = [sample for sample in finish(rig.engine) if sample.id < 10]
    same_samples(samples, expected)


def test_who_was_aborted_in_a_pass_that_failed_is_not_lost(make, monkeypatch):
    rig = make().ready()
    rig.engine.submit([request(0), request(1)], 1)
    rig.engine.step()
    rig.engine.abort([0])
    model = model_of(rig.engine)
    monkeypatch.setattr(model, "logits", Fails(model.logits, 1, RuntimeError("broken"), late=False))
    with pytest.raises(RuntimeError, match="broken"):
        rig.engine.step()
    assert rig.engine.num_unfinished == 2
    assert [(event.id, event.finish_reason) for event in finish(rig.engine)] == [(0, "abort"), (1, "length")]


@pytest.mark.parametrize("where", ["lm_head", "embed_tokens"])
def test_weights_that_were_not_finite_for_a_while_leave_nothing_behind(make, where):
    """Keys and values of the failed passes are not finite either."""
    rig = make().ready()
    requests = [request(i, 5 + 9 * i, 9, group=i // 2) for i in range(4)]
    expected = rig.run(requests)
    rig.engine.submit(requests, 1)
    for _ in range(2):
        rig.engine.step()
    weight = rig.module.get_submodule("lm_head" if where == "lm_head" else "model.embed_tokens").weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    for _ in range(2):
        with pytest.raises(ModelError, match="logits are not finite in . of . rows"):
            rig.engine.step()
    with torch.no_grad():
        weight.copy_(good)
    same_samples(finish(rig.engine), expected)


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_greedy_under_a_repetition_penalty_is_that_of_transformers(make, penalty):
    rig = make().ready()
    sent = request(0, 9, 24, temperature=0.0, repetition_penalty=penalty)
    plain, sample, _ = rig.run([request(1, 9, 24, temperature=0.0), sent, request(2, 4, 9, repetition_penalty=1.2)])
    prompt_ids = torch.tensor([sent.prompt_ids])
    expected = rig.module.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=None,
    )
    assert sample.completion_ids == expected[0, 9:].tolist() != plain.completion_ids
    assert plain.completion_ids == rig.run([request(1, 9, 24, temperature=0.0)])[0].completion_ids
