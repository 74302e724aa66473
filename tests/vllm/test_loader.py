from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from vllm.config.load import LoadConfig

from hybrid_rl.errors import HandoffError
from hybrid_rl.vllm.loader import LOAD_FORMAT, LOADING, Loading, TracingLoader
from hybrid_rl.vllm.quantization import PLAIN
from hybrid_rl.vllm.weights import WeightWriter
from tests.vllm.live import Live, randomise

pytestmark = pytest.mark.slow

# A dense and a sparse layer; transformers fuses the experts of all into one tensor, vLLM gate and up of each.
CONFIG = Qwen3MoeConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=96,
    moe_intermediate_size=64,
    vocab_size=100,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    mlp_only_layers=[0],
    norm_topk_prob=True,
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    randomise(module, 0.1)
    live = Live(module, tmp_path_factory.mktemp("model"), PLAIN)
    yield live
    live.close()


def test_every_weight_is_traced(live: Live) -> None:
    trace = live.weights.trace
    assert live.weights.derived.reasons == {}
    assert trace.untraced == {}
    assert trace.unused == ()
    assert {spec.name for spec in trace.destinations} == {name for name, _ in live.weights.model.named_parameters()}


def test_what_is_written_by_the_trace_is_what_vllm_computes_with(live: Live) -> None:
    for _ in range(3):
        randomise(live.module, 0.05)
        stale = live.gap()
        live.write()
        live.weights.check_places()
        assert stale > 0.01
        assert live.gap() < 1e-5


def test_one_wrong_weight_is_seen(live: Live) -> None:
    live.write()
    with torch.no_grad():
        live.module.get_parameter("model.layers.1.mlp.experts.down_proj")[1].mul_(1.5)
    assert live.gap() > 1e-4
    live.write()
    assert live.gap() < 1e-5


def test_a_replaced_tensor_is_found(live: Live) -> None:
    destinations = list(live.weights.destinations)
    destinations[3] = destinations[3].clone()
    moved = dataclasses.replace(live.weights, destinations=destinations)
    with pytest.raises(HandoffError, match=f"vLLM replaced {moved.trace.destinations[3].name}"):
        moved.check_places()


def test_without_views_the_loader_says_what_it_needs(live: Live) -> None:
    with pytest.raises(HandoffError, match="needs model_loader_extra_config"):
        TracingLoader(LoadConfig(load_format=LOAD_FORMAT))
    loading = Loading(live.views)
    TracingLoader(LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config={LOADING: loading}))
    assert loading.weights is None
    writer = WeightWriter(live.views, rank=0, quantization=None)
    with pytest.raises(HandoffError, match="has not built its model"):
        _ = writer.weights
