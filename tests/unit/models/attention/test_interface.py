"""The function that transformers calls: what it refuses, and which threads use it."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.interface import NAME, attention_forward, attention_functions
from hybrid_rl.models.attention.padded import PaddedAttention
from hybrid_rl.models.row import Layout
from tests.unit.models.families import build


def layer(**attributes):
    return SimpleNamespace(**{"layer_idx": 0, "is_causal": True, **attributes})


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (layer(), {"s_aux": torch.zeros(4)}, "attention sinks"),
        (layer(), {"position_bias": torch.zeros(4)}, "position bias"),
        (layer(is_causal=False), {}, "not causal"),
        (SimpleNamespace(), {}, "no layer_idx"),
        (layer(), {"attention_mask": torch.ones(1, 1, 3, 3)}, "mask of its own"),
    ],
)
def test_what_packed_attention_cannot_do_is_refused(module, arguments, message):
    mask = arguments.pop("attention_mask", None)
    rows = [torch.randn(1, num_heads, 3, 8) for num_heads in (4, 2, 2)]
    with pytest.raises(ModelError, match=message), attention_functions([], [], PaddedAttention(Layout((3,)))):
        attention_forward(module, *rows, mask, **arguments)


def test_attention_names_are_put_back_after_an_error():
    configs = [Qwen2Config(attn_implementation=name) for name in ("eager", "sdpa")]
    with pytest.raises(KeyError), attention_functions(configs, ["a", "b"]):
        assert [config._attn_implementation for config in configs] == ["a", "b"]
        with attention_functions(configs[1:], ["c"]):
            assert [config._attn_implementation for config in configs] == ["a", "c"]
        raise KeyError
    assert [config._attn_implementation for config in configs] == ["eager", "sdpa"]


def test_other_threads_keep_the_attention_that_a_config_names():
    """A reward that runs the policy, or a judge made from its config, while the engine generates in another thread."""
    module = build("qwen2", attention="sdpa")
    token_ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        expected = module(input_ids=token_ids).logits
    with attention_functions([module.config], [NAME]), ThreadPoolExecutor(1) as pool:
        assert module.config._attn_implementation == NAME
        assert pool.submit(lambda: module.config._attn_implementation).result() == "sdpa"
        with torch.no_grad():
            assert torch.equal(pool.submit(lambda: module(input_ids=token_ids).logits.detach()).result(), expected)
    assert module.config._attn_implementation == "sdpa"
    assert module.config.to_dict() == type(module.config)(**module.config.to_dict()).to_dict()
