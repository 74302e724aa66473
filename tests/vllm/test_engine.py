"""What the vLLM engine is beyond the contract: a guest that leaves no trace, and one that refuses what is not right."""

import logging
import os
import random
import signal
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from vllm.config import ParallelConfig

from hybrid_rl.engines.base import TAGS
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import ConfigError, DataError, EngineStateError
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.vllm.arguments import engine_arguments, kv_cache_bytes
from hybrid_rl.vllm.build_engine import reason
from tests.support.engines.engine_settings import vllm_settings
from tests.support.inside.vllm import configure, forget_failure, llm_of
from tests.unit.engines.engines import finish, forward_logprobs, request, same_samples
from tests.vllm.rigs import CONFIG, SETTINGS, VLLMRig, make_engine, tiny

pytestmark = pytest.mark.slow


def process():
    """What a process has that vLLM is known to change, and what it might."""
    return {
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": tuple(map(str, np.random.get_state(legacy=False).items())),
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "set_num_threads": torch.set_num_threads,
        "threads": torch.get_num_threads(),
        "handlers": logging.getLogger().handlers[:],
        "level": logging.getLogger().level,
        "excepthook": sys.excepthook,
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    }


@pytest.fixture(scope="module")
def start():
    """The rig, and the process before and after its start, which follows one that is refused."""
    before = process()
    with pytest.raises(ConfigError, match=r"have head_dim=16, .* 32, 64, 80, .*set rollout.engine=inplace"):
        make_engine(tiny(num_attention_heads=4))
    assert not dist.is_initialized()
    rig = VLLMRig.start()
    yield rig, before, process()
    rig.engine.close()
    assert "rollout-engine" not in {thread.name for thread in threading.enumerate()}
    assert not dist.is_initialized()  # the group was the engine's own
    with pytest.raises(EngineStateError, match="the engine is closed"):
        rig.engine.step()


@pytest.fixture
def rig(start):
    return start[0].renewed().ready()


def test_the_process_is_as_it_was_before_the_start(start):
    _, before, after = start
    for name, value in before.items():
        assert after[name] == value, name


def test_steps_handoffs_and_sleep_leave_no_trace(rig):
    before = process()
    rig.run([request(0), request(1, 9, temperature=0.7)])
    rig.publish(2)
    rig.engine.sleep(TAGS)
    rig.engine.wake(TAGS)
    for name, value in process().items():
        assert value == before[name], name


def test_without_seeds_of_requests_the_noise_follows_the_first_ones(rig):
    """Two equal requests of a call draw differently; a later call repeats it, whatever was drawn in between."""
    configure(rig.engine, vllm_settings(**{**SETTINGS, "per_request_seeds": False}))
    first = rig.run([request(0, 4, 12, seed=5), request(1, 4, 12, seed=5)])
    assert first[0].completion_ids != first[1].completion_ids
    torch.rand(3)
    other = rig.run([request(0, 4, 12, seed=6)])
    assert other[0].completion_ids != first[0].completion_ids
    same_samples(rig.run([request(0, 4, 12, seed=5), request(1, 4, 12, seed=5)]), first)
    expected = forward_logprobs(rig.module, request(0, 4, 12), first[0])
    torch.testing.assert_close(torch.tensor(first[0].logprobs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3, "temperature": 0.0},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(rig, params):
    """Against the definitions, written down anew."""
    sent = request(0, 6, 8, **params)
    sample = rig.run([sent])[0]
    token_ids = torch.tensor([*sent.prompt_ids, *sample.completion_ids])
    with torch.no_grad():
        logits = rig.module(input_ids=token_ids[None], use_cache=False).logits[0]
    for position, (token, logprob) in enumerate(zip(sample.completion_ids, sample.logprobs, strict=True)):
        end = len(sent.prompt_ids) + position
        row = logits[end - 1].clone()
        for seen in set(token_ids[:end].tolist()):
            penalty = params.get("repetition_penalty", 1.0)
            row[seen] = row[seen] / penalty if row[seen] > 0 else row[seen] * penalty
        row /= params.get("temperature", 1.0) or 1.0
        p = row.softmax(0)
        kept = torch.ones_like(p, dtype=torch.bool)
        if "top_k" in params:
            kept &= p >= p.sort(descending=True).values[params["top_k"] - 1]
        if "top_p" in params:
            ordered = p.sort(descending=True).values
            kept &= p >= ordered[(ordered.cumsum(0) < params["top_p"]).sum()]
        if "min_p" in params:
            kept &= p >= params["min_p"] * p.max()
        assert kept[token]
        assert logprob == pytest.approx(float((p[token] / p[kept].sum()).log()), abs=1e-5)
        if params.get("temperature") == 0.0:
            assert token == int(row.argmax())


def test_colder_than_vllm_samples_is_refused(rig):
    with pytest.raises(DataError, match=r"lowest sampling temperature is 0.01, but temperature=0.005"):
        rig.run([request(0, temperature=0.005)])
    assert rig.engine.num_unfinished == 0


def test_a_handoff_that_breaks_leaves_an_engine_that_refuses_to_generate(rig):
    rig.run([request(0)])

    class Breaks(TensorSource):
        def deliver(self, *args, **kwargs):
            raise OSError("the peer is gone")

    with pytest.raises(OSError, match="the peer is gone"):
        rig.engine.update_weights(Breaks.of(rig.module), 2)
    assert rig.engine.policy_version == -1
    for call in (rig.engine.step, lambda: rig.engine.submit([request(2)], 2)):
        with pytest.raises(EngineStateError, match="never given any"):
            call()
    rig.publish(3)
    assert [sample.versions for sample in rig.run([request(1, 4, 6)], 3)] == [[3] * 6]


def test_other_weights_than_the_engines_are_refused_before_a_byte_is_written(rig):
    other = tiny(num_hidden_layers=1)
    with pytest.raises(Exception, match="the trainer's weights are"):
        rig.engine.update_weights(TensorSource.of(other), 2)
    assert rig.engine.policy_version == 1


def test_after_an_error_of_vllm_the_engine_says_so(rig, monkeypatch):
    rig.engine.submit([request(0, max_tokens=4)], 1)
    rig.engine.step()

    def fails():
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm_of(rig.engine), "step", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            rig.engine.step()
    for call in (rig.engine.step, lambda: rig.engine.submit([request(1)], 1)):
        with pytest.raises(EngineStateError, match=r"the engine failed \(RuntimeError: no memory\); make a new one"):
            call()
    forget_failure(rig.engine)
    finish(rig.engine)


def test_a_token_without_a_finite_logprob_stops_the_rollout(rig):
    with torch.no_grad():
        next(rig.module.parameters()).fill_(float("nan"))
    rig.publish(2)
    with pytest.raises(Exception, match="(?i)not finite|nan"):
        EngineClient(rig.engine).generate([request(0)], 2)
    forget_failure(rig.engine)


# ------------------------------------------------------------------------------------------------------- arguments


def arguments(device="cpu", **given):
    config = vllm_settings(**{**SETTINGS, "others": given})
    return engine_arguments(
        config,
        "folder",
        dtype=torch.bfloat16,
        max_length=100,
        seed=7,
        trust_remote_code=False,
        can_sleep=False,
        device=torch.device(device),
    )


def test_arguments_of_vllm_pass_through_beside_ours():
    given = arguments(block_size=64, long_prefill_token_threshold=5, additional_config={"mine": 1})
    assert (given["block_size"], given["long_prefill_token_threshold"]) == (64, 5)
    assert (given["dtype"], given["max_model_len"], given["seed"]) == ("bfloat16", 100, 7)
    assert given["additional_config"] == {"mine": 1}
    assert given["logprobs_mode"] == "processed_logprobs"


def test_blocks_on_a_cpu_are_as_small_as_they_can_be():
    """Conversations find full blocks again; on a GPU vLLM's own choice is small enough."""
    assert arguments()["block_size"] == 32
    assert "block_size" not in arguments("cuda")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "blok_size",
            r"engine_args.blok_size is not an argument of the vLLM that is installed; did you mean .block_",
        ),
        (
            "gpu_memory_utilization",
            r"engine_args.gpu_memory_utilization cannot be set: set kv_cache_memory_bytes",
        ),
    ],
)
def test_arguments_that_are_unknown_or_not_the_users_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        arguments(**{name: 1})


def test_a_second_engine_is_refused_and_the_first_does_not_notice(rig):
    expected = rig.run([request(0)])
    before = process()
    with pytest.raises(ConfigError, match=r"another Trainer of this process has a vLLM engine.* close\(\) that one"):
        make_engine(tiny())
    for name, value in process().items():
        assert value == before[name], name
    same_samples(rig.run([request(0)]), expected)


def test_a_cache_that_cannot_hold_a_sequence_is_refused(rig):
    """The sequence takes 64 tokens of 1024 bytes, and vLLM's own block 32."""

    def size(given):
        config = vllm_settings(**{**SETTINGS, "kv_cache_memory_bytes": given})
        vllm_config = llm_of(rig.engine).vllm_config
        return kv_cache_bytes(config, vllm_config, max_length=64, device=torch.device("cpu"), memory_share=1.0)

    assert size(98304) == 98304
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=98303 cannot hold one sequence of 64 tokens.* 98304"):
        size(98303)


def test_what_vllm_says_of_a_refused_argument_is_said_without_its_configuration():
    with pytest.raises(ValueError) as caught:
        ParallelConfig(tensor_parallel_size=0)
    assert reason(caught.value) == "tensor_parallel_size: Input should be greater than or equal to 1"
    assert reason(ValueError("no")) == "no"


def test_the_cache_has_room_for_all_sequences_where_memory_allows_and_for_one_in_any_case(rig):
    """Keys and values of 2 layers, 2 heads, 32 dims, fp32: 1024 bytes a token; 64 tokens are two blocks of 32."""
    vllm_config = llm_of(rig.engine).vllm_config

    def size(share):
        return kv_cache_bytes(CONFIG, vllm_config, max_length=64, device=torch.device("cpu"), memory_share=share)

    assert size(1.0) == 1024 * (64 * 64 + 32) == rig.engine.kv_cache_bytes
    assert size(1e-12) == 1024 * (64 + 32)
    assert rig.engine.kv_cache_tokens == 64 * 64
