"""The experts that the engine says tokens went to, against a plain forward of each sequence, whatever was computed
together, shared, cached, broken off or computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hybrid_rl.engines.base import Beginning, FinishedSample, RolloutRequest
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.models import CausalLM
from hybrid_rl.models.experts.routing import find_routers
from tests.support.engines.engine_settings import inplace_settings
from tests.unit.engines.engines import Rig, decode, finish, mixed_requests, request
from tests.unit.models.families import build

FAMILIES = ("qwen3-moe", "deepseek-v3", "olmoe")
TOKEN_BYTES = 2 * 2 * (8 + 16) * 4


def recording(family: str = "qwen3-moe", dtype: torch.dtype = torch.float32, **settings: Any) -> Rig:
    module = build(family, dtype=dtype)
    config = inplace_settings(**{"block_size": 4, "max_num_seqs": 16, **settings})
    engine = InPlaceEngine(CausalLM(module), config, max_length=48, decode=decode, records_experts=True)
    return Rig(engine, module).ready()


def chosen_by(module: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """What the routers of the module itself return for a sequence, [tokens, L, K]."""
    layers: list[np.ndarray] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        layers.append(next(part for part in output if not part.is_floating_point()).numpy())

    handles = [router.register_forward_hook(keep) for router, _ in find_routers(module)]
    with torch.no_grad():
        module(input_ids=torch.tensor([token_ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return np.stack(layers, axis=1)


def check(rig: Rig, requests: list[RolloutRequest], finished: list[FinishedSample]) -> None:
    assert len(finished) == len(requests)
    prompts = {sent.id: sent.prompt_ids for sent in requests}
    for sample in finished:
        token_ids = [*prompts[sample.id], *sample.completion_ids]
        recorded = sample.routed_experts
        assert recorded is not None and recorded.dtype == np.int16 and len(recorded) == len(token_ids)
        assert (recorded[-1] == -1).all()
        own = chosen_by(rig.module, token_ids)[:-1]
        assert (np.sort(recorded[:-1], axis=-1) == np.sort(own, axis=-1)).all(), sample.id


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_prefixes_and_chunks(family):
    """Groups share their prompt and decode together while they are alike; prompts come in chunks of three tokens."""
    rig = recording(family, max_num_batched_tokens=3, kv_cache_memory_bytes=None)
    requests = mixed_requests()
    rig.engine.submit(requests, 1)
    check(rig, requests, finish(rig.engine))
    counters = rig.engine.stats()
    assert counters.num_shared_prompt_tokens > 0
    again = [replace(sent, id=sent.id + 1000, group=None) for sent in requests]
    rig.engine.submit(again, 1)
    check(rig, again, finish(rig.engine))
    assert rig.engine.stats().num_prefix_tokens > counters.num_prefix_tokens


def test_sequences_that_make_room_and_are_computed_again():
    rig = recording(kv_cache_memory_bytes=40 * TOKEN_BYTES)
    requests = [request(number, 5, 16, group=number // 2) for number in range(8)]
    rig.engine.submit(requests, 1)
    check(rig, requests, finish(rig.engine))
    assert rig.engine.stats().num_preemptions > 0


def test_beginnings_are_as_the_weights_that_go_on_choose_them():
    rig = recording()
    requests = [request(number, 6, 12) for number in range(4)]
    rig.engine.submit(requests, 1)
    for _ in range(5):
        rig.engine.step()
    rig.engine.abort([sent.id for sent in requests])
    broken = {event.id: event for event in rig.engine.step()}
    rig.perturb()
    rig.publish(2)
    begun = []
    for sent in requests:
        event = broken[sent.id]
        assert event.routed_experts is None  # they wait, and are computed again
        made = tuple(event.completion_ids), tuple(event.logprobs), tuple(event.versions)
        begun.append(replace(sent, begun=Beginning(*made)))
    rig.engine.submit(begun, 2)
    finished = finish(rig.engine)
    assert {version for sample in finished for version in sample.versions} == {1, 2}
    check(rig, requests, finished)


def test_drafts_that_were_wrong_leave_nothing():
    rig = recording(speculation="on")
    requests = [request(number, 8, 16, temperature=0.0) for number in range(3)]
    for part in range(3):
        sent = [replace(asked, id=asked.id + 10 * part) for asked in requests]
        rig.engine.submit(sent, 1)
        check(rig, sent, finish(rig.engine))
    counters = rig.engine.stats()
    assert counters.num_accepted_tokens > 0


def test_an_engine_that_is_not_asked_records_nothing():
    module = build("qwen3-moe")
    engine = InPlaceEngine(CausalLM(module), inplace_settings(block_size=4), max_length=48, decode=decode)
    rig = Rig(engine, module).ready()
    assert [sample.routed_experts for sample in rig.run([request(0)])] == [None]
