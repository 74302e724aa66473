"""That the table of differences is true of the torch that is installed, and that what bridges them does what newer
versions do. `make pins` runs this on the oldest version."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from hybrid_rl.compat import torch_fsdp as fsdp2
from hybrid_rl.compat.torch_fsdp import DIFFERENCES
from hybrid_rl.training.sharding.fsdp import ShardOptions, device_mesh
from tests.distributed.ranks import run_ranks
from tests.support.libraries.torch_names import fsdp_state, gathered

pytestmark = pytest.mark.slow


class Experts(nn.Module):
    """Two layers, of which a call runs those that it names; a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, used: tuple[int, ...], factor: torch.Tensor | None = None) -> torch.Tensor:
        if factor is not None:
            self.seen.append(factor.dtype)
        return self.scale * sum(self.layers[index](x) for index in used)


class Model(nn.Module):
    """Three units: two blocks and a root without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts()])

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, used)
        return x


def sharded(*, replicas: int = 1) -> Any:
    mesh = device_mesh(ShardOptions(replicas, dist.get_world_size() // replicas, torch.float32), "cpu")
    model = Model()
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    for unit in fsdp2.units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        fsdp2.reduce_unused(unit)
    return model


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


# -------------------------------------------------------------------------------------------------------- the table


def rows_on_a_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    model = sharded()
    num_parameters = len(list(model.parameters()))
    return {
        "rows": {name: fsdp2.has(name, model) for name in DIFFERENCES},
        "names": {
            name: any(hasattr(thing, name) for thing in (model, fsdp_state(model)))
            for row in DIFFERENCES.values()
            for name in row.names
        },
        "parameters": (len(fsdp2.parameters(model)), num_parameters),
        "groups": [len(fsdp2.groups(unit)) for unit in fsdp2.units(model)],
    }


def test_every_row_is_true_of_what_is_installed() -> None:
    (seen,) = run_ranks(rows_on_a_rank, 1)
    assert seen["parameters"] == (6, 6)
    assert seen["groups"] == [0, 1, 1]  # the root has no parameters
    version = torch.__version__
    if not version.startswith(("2.11.", "2.13.")):
        pytest.skip(f"the table says nothing of torch {version}")
    for name, row in DIFFERENCES.items():
        expected = row.in_newest is not version.startswith("2.11.")
        assert seen["rows"][name] == expected, name
        assert {seen["names"][each] for each in row.names} == {expected}, name


# ------------------------------------------------------------------------------------------------ row reduces_unused

USED = {0: [(0, 1), (0,), (1,)], 1: [(0,), (0,), (0,)]}  # layers of each micro-batch, by rank


def unused_on_ranks(rank: int, num_ranks: int, sync: bool) -> dict[str, torch.Tensor]:
    model = sharded()
    for index, used in enumerate(USED[rank]):
        model.set_requires_gradient_sync(sync or index == 2)
        model(inputs(rank), used).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("sync", [False, True])
def test_ranks_may_use_different_parameters(sync: bool) -> None:
    """Rank 1 never reaches the second layers, rank 0 not in every micro-batch."""
    model = Model()
    for rank, micro_batches in USED.items():
        for used in micro_batches:
            model(inputs(rank), used).sum().backward()
    for seen in run_ranks(unused_on_ranks, 2, sync, deadline_seconds=60):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------------------------- row resets


def broken_off_on_ranks(rank: int, num_ranks: int, replicas: int) -> dict[str, Any]:
    """A micro-batch that was reduced, then one that breaks off in the backward pass of the second block."""
    model = sharded(replicas=replicas)
    fsdp2.reset(model)  # before the first forward pass nothing is there
    plain = train(model, rank)
    for parameter in model.parameters():
        parameter.grad = None
    model.set_requires_all_reduce(False)
    model(inputs(rank), (0, 1)).sum().backward()
    out = model.blocks[1].layers[0].register_full_backward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(inputs(rank), (0, 1)).sum().backward()
    out.remove()
    fsdp2.reset(model)
    held = [p for p in fsdp2.parameters(model) if p.sharded_state.name != "SHARDED"]
    for parameter in fsdp2.parameters(model):
        gathered(parameter).grad = None
    for parameter in model.parameters():
        parameter.grad = None
    return {"plain": plain, "again": train(model, rank), "unsharded": len(held)}


def train(model: Any, rank: int) -> dict[str, torch.Tensor]:
    """Two micro-batches whose shards are reduced at once, and over replicas after the second."""
    for index in range(2):
        model.set_requires_all_reduce(index == 1)
        model.set_is_last_backward(index == 1)
        model(inputs(rank + 2 * index), (0, 1)).sum().backward()
    return gradients(model)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("replicas", [1, 2])
def test_after_a_backward_pass_that_was_broken_off_the_next_step_is_as_ever(replicas: int) -> None:
    for seen in run_ranks(broken_off_on_ranks, 2, replicas, deadline_seconds=60):
        assert seen["unsharded"] == 0
        for name, gradient in seen["plain"].items():
            assert torch.equal(seen["again"][name], gradient), name


# ------------------------------------------------------------------------------- what is alike, by the way it is used


def recomputed_on_a_rank(rank: int, num_ranks: int) -> tuple[list[torch.dtype], torch.dtype]:
    block: Any = Experts()
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)), mp_policy=ShardOptions(1, 1, torch.bfloat16).precision)
    x = inputs(0).bfloat16().requires_grad_()
    factor = torch.ones(())  # float32
    out: torch.Tensor = checkpoint(block, x, (0, 1), factor, use_reentrant=False)  # type: ignore[assignment]
    out.sum().backward()
    return block.seen, out.dtype


def test_a_block_that_is_recomputed_gets_its_inputs_in_the_same_dtypes() -> None:
    """torch 2.11 does not cast them again in the backward pass, so nothing is cast in any version."""
    (seen,) = run_ranks(recomputed_on_a_rank, 1)
    assert seen == ([torch.float32, torch.float32], torch.bfloat16)
