"""The embedded engine on the device: every family in fp32 against `model.generate` and a full forward, and in bf16."""

from __future__ import annotations

import gc

import pytest
import torch

from hybrid_rl.engines.base import KV_CACHE, TAGS, FinishedSample, RolloutRequest
from tests.gpu.device import cuda_only, rig_of
from tests.unit.engines.engines import Rig, forward_logprobs, inplace, mixed_requests, request
from tests.unit.models.families import SUPPORTED

GREEDY = [request(i, 3 + 5 * i, 14, temperature=0.0) for i in range(3)]


def generated(rig: Rig, sent: RolloutRequest) -> list[int]:
    token_ids = torch.tensor([sent.prompt_ids])
    out = rig.module.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=sent.params.max_tokens,
        min_new_tokens=sent.params.max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(sent.prompt_ids) :].tolist()


@pytest.mark.parametrize("family", SUPPORTED)
def test_fp32_greedy_is_generate_and_logprobs_are_those_of_a_full_forward(family: str) -> None:
    rig = rig_of(family)
    for sent, sample in zip(GREEDY, rig.run(GREEDY), strict=True):
        assert sample.completion_ids == generated(rig, sent)
        expected = forward_logprobs(rig.module, sent, sample)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=1e-5, atol=2e-5)


def best_gap(rig: Rig, sent: RolloutRequest, sample: FinishedSample) -> float:
    """How far the chosen tokens are below the best ones in ln p, by one full forward of the same precision."""
    token_ids = torch.tensor([*sent.prompt_ids, *sample.completion_ids])
    with torch.no_grad():
        log_p = rig.module(input_ids=token_ids[None], use_cache=False).logits[0].float().log_softmax(1)
    log_p = log_p[len(sent.prompt_ids) - 1 : -1]
    return float((log_p.amax(1) - log_p.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]).max())


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "gpt2"])
def test_bf16_takes_tokens_as_good_as_the_best_up_to_rounding(family: str) -> None:
    """bf16 keeps 8 bits and sums in another order with every shape: tokens of nearly equal logits may change places."""
    rig = rig_of(family, dtype=torch.bfloat16)
    for sent, sample in zip(GREEDY, rig.run(GREEDY), strict=True):
        assert best_gap(rig, sent, sample) < 0.2
        expected = forward_logprobs(rig.module, sent, sample).float()
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=0.25)


def test_samples_are_those_of_the_cpu() -> None:
    """The same noise and nearly the same logits: the same tokens, unless a draw falls on the edge between two."""
    requests = mixed_requests()
    theirs = inplace().ready().run(requests)
    mine = rig_of("qwen2").run(requests)
    same = [a.completion_ids == b.completion_ids for a, b in zip(mine, theirs, strict=True)]
    assert sum(same) >= len(same) - 1
    for a, b, equal in zip(mine, theirs, same, strict=True):
        if equal:
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=1e-4, atol=1e-4)


@cuda_only
def test_a_sleeping_cache_gives_its_memory_back_to_the_device() -> None:
    size = 512 << 20
    rig = rig_of("qwen2", kv_cache_memory_bytes=size)
    rig.run([request(0)])
    held = rig.engine.stats().kv_cache_bytes
    assert held > 0.99 * size
    for tags in ({KV_CACHE}, TAGS):
        gc.collect()
        torch.cuda.empty_cache()
        # Of the whole device: PyTorch does not count what lies in a region. Other programs may take some.
        awake = torch.cuda.mem_get_info()[0]
        rig.engine.sleep(tags)
        # Before PyTorch's cache is emptied: what its allocator merely freed is not free for others.
        assert torch.cuda.mem_get_info()[0] - awake >= 0.99 * held
        taken = torch.empty(size, dtype=torch.uint8, device="cuda")
        del taken  # PyTorch keeps it, and the engine wakes all the same
        rig.engine.wake(TAGS)
        torch.cuda.empty_cache()
        assert abs(torch.cuda.mem_get_info()[0] - awake) < 0.1 * held
