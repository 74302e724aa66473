"""Ways to build and run a sharded model that must not change its gradients; and a step that is broken off."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.training.sharding.fsdp import (
    ShardedCausalLM,
    ShardOptions,
    accumulating,
    device_mesh,
    move_to_region,
    shard,
)
from hybrid_rl.weights.loading import load_weights
from hybrid_rl.weights.sources import StateSource, named_state
from tests.distributed.ranks import run_ranks
from tests.support.inside.memory import mapping_of
from tests.support.libraries.torch_names import no_recompiles
from tests.unit.models.families import VOCABULARY, build

pytestmark = pytest.mark.slow

LENGTHS = ([9, 12, 5], [14, 3], [6, 21, 4])
TARGETS = torch.tensor([1, 4, 8, 11, 16])


def sharded(
    module: Any, num_ranks: int, *, load: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> ShardedCausalLM:
    sharding = ShardOptions(1, num_ranks, dtype)
    shards = shard(module, device_mesh(sharding, "cpu"), sharding)
    if load is not None:
        load_weights(module, load, shards.device)
    return ShardedCausalLM(shards, **options)


def backward(
    model: ShardedCausalLM, rank: int, rows: Any = LENGTHS, *, fail: bool = False
) -> dict[str, torch.Tensor | None]:
    """Three micro-batches of these lengths, on every rank others first; whole gradients by name."""
    for index, lengths in enumerate((*rows[rank:], *rows[:rank])):
        token_ids = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(rank))
        with accumulating(model, is_last=index == 2):
            logprobs, entropy = model.packed_logprobs(token_ids, lengths, TARGETS, 0.7)
            if fail and index == 2:
                raise KeyboardInterrupt
            (logprobs * torch.linspace(-1, 1, len(TARGETS)) + 0.1 * entropy).sum().backward()
    named = dict(model.module.named_parameters())
    return {name: None if p.grad is None else whole(p.grad) for name, p in named.items()}


def whole(tensor: Any) -> torch.Tensor:
    """The rows of all ranks, by one plain collective: many asynchronous ones of DTensor have been seen to hang."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local())
    return torch.cat(parts)


def options_on_ranks(rank: int, num_ranks: int) -> dict[str, Any]:
    seen: dict[str, Any] = {"plain": backward(sharded(build("qwen2"), num_ranks), rank)}

    offloaded = sharded(build("qwen2"), num_ranks, activation_offload=True)
    seen["activation offload"] = backward(offloaded, rank)

    live = build("qwen2")
    source = StateSource({name: tensor.clone() for name, tensor in named_state(live).items()})
    on_meta = build_on_meta(ModelRecipe.of_module(live, source), torch.float32)
    assert all(p.is_meta for p in on_meta.parameters())
    model = sharded(on_meta, num_ranks, load=source)
    seen["gap"] = model.verify()
    seen["built on meta"] = backward(model, rank)

    halved = build_on_meta(ModelRecipe.of_module(live, source), torch.bfloat16)
    sharded(halved, num_ranks, load=source, dtype=torch.bfloat16)
    stored = dict(live.named_parameters())
    seen["masters"] = all(torch.equal(whole(p.detach()), stored[name]) for name, p in halved.named_parameters())

    model = sharded(build("qwen2"), num_ranks)
    backward(model, rank)
    model.discard_gradients()
    with pytest.raises(KeyboardInterrupt):
        backward(model, rank, fail=True)
    seen["after a step that was broken off"] = backward(model, rank)

    module = build("qwen2")
    module.get_input_embeddings().requires_grad_(False)
    module.model.layers[0].mlp.requires_grad_(False)
    seen["frozen"] = backward(sharded(module, num_ranks), rank)
    return seen


def test_options_do_not_change_gradients() -> None:
    for seen in run_ranks(options_on_ranks, 2):
        plain = seen["plain"]
        assert all(gradient is not None and gradient.any() for gradient in plain.values())
        assert seen["gap"] < 2e-6
        assert seen["masters"]  # in fp32, although the model computes in bfloat16
        for label in ("activation offload", "built on meta", "after a step that was broken off"):
            assert seen[label].keys() == plain.keys()
            assert all(torch.equal(seen[label][name], plain[name]) for name in plain), label
        frozen = {name for name, gradient in seen["frozen"].items() if gradient is None}
        assert frozen == {name for name in plain if "embed_tokens" in name or "layers.0.mlp" in name}
        assert all(torch.equal(seen["frozen"][name], plain[name]) for name in plain.keys() - frozen)


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


def compiled_on_ranks(rank: int, num_ranks: int) -> list[dict[bool, dict[str, torch.Tensor | None]]]:
    """Gradients without and with compiled blocks, without and with gradient checkpointing."""
    results = []
    for checkpointing in (False, True):
        torch.compiler.reset()  # another model is another compilation
        models = {compiled: sharded(build("qwen2"), num_ranks, compile=compiled) for compiled in (False, True)}
        if checkpointing:
            for model in models.values():
                model.enable_gradient_checkpointing()
        # Once with, and with checkpointing once without, an input that is a leaf; then for every length of a row.
        backward(models[True], rank, [[7, 11]] * 3)
        models[True].discard_gradients()
        with no_recompiles():
            results.append({compiled: backward(model, rank) for compiled, model in models.items()})
    return results


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_compiled_blocks_give_the_same_gradients() -> None:
    """Compilation takes half a minute, and much longer on a busy machine."""
    for seen in run_ranks(compiled_on_ranks, 2, deadline_seconds=800):
        for results in seen:
            scale = max(float(gradient.abs().max()) for gradient in results[False].values())
            for name, gradient in results[False].items():
                torch.testing.assert_close(results[True][name], gradient, rtol=0, atol=1e-5 * scale)
