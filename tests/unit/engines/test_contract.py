"""The RolloutEngine contract, sentence by sentence, on every engine of FACTORIES: state, versions, memory, requests."""

import re
from dataclasses import replace
from itertools import count

import pytest

from hybrid_rl.engines.base import KV_CACHE, TAGS, WEIGHTS, EngineState, RolloutRequest, SamplingParams
from hybrid_rl.errors import EngineStateError
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.unit.engines.engines import FACTORIES, TOKEN_BYTES, request, same_samples
from tests.unit.models.families import VOCABULARY


@pytest.fixture(params=FACTORIES)
def make(request):
    return FACTORIES[request.param]


@pytest.fixture
def rig(make):
    return make().ready()


def drain(engine, limit=200):
    """Step until nothing is unfinished; the events in the order in which they came."""
    events = []
    for _ in range(limit):
        if not engine.num_unfinished:
            return events
        events.extend(engine.step())
    raise AssertionError(f"{engine.num_unfinished} requests are unfinished after {limit} steps")


def start(rig, *requests, num_steps=3):
    rig.engine.submit(requests, rig.engine.policy_version)
    return [event for _ in range(num_steps) for event in rig.engine.step()]


# ---------------------------------------------------------------------------------------------- state and version


def test_a_new_engine_sleeps_and_holds_no_version(make):
    engine = make().engine
    assert (engine.state, engine.policy_version) == (EngineState.ASLEEP, -1)
    assert engine.stats().kv_cache_bytes == 0


@pytest.mark.parametrize(("tags", "state"), [((), "asleep"), ((WEIGHTS,), "weights")])
def test_nothing_is_generated_unless_ready(make, tags, state):
    rig = make()
    if tags:
        rig.engine.wake(tags)
        rig.publish(1)
    assert rig.engine.state is EngineState(state)
    for call in (lambda: rig.engine.submit([request(0)], 1), rig.engine.step):
        with pytest.raises(EngineStateError, match=f"the engine is {state}, not ready"):
            call()
    assert rig.engine.num_unfinished == 0


def test_nothing_is_generated_before_the_first_weights(make):
    engine = make().engine
    engine.wake(TAGS)
    for version in (-1, 0):
        with pytest.raises(EngineStateError, match="never given any"):
            engine.submit([request(0)], version)


@pytest.mark.parametrize("version", [0, 2])
def test_requests_for_another_version_are_refused(rig, version):
    with pytest.raises(EngineStateError, match=f"holds policy version 1 but version {version} was expected"):
        rig.engine.submit([request(0)], version)
    assert rig.engine.num_unfinished == 0


@pytest.mark.parametrize("version", [1, 0, -1])
def test_a_version_that_does_not_rise_is_refused(rig, version):
    with pytest.raises(EngineStateError, match=f"version {version} does not follow"):
        rig.publish(version)
    assert rig.engine.policy_version == 1


def test_versions_may_skip_and_the_report_names_them(rig):
    report = rig.publish(7)
    assert report.version == rig.engine.policy_version == 7
    assert report.num_tensors == len(TensorSource.of(rig.module).tensors)
    assert rig.run([request(0, max_tokens=3)], 7)[0].versions == [7, 7, 7]


def test_weights_are_refused_while_asleep(make):
    with pytest.raises(EngineStateError, match="asleep"):
        make().publish(1)


def test_weights_are_refused_while_requests_run_or_wait(make):
    rig = make(max_num_seqs=1).ready()
    rig.engine.submit([request(0)], 1)
    with pytest.raises(EngineStateError, match="0 requests are running and 1 waiting"):
        rig.publish(2)
    rig.engine.submit([request(1)], 1)
    rig.engine.step()
    with pytest.raises(EngineStateError, match="1 requests are running"):
        rig.publish(2)
    rig.engine.abort_all()
    rig.publish(2)
    assert rig.engine.policy_version == 2


# --------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([("wake", {WEIGHTS})], EngineState.WEIGHTS),
        ([("wake", {WEIGHTS}), ("wake", {KV_CACHE})], EngineState.READY),
        ([("wake", TAGS), ("wake", TAGS)], EngineState.READY),
        ([("wake", TAGS), ("wake", {WEIGHTS})], EngineState.READY),
        ([("wake", TAGS), ("sleep", {KV_CACHE})], EngineState.WEIGHTS),
        ([("wake", TAGS), ("sleep", {KV_CACHE}), ("sleep", {KV_CACHE})], EngineState.WEIGHTS),
        ([("wake", TAGS), ("sleep", {KV_CACHE}), ("wake", {KV_CACHE})], EngineState.READY),
        ([("wake", TAGS), ("sleep", {WEIGHTS})], EngineState.ASLEEP),
        ([("wake", TAGS), ("sleep", TAGS)], EngineState.ASLEEP),
        ([("sleep", {KV_CACHE})], EngineState.ASLEEP),
    ],
    ids=lambda value: value.value if isinstance(value, EngineState) else "-".join(f"{c}{len(t)}" for c, t in value),
)
def test_tags_come_and_go(make, steps, expected):
    engine = make().engine
    for call, tags in steps:
        getattr(engine, call)(tags)
    assert engine.state is engine.stats().state is expected
    assert (engine.stats().kv_cache_bytes > 0) == (expected is EngineState.READY)


def test_the_cache_does_not_wake_before_the_weights(make):
    engine = make().engine
    with pytest.raises(EngineStateError, match="weights are asleep"):
        engine.wake({KV_CACHE})
    assert engine.state is EngineState.ASLEEP
    assert engine.stats().kv_cache_bytes == 0


@pytest.mark.parametrize("tags", [(), ("kv",), (WEIGHTS, "optimizer")])
@pytest.mark.parametrize("call", ["wake", "sleep"])
def test_unknown_tags_are_refused(rig, call, tags):
    with pytest.raises(ValueError, match="must be some of"):
        getattr(rig.engine, call)(tags)
    assert rig.engine.state is EngineState.READY


@pytest.mark.parametrize("tags", [{KV_CACHE}, TAGS])
def test_samples_are_the_same_after_a_night(rig, tags):
    before = rig.run([request(0), request(1, 9)])
    rig.engine.sleep(tags)
    with pytest.raises(EngineStateError, match="not ready"):
        rig.engine.submit([request(0)], 1)
    rig.engine.wake(TAGS)
    same_samples(rig.run([request(0), request(1, 9)]), before)


def test_an_engine_with_running_requests_does_not_sleep(rig):
    start(rig, request(0))
    with pytest.raises(EngineStateError, match="1 requests are running"):
        rig.engine.sleep({KV_CACHE})
    assert rig.engine.state is EngineState.READY


# ------------------------------------------------------------------------------------------------------- requests


def test_submit_returns_the_ids_and_counts_them_as_unfinished(rig):
    assert rig.engine.submit([request(5), request(3)], 1) == [5, 3]
    assert rig.engine.num_unfinished == 2
    assert sorted(event.id for event in drain(rig.engine)) == [3, 5]


def bad(identity=9, prompt_ids=(2, 3), max_tokens=4, **params):
    return RolloutRequest(identity, prompt_ids, SamplingParams(max_tokens, **params))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ([bad(prompt_ids=())], "empty prompt"),
        ([bad(prompt_ids=(2, VOCABULARY))], f"token {VOCABULARY} is outside"),
        ([bad(prompt_ids=(-1,))], "token -1 is outside"),
        ([bad(stop_token_ids=(VOCABULARY,))], f"token {VOCABULARY} is outside"),
        ([bad(max_tokens=63)], r"exceed 64 tokens \((the model has 64 positions|vLLM was built)"),
        ([bad(7)], "request id 7 is in use"),
        ([bad(), bad()], "request id 9 is in use"),
    ],
    ids=["empty", "vocabulary", "negative", "stop", "too long", "id of a running one", "id twice"],
)
def test_one_bad_request_and_nothing_is_queued(rig, refused, message):
    rig.engine.submit([request(7)], 1)
    with pytest.raises(ValueError, match=message):
        rig.engine.submit([request(8), *refused, request(10)], 1)
    assert rig.engine.num_unfinished == 1
    assert [event.id for event in drain(rig.engine)] == [7]
    rig.run([request(8), request(10)])


def test_a_request_larger_than_the_cache_is_refused(make):
    rig = make(kv_cache_memory_bytes=32 * TOKEN_BYTES).ready()
    with pytest.raises(ValueError, match="33 tokens do not fit the KV cache of 32"):
        rig.engine.submit([request(0, 4, 29)], 1)
    assert len(rig.run([request(0, 4, 28)])[0].completion_ids) == 28


def test_no_requests_no_events(rig):
    assert rig.engine.submit([], 1) == []
    assert rig.engine.step() == []
    assert rig.engine.stats().num_steps == 0


def test_who_waits_starts_by_priority_and_of_equal_ones_who_came_first(make):
    """One at a time: 2 runs already when 4 comes, which passes all others."""
    rig = make(max_num_seqs=1).ready()
    events = start(rig, *(replace(request(i, 4, 3), priority=p) for i, p in enumerate((7, 5, 3, 5))), num_steps=1)
    rig.engine.submit([replace(request(4, 4, 3), priority=-1)], 1)
    assert [event.id for event in [*events, *drain(rig.engine)]] == [2, 4, 1, 3, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e-300),  # 0 in float32: taken for greedy
        ("temperature", 1e-40),  # logits / 1e-40 is infinite: "its weights have diverged"
        ("temperature", 1e300),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
        ("stop_strings", "ab"),
        ("stop_strings", ("ab", "")),
        ("seed", 2**63),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be")):
        SamplingParams(**{"max_tokens": 1, name: value})


# ------------------------------------------------------------------------------------------------- abort


def test_abort_ends_running_and_waiting_requests_with_what_they_have(make):
    rig = make(max_num_seqs=2).ready()
    undisturbed = rig.run([request(0)])[0]
    start(rig, request(0), request(1), request(2), num_steps=3)
    rig.engine.abort([0, 2, 77])
    rig.engine.abort([])
    assert rig.engine.num_unfinished == 3
    aborted = {event.id: event for event in rig.engine.step() if event.finish_reason == "abort"}
    assert sorted(aborted) == [0, 2]
    assert aborted[0].completion_ids == undisturbed.completion_ids[:3]
    assert len(aborted[0].logprobs) == len(aborted[0].versions) == 3
    assert aborted[2].completion_ids == []
    assert [(event.id, event.finish_reason) for event in drain(rig.engine)] == [(1, "length")]


def test_abort_all_leaves_the_engine_empty(make):
    rig = make(max_num_seqs=1).ready()
    undisturbed = rig.run([request(0)])
    start(rig, request(0), request(1), num_steps=2)
    rig.engine.abort_all()
    assert (rig.engine.num_unfinished, rig.engine.num_running, rig.engine.num_waiting) == (0, 0, 0)
    same_samples(rig.run([request(0)]), undisturbed)


def test_an_abort_of_the_past_does_not_end_a_later_request_of_that_id(rig):
    rig.engine.abort([0])
    assert rig.run([request(0)])[0].finish_reason == "length"
    rig.engine.abort([0])
    assert rig.run([request(0)])[0].finish_reason == "length"


# ---------------------------------------------------------------------------------------------------------- stats


@pytest.mark.parametrize("block_size", [4, 16])
def test_counters_count(make, block_size):
    rig = make(block_size=block_size).ready()
    requests = [request(i, 6, 3, group=1) for i in range(4)] + [request(9, 5, 2)]
    rig.engine.submit(requests, 1)
    stats = rig.engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.policy_version) == (5, 0, 1)
    assert stats.kv_cache_used_share == 0
    steps = count()
    while rig.engine.num_unfinished:
        rig.engine.step()
        if next(steps) == 0:
            first = rig.engine.stats()
            assert (first.num_waiting, first.num_running) == (0, 5)
            assert 0 < first.kv_cache_used_share <= 1
    stats = rig.engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_finished, stats.num_steps) == (0, 0, 5, 3)
    # The prompt of the group is computed once; its other three members share it. Of the other prompt, which begins
    # alike, whatever fills a block is found.
    found = 4 if block_size == 4 and rig.remembers_prefixes else 0
    shared = 3 * 6 if rig.counts_shared else 0
    assert (stats.num_prompt_tokens, stats.num_prefix_tokens) == (4 * 6 + 5 - shared - found, found)
    assert (stats.num_shared_prompt_tokens, stats.num_preemptions) == (shared, 0)
    assert stats.num_generated_tokens == 4 * 3 + 2
    assert stats.kv_cache_used_share == 0
