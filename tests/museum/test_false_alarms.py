"""Thousands of handoffs that are right, over the families of models, alarm nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybrid_rl.config import load_config, resolve
from hybrid_rl.controller import RankContext
from hybrid_rl.engines.base import TAGS
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.registry import EngineSetup
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.resharding.handoff.verify import Verifier
from hybrid_rl.training.mismatch import MismatchGuard
from hybrid_rl.workers.handoff_probe import HandoffProbe
from tests.support.engines.sleeping_engine import SleepingEngine, sleeping_engine
from tests.unit.engines.engines import forward_logprobs, request
from tests.unit.models.families import FAMILIES, build

# The engine of the tests knows parameters by their own names, experts as Qwen's, and no buffers.
NOT_HELD = {"apertus", "dots1", "exaone-moe", "gemma4", "glm4-moe", "glm4-moe-lite", "gpt-neox", "granite-moe"}
NOT_HELD |= {
    "deepseek-v3",
    "ernie4_5-moe",
    "granite-moe-shared",
    "laguna",
    "minimax-m2",
    "mixtral",
    "phimoe",
    "solar-open",
}
HELD = [name for name in FAMILIES if name not in NOT_HELD]
NUM_HANDOFFS = 20
QUICK, NUM_QUICK = {"qwen2", "gemma3", "qwen3-moe"}, 4
# Of its 20 handoffs in bfloat16 one has a token that a router is about to send to another expert (0.3021 against
# 0.3015): engine and trainer choose differently, and differ by 1.06 in its logprob.
FLIPS = "flex-olmo"


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with sleeping_engine():
        yield


@pytest.mark.parametrize(
    ("family", "count"),
    [
        *((name, NUM_QUICK) for name in HELD if name in QUICK),
        (FLIPS, NUM_HANDOFFS),
        *(pytest.param(name, NUM_HANDOFFS, marks=pytest.mark.sweep) for name in HELD if name != FLIPS),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_handoffs_that_are_right_alarm_nobody(family: str, count: int, dtype: torch.dtype) -> None:
    module = build(family, dtype=dtype)
    keys, given = load_config({"engine": "sleeping", "max_completion_length": 6, "num_generations": 2})
    config = resolve(keys, given)
    model = CausalLM(module)
    made = SleepingEngine(EngineSetup(model, config.rollout, 32, torch.device("cpu")), config.rollout)
    client, source = EngineClient(made), TensorSource.of(module)
    verifier = Verifier(made.weights.trace, source.layout())
    probe = HandoffProbe(request(0, 5).prompt_ids, config, dtype)
    guard = MismatchGuard(dtype, RankContext())
    made.wake(TAGS)
    generator = torch.Generator().manual_seed(1)
    for version in range(count):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator).to(dtype))
        client.at_rest().update_weights(source, version)
        verifier.verify(source, made.weights.destinations, version=version)
        probe.compare(probe.expected(model), client.generate([probe.request], version)[0], version, "compared")
        sent = [request(number, 4 + number, 6, seed=10 * version + number) for number in range(4)]
        samples = client.generate(sent, version)
        trainer = torch.cat([forward_logprobs(module, one, sample) for one, sample in zip(sent, samples, strict=True)])
        engine = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
        guard.check_gaps(trainer.double() - engine.double(), version)
