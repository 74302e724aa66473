"""Weights in and out of whole modules, against transformers' own loading and saving."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import Interleave, WeightConverter
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from hybrid_rl.errors import ModelError
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.models.saving import save_weights
from hybrid_rl.weights.lazy import LazyTensor, NotLazyError
from hybrid_rl.weights.loading import load_weights
from hybrid_rl.weights.names import Conversion, _lazy_results
from hybrid_rl.weights.sources import FolderSource, ObjectSource, StateSource, WeightSource, named_state
from tests.unit.models.checkpoints import NAMES, build_stored, everything, rewrite


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars() -> Any:
    disable_progress_bar()
    yield
    enable_progress_bar()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, WeightSource]:
    recipe = ModelRecipe.of_folder(str(folder))
    module = build_on_meta(recipe, dtype)
    load_weights(module, recipe.source, "cpu")
    return module, recipe.source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_stored("qwen2 tied").save_pretrained(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------- whole checkpoints


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in NAMES),
        ("qwen2 tied", torch.float32),
        *(pytest.param(name, torch.float32, marks=pytest.mark.sweep) for name in NAMES if name != "qwen2 tied"),
    ],
)
def test_a_folder_gives_what_transformers_loads_and_saves(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    module = build_stored(name)
    if module.generation_config is not None:
        module.generation_config.max_new_tokens = 17
    module.save_pretrained(tmp_path / "stored")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype=dtype)
    random_state = torch.get_rng_state()
    mine, source = loaded(tmp_path / "stored", dtype)
    assert torch.equal(random_state, torch.get_rng_state())
    equal(everything(mine), everything(theirs))
    assert len(list(mine.parameters())) == len(list(theirs.parameters()))  # ties are ties
    assert mine.config.to_dict() == theirs.config.to_dict() and not mine.training
    assert mine.generation_config.to_dict() == theirs.generation_config.to_dict()
    stored = tensors_of(tmp_path / "stored")
    assert source.num_bytes_read == sum(t.numel() * t.element_size() for t in stored.values())  # everything once

    theirs.save_pretrained(tmp_path / "theirs")
    save_weights(mine, (tmp_path / "mine"), dtype)
    equal(tensors_of(tmp_path / "mine"), tensors_of(tmp_path / "theirs"))
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {p.name for p in (tmp_path / "theirs").iterdir()}
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "mine" / file).read_text() == (tmp_path / "theirs" / file).read_text()


def test_a_large_model_is_saved_in_files_under_the_cap(tmp_path: Path) -> None:
    module = build_stored("qwen3 moe")
    save_weights(module, tmp_path, torch.float32, max_shard_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.numel() * 4 for t in tensors.values()) <= 20_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    equal(everything(AutoModelForCausalLM.from_pretrained(tmp_path)), everything(module))
    equal(everything(loaded(tmp_path)[0]), everything(module))


def test_fp32_masters_are_saved_in_the_compute_dtype(tmp_path: Path) -> None:
    """A module of fp32 shards gives the folder of the bf16 model; what its class keeps in fp32 stays fp32."""
    module = build_stored("deepseek v3")
    save_weights(module, tmp_path / "mine", torch.bfloat16)
    module.save_pretrained(tmp_path / "stored")
    AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    equal(tensors_of(tmp_path / "mine"), tensors_of(tmp_path / "theirs"))
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["dtype"] == "bfloat16"
    assert module.dtype == torch.float32 and module.config.dtype != "bfloat16"


def test_experts_that_are_stored_fused_stay_fused(tmp_path: Path) -> None:
    """A checkpoint is written back in the form that it was read in."""
    build_stored("qwen3 moe").save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(tmp_path / "fused"))
    module, _ = loaded(tmp_path / "fused")
    save_weights(module, tmp_path / "again", torch.float32)
    equal(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "fused"))


# ------------------------------------------------------------------------------------------------------ what is wrong


UP = "model.layers.1.mlp.up_proj.weight"
CHANGES = {
    "missing": (lambda t: t.pop(UP), rf"1 missing keys, e\.g\. {UP}; these weights would start random"),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(33)}),
        r"1 mismatched keys, e\.g\. model\.norm\.weight \(checkpoint \[33\], model \[32\]\)",
    ),
    "unexpected": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(32)}),
        r"1 unexpected keys, e\.g\. model\.layers\.2\.input_layernorm\.weight",
    ),
    "untied": (
        lambda t: t.update({"lm_head.weight": torch.ones(97, 32)}),
        r"the config ties .* and .*, but their stored values differ; set tie_word_embeddings to false",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_folder_that_does_not_fit_is_refused_before_anything_is_overwritten(
    folder: Path, change: Any, message: str
) -> None:
    rewrite(folder, change)
    module = build_stored("qwen2 tied")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(5)
    with pytest.raises(ModelError, match=message) as caught:
        load_weights(module, FolderSource(str(folder)), "cpu")
    assert f"model {str(folder)!r}" in str(caught.value)
    assert all((parameter == 5).all() for parameter in module.parameters())


def test_parts_of_different_shapes_are_refused(tmp_path: Path) -> None:
    build_stored("qwen3 moe").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.mlp.experts.3.up_proj.weight": torch.ones(21, 32)}))
    with pytest.raises(ModelError, match="parts of one parameter have different shapes"):
        loaded(tmp_path)


INV_FREQ, EMBEDDING = "model.layers.0.self_attn.rotary_emb.inv_freq", "model.embed_tokens.weight"
SAME = {
    "with what the class ignores": lambda t: t.update({INV_FREQ: torch.ones(4)}),
    "tied weights twice alike": lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}),
    "the head of tied weights alone": lambda t: t.update({"lm_head.weight": t.pop(EMBEDDING)}),
}


@pytest.mark.parametrize("form", SAME)
def test_other_forms_of_the_same_checkpoint(folder: Path, form: str) -> None:
    rewrite(folder, SAME[form])
    module, _ = loaded(folder)
    assert module.get_input_embeddings().weight is module.get_output_embeddings().weight
    equal(everything(module), everything(build_stored("qwen2 tied")))


def test_pickled_weights_are_refused_with_the_way_out(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin.*convert it once: .*save_pretrained"):
        loaded(folder)


def test_files_that_are_missing_or_damaged_are_named(folder: Path, tmp_path: Path) -> None:
    save_weights(build_stored("qwen2 tied"), folder, torch.float32, max_shard_bytes=20_000)
    (folder / "model.safetensors").unlink()
    broken = sorted(folder.glob("*.safetensors"))[1]
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load model .*SafetensorError"):
        loaded(folder)
    broken.unlink()
    with pytest.raises(ModelError, match=f"1 files are missing, e.g. {broken.name}"):
        loaded(folder)
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        loaded(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot load model"):
        loaded(folder)


def test_a_hub_name_that_cannot_be_reached_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="cannot load model 'nobody/nothing'"):
        FolderSource("nobody/nothing").names()


def test_quantised_weights_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantised, which cannot be trained"):
        loaded(folder)


# ------------------------------------------------------------------------------------------------------ live modules


def test_a_recipe_of_a_live_module_survives_pickling(tmp_path: Path) -> None:
    build_stored("qwen3 moe").save_pretrained(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(tmp_path)
    module.model.norm.weight.requires_grad_(False)
    module.generation_config = GenerationConfig(temperature=0.25, do_sample=True)
    recipe = pickle.loads(
        pickle.dumps(ModelRecipe.of_module(module, ObjectSource.of(module, lambda data: data.copy())))
    )
    recipe.source.get = lambda data: data
    built = build_on_meta(recipe, torch.float32)
    assert all(parameter.is_meta for parameter in built.parameters())
    load_weights(built, recipe.source, "cpu")
    equal(everything(built), everything(module))
    assert [n for n, p in built.named_parameters() if not p.requires_grad] == ["model.norm.weight"]
    assert built.generation_config.temperature == 0.25
    assert built.config.to_dict() == module.config.to_dict()
    # It writes the checkpoint that the live module would have written.
    module.save_pretrained(tmp_path / "theirs")
    save_weights(built, tmp_path / "mine", torch.float32)
    equal(tensors_of(tmp_path / "mine"), tensors_of(tmp_path / "theirs"))


def test_a_state_is_read_where_it_lies() -> None:
    module = build_stored("qwen2 tied")
    source = StateSource(named_state(module))
    assert "lm_head.weight" not in source.names()
    part = source.read("model.norm.weight", (slice(3, 9),))
    assert part.data_ptr() == module.model.norm.weight[3:].data_ptr() and source.num_bytes_read == 24
    built = build_on_meta(ModelRecipe.of_module(module, source), torch.float32)
    load_weights(built, source, "cpu")
    equal(everything(built), everything(module))


def test_every_tensor_of_a_live_module_is_an_object_of_its_bytes() -> None:
    module = torch.nn.Module()
    shapes = {"a": (3,), "b": (5, 2), "large": (40, 10), "c": (7,), "scalar": (), "none": (0, 4)}
    for name, shape in shapes.items():
        values = torch.randn(shape).to(torch.bfloat16 if name == "b" else torch.float32)
        module.register_parameter(name, torch.nn.Parameter(values))
    module.register_parameter("tied", module.a)
    module.register_buffer("count", torch.tensor([1, 2, 3]))
    module.register_buffer("computed", torch.ones(2), persistent=False)
    store: list[np.ndarray] = []
    source = ObjectSource.of(module, lambda data: store.append(data.copy()) or len(store) - 1)
    assert [data.size for data in store] == [12, 20, 1600, 28, 4, 0, 24]
    source.get = store.__getitem__
    assert source.names() == [*shapes, "count"]
    for name, tensor in named_state(module).items():
        assert source.spec(name) == (tuple(tensor.shape), tensor.dtype)
        box = tuple(slice(extent // 3, extent) for extent in tensor.shape)
        assert torch.equal(source.read(name, box), tensor[box])


def test_storing_a_live_module_leaves_its_memory_free_to_go() -> None:
    """`Tensor.numpy()` marks it for good: the module could not sleep afterwards. Nothing is copied on the way."""
    module = build_stored("qwen2 tied")
    places = {tensor.data_ptr() for tensor in named_state(module).values()}
    seen = set()
    ObjectSource.of(module, lambda data: seen.add(data.ctypes.data))
    assert seen == places
    assert all(tensor.untyped_storage().resizable() for tensor in named_state(module).values())


def test_stored_tensors_without_a_way_to_fetch_them() -> None:
    source = ObjectSource({"a": (0, (2,), torch.float32)})
    with pytest.raises(ModelError, match="set `get`"):
        source.read("a", (slice(0, 2),))


def test_another_module_than_the_recipe_says_is_refused() -> None:
    source = StateSource(named_state(build_stored("qwen2 tied")))
    other = build_on_meta(ModelRecipe.of_module(build_stored("qwen2"), source), torch.float32)
    with pytest.raises(ModelError, match=r"the module: 1 missing keys, e\.g\. lm_head\.weight"):
        load_weights(other, source, "cpu")


# -------------------------------------------------------------------------------------------------------- lazy boxes


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[slice, ...]]:
    def part(extent: int) -> st.SearchStrategy[slice]:
        return st.integers(0, extent - 1).flatmap(lambda a: st.integers(a + 1, extent).map(lambda b: slice(a, b)))

    return st.tuples(*(part(extent) for extent in shape))


def fused(tensors: list[Any]) -> Any:
    """What transformers does with experts, and a few operations more."""
    gate = torch.stack(tensors[:3], dim=0)
    up = torch.stack(tensors[3:], dim=0)
    both = torch.cat([gate, up], dim=1)
    first, second = torch.chunk(torch.transpose(both, dim0=1, dim1=2), 2, dim=-1)
    return torch.cat([second.contiguous(), first], dim=-1)


@settings(deadline=None)
@given(st.data())
def test_a_box_of_a_lazy_tensor_is_the_box_of_the_tensor(data: st.DataObject) -> None:
    parts = {f"{index}": torch.arange(20.0).reshape(4, 5) + 100 * index for index in range(6)}
    source = StateSource(parts)
    expected = fused(list(parts.values()))
    lazy = fused([LazyTensor.of(source, name) for name in parts])
    assert lazy.shape == expected.shape and lazy.dtype == expected.dtype
    box = data.draw(boxes(tuple(expected.shape)))
    assert torch.equal(lazy.read(box), expected[box])
    assert source.num_bytes_read == expected[box].numel() * 4  # nothing beside it is read


def test_a_conversion_without_a_lazy_form_reads_whole_tensors() -> None:
    stored = {"w13": torch.arange(24.0).reshape(6, 4)}
    source = StateSource(stored)
    with pytest.raises(NotLazyError):
        LazyTensor.of(source, "w13").reshape(4, 6)
    converter = WeightConverter("w13", "gate_up", [Interleave(dim=0)])
    lazy = _lazy_results(build_stored("qwen2"), Conversion("gate_up", converter, [("w13", "w13")]), source)["gate_up"]
    assert lazy.shape == (6, 4)
    assert torch.equal(lazy.read((slice(1, 3), slice(0, 4))), stored["w13"][[2, 4]])  # rows 0 2 4 1 3 5
    assert source.num_bytes_read == 96
