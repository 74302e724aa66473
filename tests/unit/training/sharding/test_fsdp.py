"""What sharding decides before any rank talks to another."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models.packed.repeated_layers import transformer_blocks
from hybrid_rl.training.sharding.fsdp import ShardOptions, device_mesh, shard
from hybrid_rl.training.sharding.twin import Twin
from tests.unit.models.families import SUPPORTED, build


@pytest.mark.parametrize("name", SUPPORTED)
def test_blocks_of_every_supported_family_hold_no_embedding_and_no_shared_parameter(name: str) -> None:
    module = build(name)
    blocks = transformer_blocks(module)
    assert [type(block) for block in blocks] == [type(blocks[0])] * 2
    inside = [id(p) for block in blocks for p in block.parameters()]
    assert len(set(inside)) == len(inside)
    assert not set(inside) & {id(p) for p in module.get_input_embeddings().parameters()}
    assert len(inside) > 0.7 * len(list(module.parameters()))


def test_an_architecture_without_blocks_is_named() -> None:
    with pytest.raises(ModelError, match="Linear names no transformer blocks"):
        transformer_blocks(nn.Linear(2, 2))


def test_axes_must_multiply_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ConfigError, match="dp_replicate=3 times dp_shard=2 are not the 4 ranks"):
        device_mesh(ShardOptions(3, 2, torch.float32), "cpu")


def test_cpu_offload_is_refused_where_it_does_nothing() -> None:
    mesh: Any = SimpleNamespace(device_type="cpu")
    with pytest.raises(ConfigError, match="does nothing on CPU ranks"):
        shard(build("qwen2"), mesh, ShardOptions(1, 2, torch.float32, cpu_offload=True))


@pytest.mark.parametrize(
    ("computed", "stored"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_shards_are_at_least_fp32(computed: torch.dtype, stored: torch.dtype) -> None:
    assert ShardOptions(1, 2, computed).master_dtype is stored


@pytest.mark.parametrize("tied", [True, False])
def test_a_twin_has_the_structure_and_the_ties_but_no_weights(tied: bool) -> None:
    module = build("qwen2", tie_word_embeddings=tied)
    twin = Twin(module).module
    assert type(twin) is type(module)
    shapes = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False)}
    assert {name: p.shape for name, p in twin.named_parameters(remove_duplicate=False)} == shapes
    assert all(p.is_meta for p in twin.parameters())
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) is tied
    assert not any(p.is_meta for p in module.parameters())
    buffers = dict(module.named_buffers())
    assert all(buffer is buffers[name] for name, buffer in twin.named_buffers())
