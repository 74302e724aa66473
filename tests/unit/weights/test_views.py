from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3MoeConfig
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter

from hybrid_rl.compat.torch import storage_id
from hybrid_rl.weights import views as views_module
from hybrid_rl.weights.names import Conversion
from hybrid_rl.weights.views import CheckpointViews, checkpoint_views


def qwen2(*, tied: bool) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        Qwen2Config(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            vocab_size=20,
            tie_word_embeddings=tied,
        )
    )


def qwen3_moe() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=24,
            moe_intermediate_size=12,
            vocab_size=20,
            num_experts=3,
            num_experts_per_tok=2,
        )
    )


def values(module: PreTrainedModel, views: CheckpointViews) -> dict[str, Tensor]:
    """The views with the module's own weights in them."""
    owners = {storage_id(tensor): name for name, tensor in views.tensors.items()}
    state = module.state_dict()
    found = {}
    for name, view in views.views:
        whole = state[owners[storage_id(view)]]
        found[name] = whole.as_strided(view.shape, view.stride(), view.storage_offset())
    return found


@pytest.mark.parametrize("module", [qwen2(tied=False), qwen2(tied=True), qwen3_moe()], ids=["qwen2", "tied", "moe"])
def test_views_are_what_transformers_saves(module: PreTrainedModel, tmp_path: Path) -> None:
    views = checkpoint_views(module)
    module.save_pretrained(tmp_path)

    saved = load_file(tmp_path / "model.safetensors")
    found = values(module, views)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert views.without_view == {}


def test_fused_experts_by_hand() -> None:
    views = dict(checkpoint_views(qwen3_moe()).views)
    # gate_up_proj is [3 experts, 2 x 12, 16]: `up` of expert 1 begins at row 24 + 12.
    up = views["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert (up.shape, up.stride(), up.storage_offset()) == ((12, 16), (16, 1), 36 * 16)
    down = views["model.layers.0.mlp.experts.2.down_proj.weight"]
    assert (down.shape, down.stride(), down.storage_offset()) == ((16, 12), (12, 1), 2 * 16 * 12)


def test_a_tied_tensor_is_there_once_and_its_other_name_apart() -> None:
    views = checkpoint_views(qwen2(tied=True))
    assert "lm_head.weight" not in views.tensors
    assert [name for name, _ in views.tied] == ["lm_head.weight"]
    assert views.tied[0][1] is views.tensors["model.embed_tokens.weight"]
    assert checkpoint_views(qwen2(tied=False)).tied == []


def test_nothing_is_read() -> None:
    with torch.device("meta"):
        module = qwen3_moe()
    views = checkpoint_views(module)
    assert all(tensor.is_meta for tensor in views.tensors.values())
    assert len(views.views) == 21


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
    views = checkpoint_views(qwen2(tied=False))
    assert views.views == []
    assert "computes new values" in views.without_view["norm.weight"]
    assert "no view of it" in views.without_view["lm_head.weight"]
