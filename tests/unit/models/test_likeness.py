import pytest
import torch
from torch import nn

from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.likeness import check_fingerprint, fingerprint
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta, check_parameters
from hybrid_rl.weights.loading import load_weights
from hybrid_rl.weights.sources import StateSource, named_state
from tests.support.tiny import build_model


def copy_of(module):
    recipe = ModelRecipe.of_module(module, StateSource(named_state(module)))
    built = build_on_meta(recipe, module.dtype)
    check_parameters(module, built)
    load_weights(built, recipe.source, "cpu")
    return CausalLM(built)


CHANGES = {
    "scale": lambda model: vars(model.layers[0].self_attn).update(scaling=3.0),
    "activation": lambda model: setattr(model.layers[1].mlp, "act_fn", nn.Tanh()),
    "rotary": lambda model: model.rotary_emb.inv_freq.mul_(5),
    "hook": lambda model: model.layers[0].register_forward_hook(lambda layer, args, output: output * 1.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faithful_copy_passes_and_the_module_stays_as_it_was(dtype):
    module = build_model(dtype=dtype).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    check_fingerprint(copy_of(module), fingerprint(module))
    assert module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_class_and_config_do_not_say_is_noticed(change):
    module = build_model()
    for parameter in module.parameters():  # of the size of a trained model's
        parameter.data.mul_(3)
    change(module.model)
    with pytest.raises(ModelError, match="gives other logprobs than the module"):
        check_fingerprint(copy_of(module), fingerprint(module))


def test_weights_tied_by_hand_and_parameters_added_are_refused():
    module = build_model(tie_word_embeddings=False)
    module.lm_head.weight = module.model.embed_tokens.weight
    with pytest.raises(ModelError, match="lm_head.weight and model.embed_tokens.weight are tied in the module or by"):
        copy_of(module)
    module = build_model()
    module.model.layers[0].mlp.extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="mlp.extra.bias' are not those that its class and config make"):
        copy_of(module)
