from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from hybrid_rl.errors import HandoffError
from hybrid_rl.vllm.derived import log_derived, reload_derived
from tests.vllm.live import Live, randomise

pytestmark = pytest.mark.slow

CONFIG = Qwen2Config(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=96,
    vocab_size=100,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With the platform's own layers, which are packed after loading on CPUs; the head shares the embeddings' weight
    and packs a copy of it."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    randomise(module, 0.1)
    live = Live(module, tmp_path_factory.mktemp("model"), None)
    yield live
    live.close()


def reload(live: Live, asked: list[str] | None = None) -> int:
    state = live.module.state_dict()

    def full(name: str) -> Tensor:
        if asked is not None:
            asked.append(name)
        return state[name]

    return reload_derived(live.weights, live.views, full, live.llm.model_config)


def test_packed_layers_are_derived_as_a_whole(live: Live) -> None:
    derived = live.weights.derived
    packed = ["self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "self_attn.o_proj.weight"]
    packed += ["mlp.gate_up_proj.weight", "mlp.down_proj.weight"]
    layers = {f"model.layers.{i}.{name}" for i in range(2) for name in packed}
    assert derived.reasons.keys() == layers | {"model.embed_tokens.weight"}
    model: Any = live.weights.model
    # In vLLM 0.25.1 the tied head of Qwen2 is the layer of the embeddings itself, and is packed with it.
    assert derived.copies == (() if model.lm_head is model.model.embed_tokens else ("lm_head",))
    assert live.weights.trace.untraced.keys() == derived.reasons.keys()
    direct = {live.weights.trace.destinations[int(i)].name for i in live.weights.trace.copies.destination}
    assert direct == {name for name, _ in live.module.named_parameters() if "norm" in name}


def test_a_reload_brings_new_weights_into_packed_layers(live: Live) -> None:
    for _ in range(2):
        randomise(live.module, 0.05)
        live.write()
        assert live.gap() > 0.01  # the norms alone are not the model
        asked: list[str] = []
        num_bytes = reload(live, asked)
        live.llm.reset_prefix_cache()
        assert live.gap() < 1e-5
        live.weights.check_places()
        assert len(asked) == len(set(asked))
        assert num_bytes == sum(live.module.get_parameter(name).nbytes for name in asked)


def test_a_weight_that_vllm_does_not_take_is_an_error(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    model = live.weights.model
    load = model.load_weights

    def forgetful(weights: object) -> set[str]:
        return load(weights) - {"model.layers.0.mlp.down_proj.weight"}  # type: ignore[operator]

    monkeypatch.setattr(model, "load_weights", forgetful)
    with pytest.raises(HandoffError, match="left 1 weights as they were, e.g. model.layers.0.mlp.down_proj.weight"):
        reload(live)


def test_the_log_says_what_is_slow_and_why(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log_derived(live.weights, "every handoff")
    assert "11 of 16 weights of vLLM's model are loaded again at every handoff" in caplog.text
    assert "vLLM's post-processing" in caplog.text
