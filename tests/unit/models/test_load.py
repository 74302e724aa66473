"""Models loaded from a complete folder, and the error for every incomplete one."""

import pytest
import torch

from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM, load_model, load_tokenizer
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.weights.loading import load_weights
from tests.unit.models.checkpoints import rewrite
from tests.unit.models.families import VISION, build, build_vision


@pytest.fixture
def module():
    return build("qwen2")


@pytest.fixture
def folder(tmp_path, module):
    module.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_complete_folder_gives_the_stored_weights_in_the_dtype_asked_for(folder, module, name, dtype):
    loaded = load_model(str(folder), dtype=name)
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(key), parameter.to(dtype), rtol=0, atol=0)


def test_a_missing_folder_is_named():
    for load in (lambda path: load_model(path, dtype="float32"), load_tokenizer):
        with pytest.raises(ModelError, match="'./no/such/folder' does not exist"):
            load("./no/such/folder")


def test_a_hub_name_that_cannot_be_reached_is_a_model_error():
    """It may as well be a folder with a letter wrong: both places are named."""
    places = r" \(there is no such folder here, so it was looked for on the Hugging Face hub; offline, .*\): "
    with pytest.raises(ModelError, match="cannot load model 'nobody/nothing'" + places):
        load_model("nobody/nothing", dtype="float32")
    with pytest.raises(ModelError, match="cannot load the tokenizer of 'nobody/nothing'" + places):
        load_tokenizer("nobody/nothing")


def cut(path, kept_bytes):
    path.write_bytes(path.read_bytes()[:kept_bytes])


WEIGHTS, CONFIG = "model.safetensors", "config.json"
CHANGES = {
    "a tensor less": (
        lambda folder: rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
        r"1 missing keys, e\.g\. model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "another shape": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(33)})),
        "its weights have other shapes than config.json says; put config.json back",
    ),
    "a model that continues no text": (
        lambda folder: (folder / CONFIG).write_text('{"model_type": "t5"}'),
        r"cannot load model '.*': config.json says 't5', of which transformers has no causal language model; .{,90}$",
    ),
    "no bytes": (lambda folder: cut(folder / WEIGHTS, 0), "cannot load model"),
    "half a size": (lambda folder: cut(folder / WEIGHTS, 4), "cannot load model"),
    "half a header": (lambda folder: cut(folder / WEIGHTS, 1000), "cannot load model"),
    "an end less": (lambda folder: cut(folder / WEIGHTS, -100), "cannot load model"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "cannot load model"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "cannot load model"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_that_is_not_complete_is_refused(folder, what):
    change, message = CHANGES[what]
    change(folder)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder), dtype="float32")


@pytest.mark.parametrize("name", VISION)
def test_a_folder_of_a_vision_language_model_is_loaded_for_text(tmp_path, name):
    """They are no causal LMs to transformers; in this process and on ranks, which build from the folder's config."""
    module = build_vision(name)
    module.save_pretrained(tmp_path)
    recipe = ModelRecipe.of_folder(str(tmp_path))
    on_rank = build_on_meta(recipe, torch.float32)
    load_weights(on_rank, recipe.source, "cpu")
    tokens = torch.randint(2, 80, (1, 7))
    expected = module(input_ids=tokens).logits
    for loaded in (load_model(str(tmp_path), dtype="float32"), on_rank):
        assert type(loaded) is type(module)
        torch.testing.assert_close(loaded.eval()(input_ids=tokens).logits, expected)
        assert CausalLM(loaded).verify() < 2e-6
