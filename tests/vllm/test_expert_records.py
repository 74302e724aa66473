"""The experts that vLLM chose, against those that a plain forward of transformers' model chooses."""

from __future__ import annotations

import importlib
import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from vllm.model_executor.layers.fused_moe.layer import MoERunner

from hybrid_rl import Trainer
from hybrid_rl.engines.base import Beginning, FinishedSample, Generation, RolloutRequest, SamplingParams
from hybrid_rl.errors import ConfigError, EngineStateError, ModelError
from hybrid_rl.vllm.expert_records import PlannedRecord, ReturnedExperts, returned_on_every_rank
from hybrid_rl.vllm.versions import has
from tests.distributed.ranks import run_ranks
from tests.support.engines.engine_settings import vllm_settings
from tests.support.inside.vllm import forget_failure, llm_of
from tests.support.tiny import build_tokenizer, spread, sums
from tests.unit.engines.engines import Rig, finish
from tests.unit.engines.engines import request as short_request
from tests.unit.models.families import FAMILIES, VOCABULARY, build
from tests.vllm.rigs import BLOCK_SIZE, SETTINGS, make_engine, tiny
from tests.vllm.test_trainer import KEYS

pytestmark = pytest.mark.slow

LONGEST, BUDGET = 192, 48  # tokens of a sequence, and of a pass: prompts are computed in chunks
TOKEN_BYTES = 2 * 2 * (32 + 32) * 4  # of a token in the cache: layers, key heads, dims of key and value, fp32


def model_of(name: str) -> PreTrainedModel:
    heads = {"head_dim": 32} if "head_dim" in FAMILIES[name].settings else {}
    return tiny(name, max_position_embeddings=LONGEST, **heads)


def rig_of(name: str, *, num_blocks: int = 14, num_ranks: int = 1) -> Rig:
    """Few blocks, so that requests make room for each other."""
    module = model_of(name)
    config = vllm_settings(
        **{
            **SETTINGS,
            "tensor_parallel_size": num_ranks,
            "per_request_seeds": False,
            "max_num_seqs": 8,
            "max_num_batched_tokens": BUDGET,
            "kv_cache_memory_bytes": num_blocks * BLOCK_SIZE * TOKEN_BYTES // num_ranks,
        }
    )
    return Rig(make_engine(module, config, max_length=LONGEST, records_experts=True), module).ready()


def mixed_requests(num_requests: int = 12, seed: int = 0) -> list[RolloutRequest]:
    """Prompts that share 70 tokens, two whole blocks, members of a group that share all, completions that have begun,
    and prompts of their own."""
    draw = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.integers(2, VOCABULARY, int(draw.integers(low, high))).tolist())

    shared = tokens(70, 71)
    requests = []
    for number in range(num_requests):
        prompt = {0: (*shared, *tokens(1, 30)), 1: shared, 2: (*shared, 5), 3: tokens(2, 60)}[number % 4]
        begun = tokens(9, 10) if number % 4 == 2 else ()
        beginning = Beginning(begun, (-1.0,) * len(begun), (0,) * len(begun))
        params = SamplingParams(int(draw.integers(40, 80)), seed=number)
        requests.append(RolloutRequest(number, prompt, params, group=number // 4, begun=beginning))
    return requests


def plain_choice(module: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """[tokens, layers, experts per token], sorted: what the modules of experts are told in one forward."""
    chosen: list[torch.Tensor] = []

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen.append((args[1] if len(args) > 1 else kwargs["top_k_index"]).reshape(len(token_ids), -1))

    layers = [part for part in module.modules() if "top_k_index" in inspect.signature(part.forward).parameters]
    hooks = [part.register_forward_pre_hook(keep, with_kwargs=True) for part in layers]
    with torch.no_grad():
        module(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values.numpy()


def num_different(module: PreTrainedModel, sent: RolloutRequest, sample: FinishedSample) -> tuple[int, int]:
    """Choices of a token and layer that are not the plain ones, of so many; all but the last token have one."""
    assert sample.routed_experts is not None and sample.routed_experts.dtype == np.int16
    wanted = plain_choice(module, [*sent.prompt_ids, *sample.completion_ids])
    assert sample.routed_experts.shape == wanted.shape
    num_known = (
        len(wanted) if sample.finish_reason != "abort" else int((sample.routed_experts >= 0).all((1, 2)).sum()) + 1
    )
    assert (sample.routed_experts[num_known - 1 :] == -1).all()
    different = (np.sort(sample.routed_experts, -1) != wanted)[: num_known - 1].any(-1)
    return int(different.sum()), different.size


def runner_of(rig: Rig) -> Any:
    """vLLM's model runner."""
    return llm_of(rig.engine).engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def run_watched(rig: Rig, requests: list[RolloutRequest]) -> tuple[list[FinishedSample], set[int], set[str]]:
    """The samples, the numbers of tokens of passes, and the requests that made room for others."""
    rig.engine.begin_rollout()
    rig.engine.submit(requests, 1)
    scheduler = llm_of(rig.engine).engine_core.engine_core.scheduler
    samples, lengths, preempted = [], set(), set()
    schedule = scheduler.schedule

    def watched(*args: Any) -> Any:
        output = schedule(*args)
        lengths.add(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = watched
    try:
        while rig.engine.num_unfinished:
            samples += rig.engine.step()
            preempted |= {name for name, request in scheduler.requests.items() if request.num_preemptions}
    finally:
        scheduler.schedule = schedule
    return samples, lengths, preempted


NAMES = ["qwen3-moe", "glm4-moe", "mixtral", "olmoe", "qwen2-moe", "granite-moe", "granite-moe-shared", "ernie4_5-moe"]
NAMES += ["exaone-moe", "flex-olmo", "hunyuan-moe"]


@pytest.mark.timeout(600)
def test_a_trainer_repeats_every_choice(tmp_path: Path) -> None:
    keys = {**KEYS, "routing_replay": "rollout", "max_steps": 2, "output_dir": str(tmp_path)}
    with Trainer(model_of("qwen3-moe"), spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
        steps = [metrics for _, metrics in trainer.steps()]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["routing/unrecorded_share"] == metrics["routing/changed_share"] == 0
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.fixture(scope="module", params=[NAMES[0], *(pytest.param(name, marks=pytest.mark.sweep) for name in NAMES[1:])])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = rig_of(request.param)
    yield rig
    rig.engine.close()


def test_every_choice_is_the_models(rig: Rig) -> None:
    requests = mixed_requests()
    samples, lengths, preempted = run_watched(rig, requests)
    counts = [num_different(rig.module, requests[sample.id], sample) for sample in samples]
    assert [different for different, _ in counts] == [0] * len(requests)
    assert sum(total for _, total in counts) > 1000
    # All of what was meant to happen has happened.
    assert max(lengths) == BUDGET and preempted and rig.engine.counters.num_prefix_tokens > 2 * BLOCK_SIZE
    assert any(sent.begun.token_ids for sent in requests)


@pytest.mark.parametrize("rig", NAMES[:1], indirect=True)
def test_what_was_broken_off_has_what_was_computed_and_goes_on_under_other_weights(rig: Rig) -> None:
    requests, scheduler = mixed_requests(seed=1), llm_of(rig.engine).engine_core.engine_core.scheduler

    def broken_off(is_time: Callable[[], bool]) -> tuple[list[FinishedSample], list[int]]:
        """Submit, break off when it is time; the samples, and of how many tokens each has the experts."""
        rig.engine.begin_rollout()
        rig.engine.submit(requests, 1)
        events = []
        while not is_time():
            events += rig.engine.step()
        rig.engine.abort([sent.id for sent in requests])
        events = sorted([*events, *rig.engine.step()], key=lambda event: event.id)
        counts = [num_different(rig.module, sent, event) for sent, event in zip(requests, events, strict=True)]
        assert [different for different, _ in counts] == [0] * len(requests)
        num_layers = events[0].routed_experts.shape[1]
        return events, [total // num_layers for _, total in counts]

    def has_preempted() -> bool:
        return any(known.num_preemptions and not known.num_computed_tokens for known in scheduler.requests.values())

    _, num_known = broken_off(lambda: any(known.num_computed_tokens for known in scheduler.requests.values()))
    assert sorted(num_known) == [0] * 11 + [BUDGET]  # a part of a prompt; the others had to wait
    broken, num_known = broken_off(has_preempted)
    assert any(event.completion_ids and not known for event, known in zip(broken, num_known, strict=True))
    decoding = [
        event
        for event, sent, known in zip(broken, requests, num_known, strict=True)
        if known == len(sent.prompt_ids) + len(event.completion_ids) - 1
    ]
    assert decoding
    going_on = [
        replace(sent, begun=Beginning(*map(tuple, (event.completion_ids, event.logprobs, event.versions))))
        for sent, event in zip(requests, broken, strict=True)
        if event.finish_reason == "abort"
    ]
    rig.perturb()
    rig.publish(2)
    rig.engine.submit(going_on, 2)
    for sample in finish(rig.engine):
        different, total = num_different(rig.module, requests[sample.id], sample)
        assert not different and total


@pytest.mark.parametrize("rig", NAMES[:1], indirect=True)
def test_a_router_that_is_not_seen_and_one_that_chooses_twice_end_the_step(rig: Rig) -> None:
    engine = rig.engine
    layers = [layer for layer in runner_of(rig).get_model().modules() if isinstance(layer, MoERunner)]
    choosers = [layer.router if not layer.is_monolithic else layer.routed_experts.quant_method for layer in layers]
    keep = [chooser.capture_fn for chooser in choosers]
    for hooks, message in (
        ([keep[0], None], r"the layers of experts \[1\] were not seen to choose"),
        ([None, None], r"the layers of experts \[0, 1\] were not seen to choose"),
        ([keep[0], keep[0]], "layer 0 of experts chose twice"),
    ):
        for chooser, hook in zip(choosers, hooks, strict=True):
            chooser.capture_fn = hook
        engine.submit([short_request(0)], engine.policy_version)
        with pytest.raises(EngineStateError, match=message):
            engine.step()
        forget_failure(engine)
        for chooser, hook in zip(choosers, keep, strict=True):
            chooser.capture_fn = hook
        engine.abort([0])
        engine.step()


@pytest.mark.parametrize(
    ("family", "settings", "device", "error", "message"),
    [
        ("qwen2", {}, "cpu", ModelError, "has no experts whose choice could be recorded"),
        ("qwen3-moe", {"enforce_eager": False}, "cpu", ConfigError, "those of a compiled model do not; leave it out"),
        (
            "qwen3-moe",
            {"enable_prefix_caching": False},
            "cuda",
            ConfigError,
            "by the blocks of its prefix cache; leave it out",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_vllm_is_built(
    family: str, settings: dict[str, Any], device: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PlannedRecord(vllm_settings(**{**SETTINGS, **settings}), torch.device(device), build(family))


# ------------------------------------------------------------------------------------ what vLLM returns itself, on GPUs


class Layer(MoERunner):
    """A layer of experts that computes nothing."""

    is_monolithic = False

    def __init__(self, number: int, num_chosen: int = 2) -> None:
        torch.nn.Module.__init__(self)
        self.layer_name = f"model.layers.{number}.mlp.experts"
        self.moe_config = SimpleNamespace(experts_per_token=num_chosen)


def llm_with(*layers: Layer) -> Any:
    """An LLMEngine of which a record asks the model and what it has returned so far."""
    runner = SimpleNamespace(get_model=lambda: torch.nn.ModuleList(layers))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
    core = SimpleNamespace(model_executor=executor, scheduler=None)
    return SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core), output_processor=SimpleNamespace(request_states={})
    )


def test_rows_that_vllm_returns_are_those_of_layers_of_experts() -> None:
    """Layers 1 and 2 of 3; requests that vLLM ended, that a stop string ended, broken off, with too few rows."""
    llm = llm_with(Layer(2), Layer(1))
    record = ReturnedExperts(llm, 2)
    rows = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    states = llm.output_processor.request_states
    for number in range(5):
        record.admit(number, f"{number}-name")
    record.end_step(
        [
            SimpleNamespace(request_id="0", finished=True, outputs=[SimpleNamespace(routed_experts=rows)]),
            SimpleNamespace(request_id="1", finished=False, outputs=[SimpleNamespace(routed_experts=None)]),
            SimpleNamespace(request_id="3", finished=True, outputs=[SimpleNamespace(routed_experts=rows[:4])]),
        ]
    )
    states["1-name"] = SimpleNamespace(routed_experts_chunks=[rows[:3], rows[3:]])
    states["2-name"] = SimpleNamespace(routed_experts_chunks=[])

    def generation(number: int) -> Generation:
        return Generation(RolloutRequest(number, (5, 6, 7), SamplingParams(3)), tokens=[8, 9, 10])

    wanted = [[[6 * i + 2, 6 * i + 3], [6 * i + 4, 6 * i + 5]] for i in range(5)] + [[[-1, -1], [-1, -1]]]
    for number in (0, 1):
        assert record.take(generation(number), is_whole=True).tolist() == wanted
    for number in (2, 7):  # 7: vLLM was never given it
        assert (record.take(generation(number), is_whole=False) == -1).all()
    with pytest.raises(EngineStateError, match="6 tokens, and vLLM gave the experts of 4 of the 5 that it computed"):
        record.take(generation(3), is_whole=True)


def test_layers_that_cannot_be_matched_are_refused() -> None:
    with pytest.raises(ModelError, match="has 2 layers of experts, but vLLM's code for it has 1"):
        ReturnedExperts(llm_with(Layer(0)), 2)
    with pytest.raises(ModelError, match=r"different numbers of experts per token \(\[2, 4\]\)"):
        ReturnedExperts(llm_with(Layer(0), Layer(1, 4)), 2)


@pytest.mark.parametrize("rig", NAMES[:1], indirect=True)
@pytest.mark.skipif(not has("first_rank_keeps_experts", None), reason="only the first rank keeps experts since 0.32")
def test_every_rank_of_a_replica_keeps_what_vllm_returns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own connector, on a rank that is not the first."""
    connectors = importlib.import_module("vllm.distributed.aux_output_connector.connector")
    worker = importlib.import_module("vllm.distributed.aux_output_connector.worker")
    monkeypatch.setattr(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=False))
    routers = [layer.router for layer in runner_of(rig).get_model().modules() if isinstance(layer, MoERunner)]
    keep = [router.capture_fn for router in routers]
    keeps = {}
    for is_inside in (False, True):
        with returned_on_every_rank() if is_inside else nullcontext():
            connector = worker.AuxOutputWorkerConnector(
                vllm_config=llm_of(rig.engine).vllm_config,
                model=runner_of(rig).get_model(),
                kv_cache_config=runner_of(rig).kv_cache_config,
            )
        connector.begin_step(connectors.AuxOutputConnectorMetadata(0, {"a": 0}, {}, ()))
        spans = {"num_computed_tokens_np": np.array([0]), "query_start_loc_np": np.array([0, 5])}
        pending = connector.prepare_output(SimpleNamespace(req_ids=["a"], **spans))
        keeps[is_inside] = pending is not None
        if pending is not None:
            pending.enqueue_cpu_copy(np.array([1]), np.array([0]))
            assert pending.process_output()["a"].rows.shape == (5, 2, 2)
        connector.close()
    for router, hook in zip(routers, keep, strict=True):
        router.set_capture_fn(hook)
    assert keeps == {False: False, True: True}


# ------------------------------------------------------------------------------------------------ tensor parallelism


def share(rank: int, num_ranks: int) -> list[tuple[int, int, int]]:
    """By sample: choices that are not the plain ones, of so many, and the hash of them all on this rank."""
    rig = rig_of("qwen3-moe", num_ranks=num_ranks)
    requests = mixed_requests()
    samples, _, preempted = run_watched(rig, requests)
    rig.engine.close()
    assert preempted
    return [
        (*num_different(rig.module, requests[sample.id], sample), zlib.crc32(sample.routed_experts.tobytes()))
        for sample in samples
        if sample.routed_experts is not None
    ]


@pytest.mark.sweep
def test_ranks_of_a_replica_choose_alike_and_as_the_model() -> None:
    first, second = run_ranks(share, 2, preloaded=("tests.vllm.rigs",))
    assert first == second and len(first) == 12
    assert not any(different for different, _, _ in first)
