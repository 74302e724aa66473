from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter

from hybrid_rl.compat.torch import storage_id
from hybrid_rl.weights import views as views_module
from hybrid_rl.weights.names import Conversion
from hybrid_rl.weights.views import CheckpointViews, checkpoint_views
from tests.unit.models.checkpoints import build_stored


def values(module: PreTrainedModel, views: CheckpointViews) -> dict[str, Tensor]:
    """The views with the module's own weights in them."""
    owners = {storage_id(tensor): name for name, tensor in views.tensors.items()}
    state = module.state_dict()
    found = {}
    for name, view in views.views:
        whole = state[owners[storage_id(view)]]
        found[name] = whole.as_strided(view.shape, view.stride(), view.storage_offset())
    return found


@pytest.mark.parametrize("name", ["qwen2", "qwen2 tied", "qwen3 moe"])
def test_views_are_what_transformers_saves(name: str, tmp_path: Path) -> None:
    module = build_stored(name)
    views = checkpoint_views(module)
    module.save_pretrained(tmp_path)

    saved = load_file(tmp_path / "model.safetensors")
    found = values(module, views)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert views.without_view == {}


def test_fused_experts_by_hand() -> None:
    views = dict(checkpoint_views(build_stored("qwen3 moe")).views)
    # gate_up_proj is [5 experts, 2 x 20, 32]: `up` of expert 1 begins at row 40 + 20.
    up = views["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert (up.shape, up.stride(), up.storage_offset()) == ((20, 32), (32, 1), 60 * 32)
    down = views["model.layers.0.mlp.experts.2.down_proj.weight"]
    assert (down.shape, down.stride(), down.storage_offset()) == ((32, 20), (20, 1), 2 * 32 * 20)


def test_a_tied_tensor_is_there_once_and_its_other_name_apart() -> None:
    views = checkpoint_views(build_stored("qwen2 tied"))
    assert "lm_head.weight" not in views.tensors
    assert [name for name, _ in views.tied] == ["lm_head.weight"]
    assert views.tied[0][1] is views.tensors["model.embed_tokens.weight"]
    assert checkpoint_views(build_stored("qwen2")).tied == []


def test_nothing_is_read() -> None:
    views = checkpoint_views(build_stored("qwen3 moe").to("meta"))
    assert all(tensor.is_meta for tensor in views.tensors.values())
    # 4 projections, 4 norms, the router and 5 experts of 3 in each of 2 layers; embedding, norm and head.
    assert len(views.views) == 2 * (4 + 4 + 1 + 5 * 3) + 3


def test_what_is_computed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(ConversionOps):
        def convert(self, input_dict: dict[str, list[Tensor]], **kwargs: object) -> dict[str, Tensor]:
            return {name: tensors[0] * 2 for name, tensors in input_dict.items()}

        @property
        def reverse_op(self) -> ConversionOps:
            return self

    class Broken(Chunk):
        def convert(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
            raise RuntimeError("no view of it")

    def conversions(module: PreTrainedModel, names: list[str]) -> list[Conversion]:
        norm, head = WeightConverter("norm.weight", "norm.weight", [Doubled()]), WeightConverter("a", "b", [Broken()])
        return [
            Conversion("norm.weight", norm, [("norm.weight", "model.norm.weight")]),
            Conversion("b", head, [("a", "lm_head.weight")]),
        ]

    monkeypatch.setattr(views_module, "checkpoint_conversions", conversions)
    views = checkpoint_views(build_stored("qwen2"))
    assert views.views == []
    assert "computes new values" in views.without_view["norm.weight"]
    assert "no view of it" in views.without_view["lm_head.weight"]
