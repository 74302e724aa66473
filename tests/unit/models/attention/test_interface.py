"""The function that transformers calls: calls that it refuses, and the threads that use it."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from hybrid_rl.compat.transformers import attention_name
from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.attention_function import NAME, attention_forward, attention_functions, installed_views
from hybrid_rl.models.attention.padded import PaddedAttention
from hybrid_rl.models.row import Layout
from tests.support.libraries.transformers_names import name_attention
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
        (layer(), {"attention_mask": torch.ones(1, 1, 3, 3)}, "makes its own attention mask"),
    ],
)
def test_what_packed_attention_cannot_do_is_refused(module, arguments, message):
    mask = arguments.pop("attention_mask", None)
    rows = [torch.randn(1, num_heads, 3, 8) for num_heads in (4, 2, 2)]
    with pytest.raises(ModelError, match=message), attention_functions([], NAME, PaddedAttention(Layout((3,)))):
        attention_forward(module, *rows, mask, **arguments)


def names(configs):
    return [attention_name(config) for config in configs]


def test_attention_names_are_put_back_after_an_error():
    configs = [installed_views(build("qwen2", attention=name))[0] for name in ("eager", "sdpa")]
    with pytest.raises(KeyError), attention_functions(configs, "a"):
        assert names(configs) == ["a", "a"]
        with attention_functions(configs[1:], "c"):
            assert names(configs) == ["a", "c"]
        raise KeyError
    assert names(configs) == ["eager", "sdpa"]


def test_other_threads_keep_the_attention_that_a_config_names():
    """A reward that runs the policy, or a judge made from its config, while the engine generates in another thread."""
    module = build("qwen2", attention="sdpa")
    token_ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        expected = module(input_ids=token_ids).logits
    configs = installed_views(module)
    with attention_functions(configs, NAME), ThreadPoolExecutor(1) as pool:
        assert names(configs) == [NAME]
        assert pool.submit(names, configs).result() == ["sdpa"]
        with torch.no_grad():
            assert torch.equal(pool.submit(lambda: module(input_ids=token_ids).logits.detach()).result(), expected)
    assert names(configs) == ["sdpa"]
    assert module.config.to_dict() == type(module.config)(**module.config.to_dict()).to_dict()


def test_a_config_is_looked_through_and_not_replaced():
    """What a user says about attention later, by any of transformers' ways, holds for the layers; copies of the module
    know nothing of views."""
    module = build("qwen2", attention="sdpa")
    config, layer = module.config, module.model.layers[0].self_attn
    (view,) = installed_views(module)
    assert installed_views(module) == [view] and installed_views(module.model)[0] is view
    module.model.layers[0].config = config  # a module that was added later gets the same view
    assert installed_views(module)[0] is module.model.layers[0].config is view
    assert module.config is config and type(config) is Qwen2Config
    assert layer.config is module.model.config is view is not config
    module.set_attn_implementation("eager")
    assert names([layer.config, config]) == ["eager", "eager"]
    name_attention(config, "sdpa")
    assert names([layer.config, config]) == ["sdpa", "sdpa"]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.config is copied.model.config is copied.model.layers[0].self_attn.config is not config
        assert type(copied.config) is Qwen2Config and copied.config == config
