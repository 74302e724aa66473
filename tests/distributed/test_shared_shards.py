from typing import Any

import pytest
import torch

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, device_mesh, move_to_region, shard
from hybrid_rl.weights.sources import StateSource, named_state
from tests.distributed.ranks import run_ranks
from tests.distributed.test_fsdp_options import backward, sharded
from tests.support.inside.memory import mapping_of
from tests.unit.models.families import build

pytestmark = pytest.mark.slow


def train_in_a_region(rank: int, num_ranks: int) -> dict[str, Any]:
    options = ShardOptions(1, num_ranks, torch.float32)
    seen: dict[str, Any] = {"plain": backward(sharded(build("qwen2"), num_ranks), rank)}
    shards = shard(build("qwen2"), device_mesh(options, "cpu"), options)
    region = move_to_region(shards, "actor")
    model = ShardedCausalLM(shards)
    start = torch.frombuffer(mapping_of(region), dtype=torch.uint8).data_ptr()
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
    for when in ("before", "after"):
        seen[when] = backward(model, rank)
        local = [p.to_local() for p in model.module.parameters()]  # type: ignore[attr-defined]
        inside = [start <= t.data_ptr() < start + region.num_bytes for t in local if t.numel()]
        seen[f"inside {when}"] = len(inside), all(inside)
        optimizer.step()
        model.discard_gradients()
    live = build("qwen2")
    recipe = ModelRecipe.of_module(live, StateSource({n: t.clone() for n, t in named_state(live).items()}))
    on_meta = shard(build_on_meta(recipe, torch.float32), device_mesh(options, "cpu"), options)
    with pytest.raises(MemoryStateError, match="no host memory"):
        move_to_region(on_meta, "actor")
    return seen


def test_shards_in_a_region_train_as_elsewhere_and_stay_there() -> None:
    """Three ranks: uneven shards, and empty ones."""
    for seen in run_ranks(train_in_a_region, 3):
        assert all(torch.equal(seen["before"][name], gradient) for name, gradient in seen["plain"].items())
        for when in ("before", "after"):
            num_tensors, all_inside = seen[f"inside {when}"]
            assert num_tensors > 0 and all_inside
        # The second gradient is that of other weights: FSDP gathered what the optimizer wrote.
        assert any(not torch.equal(seen["before"][name], seen["after"][name]) for name in seen["plain"])
