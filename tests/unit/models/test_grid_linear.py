"""Linear layers that compute on a grid: their forward pass, the straight-through gradient, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from hybrid_rl.errors import ConfigError
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.grid_linear import GridLinear, leave_grid, train_on_grid
from hybrid_rl.models.grid_linear import on_grid as on_grid_of
from hybrid_rl.models.row import Layout
from hybrid_rl.weights.grids import GRIDS
from tests.support.tiny import build_model

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


def on_grid(name, *weights):
    """The weights on a grid, the first of which is returned; all share the scale of the whole."""
    grid = GRIDS[name]
    maxima = torch.stack([grid.maxima(weight) for weight in weights]).amax(0)
    return grid.dequantise(grid.quantise(weights[0], maxima, weights[0].dtype)).to(weights[0].dtype)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_the_gradient_is_the_straight_through_one(name, dtype, tolerance):
    """y = x Q(W)^T + b: dL/dx goes through Q(W), and dL/dW is that of a plain layer, in the formula's own words."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48).to(dtype)
    quantised = on_grid(name, layer.weight.detach())
    holder = build_model(**SHAPE)
    holder.model.layers[0].mlp.up_proj = layer  # its sibling is gate_proj
    holder.model.layers[0].mlp.gate_proj = copy.deepcopy(layer)
    train_on_grid(holder, name)
    assert type(layer) is GridLinear
    x = torch.randn(3, 5, 64, dtype=dtype, requires_grad=True)
    g = torch.randn(3, 5, 48, dtype=dtype)
    y = layer(x)
    y.backward(g)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(y, x @ quantised.T + layer.bias, **close)
    torch.testing.assert_close(x.grad, g @ quantised, **close)
    torch.testing.assert_close(layer.weight.grad, torch.einsum("abo,abi->oi", g, x.detach()), **close)
    torch.testing.assert_close(layer.bias.grad, g.sum((0, 1)), **close)
    assert not torch.equal(quantised, layer.weight)


def test_layers_that_an_engine_joins_share_the_scale_of_the_whole():
    model = build_model(**SHAPE)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = 3.0
    train_on_grid(model, "nvfp4")
    attention = model.model.layers[0].self_attn
    q, k, v, o = (getattr(attention, f"{each}_proj") for each in "qkvo")
    assert torch.equal(q.quantised(), on_grid("nvfp4", q.weight.detach(), k.weight.detach(), v.weight.detach()))
    assert not torch.equal(q.quantised(), on_grid("nvfp4", q.weight.detach()))
    assert torch.equal(o.quantised(), on_grid("nvfp4", o.weight.detach()))


def test_the_groups_of_an_engine_replace_the_usual_ones():
    model = build_model(**SHAPE)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.mul_(3)
    q, k, v = (layer.weight.detach() for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    prefix = "model.layers.0.self_attn."
    with on_grid_of(model, "fp8", [frozenset({f"{prefix}q_proj.weight", f"{prefix}k_proj.weight"})]):
        assert torch.equal(attention.q_proj.quantised(), on_grid("fp8", q, k))
        assert torch.equal(attention.v_proj.quantised(), on_grid("fp8", v))
    with on_grid_of(model, "fp8"):
        assert torch.equal(attention.q_proj.quantised(), on_grid("fp8", q, k, v))


def test_a_model_on_a_grid_is_the_model_with_dequantised_weights_and_leaves_it_as_it_was():
    model, tokens = build_model(**SHAPE, tie_word_embeddings=False), torch.arange(3, 20)[None]
    before, plain = model(tokens).logits, copy.deepcopy(model)
    train_on_grid(model, "int4")
    with torch.no_grad():
        for layer in plain.model.layers.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(on_grid("int4", layer.weight))
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-6)
    assert float((model(tokens).logits - before).detach().abs().max()) > 1e-3
    twin = copy.deepcopy(model)  # as the in-place engine's, whose layers must not look at the first one's
    layer = twin.model.layers[1].self_attn.k_proj
    assert type(layer) is GridLinear and layer in layer.siblings
    leave_grid(model)
    assert torch.equal(model(tokens).logits, before)
    assert all(type(layer) is nn.Linear for layer in model.modules() if isinstance(layer, nn.Linear))


def test_layers_with_a_forward_of_their_own_are_refused():
    class Own(nn.Linear):
        pass

    model = build_model(**SHAPE)
    model.model.layers[0].mlp.up_proj = Own(64, 32, bias=False)
    with pytest.raises(ConfigError, match=r"quantization=int4 cannot compute .*up_proj.* its layer is a Own"):
        train_on_grid(model, "int4")


def test_long_rows_are_on_the_grid_too():
    """On CPUs oneDNN takes over the layers of long rows; it must not take those that have been put on a grid since."""
    model = CausalLM(build_model(**{**SHAPE, "hidden_size": 256, "intermediate_size": 1024}))
    tokens = torch.arange(60) % 40 + 3
    last = torch.arange(59)
    row = PackedRow(tokens, torch.arange(60), tokens[1:], last, Layout((60,)))
    with torch.no_grad():
        plain = model.row_distribution(row, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hybrid_rl.models.linear.smallest_product", lambda: 1)
            with on_grid_of(model.module, "int4"):
                quantised = model.row_distribution(row, 1.0)
        assert float((quantised - plain).abs().max()) > 1e-4
        assert torch.equal(model.row_distribution(row, 1.0), plain)
