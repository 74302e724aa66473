"""vLLM in this process takes the trainer's weights by the traced write, step after step, and sleeps in between.

The tests of test_vllm.py and test_vllm_compiled.py, each of which names the SETTINGS of its one engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_rl.engines.base import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    EngineState,
    FinishedSample,
    RolloutRequest,
    SamplingParams,
)
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import EngineStateError, MemoryStateError
from hybrid_rl.resharding.handoff.base import HandoffReport
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.resharding.handoff.verify import Verifier
from tests.gpu.device import DEVICE, cuda_only
from tests.support.engines.engine_settings import vllm_settings

# Logits of this model reach 2^2 to 2^3, of which bfloat16 keeps steps of 2^-6; both sides round some ten times on the
# way to them, at different places.
TOLERANCE = 0.1
NUM_STEPS, NUM_PROMPTS, PROMPT_TOKENS, MAX_TOKENS = 20, 8, 12, 16
VOCABULARY = 512
MIB = 1 << 20


@dataclass
class Rig:
    """A trainer in float32 and its engine in bfloat16."""

    module: Any
    engine: Any
    version: int = 0

    def publish(self) -> HandoffReport:
        self.version += 1
        return self.engine.update_weights(TensorSource.of(self.module), self.version)

    def prove(self) -> None:
        """Compare what the engine holds with the trainer's weights, each rounded to the engine's dtype, to the bit."""
        source, weights = TensorSource.of(self.module), self.engine.weights
        Verifier(weights.trace, source.layout()).verify(source, weights.destinations, version=self.version)

    def sample(self) -> tuple[list[FinishedSample], Tensor]:
        """Samples and their tokens, prompts first, int64 [B, T]."""
        generator = torch.Generator().manual_seed(self.version)
        prompts = torch.randint(VOCABULARY, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
        requests = [
            RolloutRequest(100 * self.version + i, tuple(prompt), SamplingParams(MAX_TOKENS))
            for i, prompt in enumerate(prompts.tolist())
        ]
        samples = EngineClient(self.engine).generate(requests, self.version)
        completions = torch.tensor([sample.completion_ids for sample in samples])
        return samples, torch.cat([prompts, completions], 1).to(DEVICE)

    def rounded(self) -> Any:
        """The trainer's model as the engine computes it: with weights in bfloat16."""
        rounded = copy.deepcopy(self.module)
        for parameter in rounded.parameters():
            parameter.data = parameter.data.bfloat16()
        return rounded


def logprobs(module: Any, tokens: Tensor) -> Tensor:
    """ln p of the completions [B, MAX_TOKENS], float32."""
    log_p = module(input_ids=tokens[:, :-1], use_cache=False).logits.float().log_softmax(-1)
    return log_p.gather(2, tokens[:, 1:, None])[:, PROMPT_TOKENS - 1 :, 0]


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The engine is the only one of its file: it takes its time to start."""
    from hybrid_rl.vllm.library import VLLMEngine  # imports vLLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    module: Any = Qwen2ForCausalLM(config).to(DEVICE)
    settings = vllm_settings(max_num_seqs=16, kv_cache_memory_bytes=64 * MIB, **request.module.SETTINGS)
    engine = VLLMEngine(module, settings, dtype=torch.bfloat16, device=torch.device(DEVICE), max_length=64)
    engine.wake(TAGS)
    yield Rig(module, engine)
    engine.close()


def test_twenty_optimizer_steps_by_the_traced_write(rig: Rig) -> None:
    optimizer = torch.optim.AdamW(rig.module.parameters(), lr=3e-3)
    num_bytes = sum(2 * parameter.numel() for parameter in rig.module.parameters())
    before = rig.rounded()
    for step in range(NUM_STEPS):
        report = rig.publish()
        rig.engine.wake(TAGS)
        # Every byte once, by the plan, and none by vLLM's own loader.
        assert (dict(report.link_bytes), report.num_bytes) == ({"local": num_bytes}, num_bytes)
        assert not rig.engine.weights.derived.reasons
        rig.prove()
        samples, tokens = rig.sample()
        rollout = torch.tensor([sample.logprobs for sample in samples], device=DEVICE)
        now = rig.rounded()
        with torch.no_grad():
            trainer, older = logprobs(now, tokens), logprobs(before, tokens)
        assert float((rollout - trainer).abs().max()) < TOLERANCE, f"step {step}"
        if step:  # with the weights of the step before it would be out of tolerance
            assert float((rollout - older).abs().max()) > 2 * TOLERANCE, f"step {step}"
        assert {version for sample in samples for version in sample.versions} == {rig.version}
        before = now
        rig.engine.sleep({KV_CACHE} if step % 2 else TAGS)
        (-logprobs(rig.module, tokens).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        rig.engine.wake(TAGS if step % 3 else {WEIGHTS})  # weights can be written while the cache sleeps


def test_asleep_it_refuses_and_awake_it_generates_after_a_handoff(rig: Rig) -> None:
    rig.engine.wake(TAGS)
    rig.publish()
    rig.engine.sleep(TAGS)
    assert rig.engine.state is EngineState.ASLEEP
    with pytest.raises(EngineStateError):
        rig.sample()
    rig.engine.wake({WEIGHTS})
    assert rig.engine.state is EngineState.WEIGHTS
    with pytest.raises(EngineStateError):
        rig.sample()
    rig.engine.wake({KV_CACHE})
    with pytest.raises(EngineStateError, match="update its weights before generating"):
        rig.sample()  # it slept without a copy of its weights
    rig.publish()
    rig.prove()
    samples, tokens = rig.sample()
    with torch.no_grad():
        trainer = logprobs(rig.rounded(), tokens)
    rollout = torch.tensor([sample.logprobs for sample in samples], device=DEVICE)
    assert float((rollout - trainer).abs().max()) < TOLERANCE


@cuda_only
def test_asleep_its_memory_is_free(rig: Rig) -> None:
    rig.engine.wake(TAGS)
    weights = sum(2 * parameter.numel() for parameter in rig.module.parameters())
    torch.cuda.empty_cache()
    awake = torch.cuda.mem_get_info()[0]
    # Memory comes and goes in pages of 2 MiB, of which an allocation may leave one half used.
    rig.engine.sleep({KV_CACHE})
    torch.cuda.empty_cache()
    without_cache = torch.cuda.mem_get_info()[0]
    assert without_cache - awake > rig.engine.kv_cache_bytes - 8 * MIB
    rig.engine.sleep({WEIGHTS})
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - without_cache > weights - 4 * MIB
    rig.engine.wake(TAGS)
    torch.cuda.empty_cache()
    assert abs(torch.cuda.mem_get_info()[0] - awake) < 8 * MIB


@cuda_only
def test_without_room_it_says_so_before_it_wakes(rig: Rig) -> None:
    """To the page what a wake takes is known before it."""
    from hybrid_rl.vllm.memory import bytes_to_map  # imports vLLM

    rig.engine.wake(TAGS)
    rig.engine.sleep(TAGS)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    filler = torch.empty(free - 32 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(MemoryStateError, match="it takes .* are missing"):
        rig.engine.require_room(frozenset({KV_CACHE}))
    assert rig.engine.state is EngineState.ASLEEP
    del filler
    torch.cuda.empty_cache()
    rig.engine.require_room(TAGS)
    num_bytes = bytes_to_map(TAGS)
    assert num_bytes >= rig.engine.kv_cache_bytes + rig.engine.weight_bytes
    rig.engine.wake(TAGS)
    assert abs(free - torch.cuda.mem_get_info()[0] - num_bytes) < 4 * MIB
