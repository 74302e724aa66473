"""Decode passes as graphs, on a stand-in that records what a capture does and runs it again."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch

from hybrid_rl.engines.base import KV_CACHE, TAGS, RolloutRequest, SamplingParams
from hybrid_rl.engines.inplace.cuda_graphs import DecodePass, PassTables, graph_sizes
from hybrid_rl.errors import EngineStateError, MemoryStateError
from tests.support.inside.engines import graphs_of, wrap_capture
from tests.unit.engines.engines import break_off, finish, inplace, mixed_requests, request, same_samples
from tests.unit.engines.inplace.graph_stand_in import Graph, force_device_path

pytestmark = pytest.mark.slow


@pytest.fixture
def device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    force_device_path(monkeypatch)


def plain_samples(family="qwen2", requests=None, perturb=False, **settings):
    """What the engine gives without any of it."""
    rig = inplace(family, **settings).ready()
    if perturb:
        rig.perturb()
        rig.publish(2)
    return rig.run(requests or mixed_requests(), 2 if perturb else 1)


FEW_SEQUENCES, SHORT_PASSES = {"max_num_seqs": 5}, {"max_num_batched_tokens": 7}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", FEW_SEQUENCES),
        pytest.param("qwen2", SHORT_PASSES, marks=pytest.mark.sweep),
        pytest.param("mistral", FEW_SEQUENCES, marks=pytest.mark.sweep),
        ("mistral", SHORT_PASSES),
        pytest.param("gemma2", FEW_SEQUENCES, marks=pytest.mark.sweep),
        ("gemma2", SHORT_PASSES),
    ],
    ids=str,
)
def test_graphs_and_what_runs_beside_them_give_the_samples_of_plain_passes(family, settings, monkeypatch):
    """Mixed passes, ever other sizes, chunked prompts, greedy and truncated samples among them."""
    expected = plain_samples(family, **settings)
    force_device_path(monkeypatch)
    rig = inplace(family, **settings).ready()
    same_samples(rig.run(mixed_requests()), expected)
    assert Graph.log.count("replay") > 10


def test_a_repetition_penalty_is_applied_beside_the_graph(monkeypatch):
    sent = [request(i, 4, 12, repetition_penalty=1.0 + i) for i in range(3)]
    expected = plain_samples(requests=sent)
    force_device_path(monkeypatch)
    same_samples(inplace().ready().run(sent), expected)


def interrupted_twins():
    """Two requests alike, computed again in one pass with new weights when a single token of the second is not in the
    blocks that the first fills in that very pass."""
    rig = inplace().ready()
    requests = [request(i, 4, 12, temperature=0.0) for i in range(2)]
    rig.engine.submit(requests, 1)
    for _ in range(5):
        rig.engine.step()
    going_on = break_off(rig, requests)
    rig.perturb()
    rig.publish(2)
    rig.engine.submit(going_on, 2)
    return finish(rig.engine), rig.engine.stats()


def test_what_comes_back_with_one_token_reads_blocks_that_its_own_pass_writes(monkeypatch):
    expected, stats = interrupted_twins()
    assert stats.num_prefix_tokens == 8
    force_device_path(monkeypatch)
    same_samples(interrupted_twins()[0], expected)


def followed(answer):
    """A prompt that goes on where a running answer is just now: it reads a block that the other's decode step fills."""
    rig = inplace().ready()
    first = request(0, 4, 12, temperature=0.0)
    rig.engine.submit([first], 1)
    for _ in range(4):
        rig.engine.step()
    later = RolloutRequest(1, (*first.prompt_ids, *answer[:4], 7), SamplingParams(6, temperature=0.0))
    rig.engine.submit([later], 1)
    return finish(rig.engine), rig.engine.stats()


def test_a_prompt_reads_what_a_decode_step_of_its_own_pass_writes(monkeypatch):
    answer = plain_samples(requests=[request(0, 4, 12, temperature=0.0)])[0].completion_ids
    expected, stats = followed(answer)
    assert stats.num_prefix_tokens == 8
    force_device_path(monkeypatch)
    same_samples(followed(answer)[0], expected)


def test_sizes_are_few_and_the_largest_is_captured_first_into_one_pool(device_path, monkeypatch):
    assert graph_sizes(256) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]
    assert (graph_sizes(1), graph_sizes(3), graph_sizes(16)) == ([1], [1, 2, 3], [1, 2, 4, 8, 16])
    assert len(graph_sizes(1024)) == 15
    rig = inplace().ready()
    graphs = graphs_of(rig.engine)
    order, pools = [], []

    def capture(captured, self, size, memory, pool):
        order.append(size)
        pools.append(pool)
        return captured(self, size, memory, pool)

    wrap_capture(monkeypatch, graphs, capture)
    rig.run([request(0)])
    assert order == [16, 8, 4, 2, 1]
    assert pools[0] is None and len({*pools[1:]}) == 1
    assert set(Graph.modes) == {"thread_local"}


def captures_of(rig, version, requests=None):
    """How often a rollout captured."""
    before = Graph.log.count("capture")
    rig.run(requests or [request(0, 5, 4), request(1, 3, 6)], version)
    return Graph.log.count("capture") - before


def test_graphs_are_captured_once_and_follow_new_weights_and_nights(monkeypatch):
    gc.collect()  # engines of other tests
    driver = force_device_path(monkeypatch)
    rig = inplace().ready()
    assert captures_of(rig, 1) == 5
    held = driver.ledger()
    assert held.physical_bytes >= rig.engine.kv_cache_bytes
    for version in (2, 3):
        rig.engine.sleep(TAGS)
        assert driver.ledger().physical_bytes == rig.engine.stats().kv_cache_bytes == 0
        rig.perturb()
        rig.engine.wake(TAGS)
        assert driver.ledger() == held
        rig.publish(version)
        assert captures_of(rig, version) == 0
    monkeypatch.undo()
    plain = inplace().ready()
    plain.perturb()
    plain.perturb()
    plain.publish(3)
    expected = plain.run(mixed_requests(), 3)
    force_device_path(monkeypatch)
    same_samples(rig.run(mixed_requests(), 3), expected)


def test_a_cache_without_memory_to_wake_sleeps_on(monkeypatch):
    gc.collect()  # engines of other tests
    driver = force_device_path(monkeypatch)
    rig = inplace().ready()
    assert captures_of(rig, 1) == 5
    rig.engine.sleep({KV_CACHE})
    driver.reset(budget=4096)
    with pytest.raises(MemoryStateError, match="'kv_cache' cannot wake: cuMemCreate of [0-9]+ bytes"):
        rig.engine.wake(TAGS)
    assert (rig.engine.state.value, driver.ledger().physical_bytes) == ("weights", 0)
    driver.reset()
    rig.engine.wake(TAGS)
    assert captures_of(rig, 1) == 0


def test_a_cache_that_cannot_sleep_generates_on_as_if_it_had_slept(monkeypatch):
    expected = plain_samples()
    driver = force_device_path(monkeypatch)
    rig = inplace().ready()
    rig.run(mixed_requests())
    driver.fail("cuMemUnmap", code=700)
    with pytest.raises(MemoryStateError, match="'kv_cache' cannot sleep: cuMemUnmap.*it stays awake"):
        rig.engine.sleep({KV_CACHE})
    assert rig.engine.state.value == "ready"
    same_samples(rig.run(mixed_requests()), expected)


def test_a_closed_engine_has_given_its_cache_back(monkeypatch):
    gc.collect()
    driver = force_device_path(monkeypatch)
    rig = inplace().ready()
    rig.run([request(0)])
    rig.engine.close()
    rig.engine.close()
    assert driver.ledger().physical_bytes == rig.engine.stats().kv_cache_bytes == 0
    with pytest.raises(EngineStateError, match="asleep"):
        rig.run([request(1)])


def test_weights_that_moved_are_noticed_before_a_graph_reads_the_old_ones(device_path, monkeypatch, caplog):
    """As gathered weights do from phase to phase."""
    expected = plain_samples(requests=[request(0, 4, 9)], perturb=True)
    force_device_path(monkeypatch)
    rig = inplace().ready()
    assert captures_of(rig, 1) == 5
    rig.engine.sleep(TAGS)
    old = [parameter.data for parameter in rig.module.parameters()]  # held, so that the address is not used again
    for parameter in rig.module.parameters():
        parameter.data = parameter.data.clone()
    rig.perturb()
    rig.engine.wake(TAGS)
    rig.publish(2)
    with caplog.at_level(logging.INFO, "hybrid_rl"):
        same_samples(rig.run([request(0, 4, 9)], 2), expected)
    assert f"has another address, or is new ({len(old)} tensors in all)" in caplog.text


def test_longer_sequences_than_were_expected_get_new_graphs(device_path, caplog):
    rig = inplace().ready()
    assert captures_of(rig, 1) == 5
    with caplog.at_level(logging.INFO, "hybrid_rl"):
        assert captures_of(rig, 1, [request(2, 40, 20)]) == 5
    assert "a sequence may take 15 blocks, and they were made for 12" in caplog.text


def test_the_bytes_of_a_pass_are_read_as_they_were_written():
    tables = PassTables(20, 7)
    step = DecodePass(
        np.array([5, 6, 7]),
        np.array([0, 9, 30]),
        np.array([1.0, 0.5, 0.0], np.float32),
        np.array([0.25, 0.5, 1 - 2**-40]),
        np.arange(12, dtype=np.int32).reshape(3, 4),
    )
    host = tables.fill(step, torch.full((tables.num_bytes,), 255, dtype=torch.uint8))
    assert len(host) == tables.num_bytes - 3 * 4 * 32  # three blocks of 20 sequences, rounded up, are not needed
    there = torch.full((tables.num_bytes,), 255, dtype=torch.uint8)
    there[: len(host)] = host
    views = tables.views(there)
    assert views["token_ids"].tolist() == [5, 6, 7] + [0] * 17
    assert views["positions"].tolist() == [0, 9, 30] + [0] * 17
    assert views["context_length"].tolist() == [1, 10, 31] + [0] * 17
    assert views["temperature"].tolist() == [1.0, 0.5, 0.0] + [0.0] * 17
    assert views["uniform"].tolist() == [0.25, 0.5, 1 - 2**-40] + [0.0] * 17
    assert views["block_table"].shape == (20, 7) and views["block_table"].stride() == (1, 32)
    assert views["block_table"][:3, :4].tolist() == step.block_table.tolist()
    assert all(view.storage_offset() * view.element_size() % 256 == 0 for view in views.values())
