"""The place of an engine in a rank that only trains: whatever is asked of it is refused, and closing it is harmless."""

from __future__ import annotations

import pytest

from hybrid_rl.engines.base import TAGS, RolloutRequest, SamplingParams
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.no_engine import NoEngine
from hybrid_rl.errors import EngineStateError
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.support.tiny import build_model


def test_it_refuses_weights_and_requests() -> None:
    client = EngineClient(NoEngine(7))
    client.at_rest().wake(TAGS)
    with pytest.raises(EngineStateError, match="this rank only trains; weights are handed to the ranks of"):
        client.at_rest().update_weights(TensorSource.of(build_model(num_hidden_layers=1)), 1)
    with pytest.raises(EngineStateError, match="this rank only trains; the ranks of rollout_ranks generate"):
        client.generate([RolloutRequest(0, (1,), SamplingParams(1))], 0)
    stats = client.stats()
    assert (stats.num_running, stats.num_generated_tokens, stats.kv_cache_bytes) == (0, 0, 0)
    client.close()
