"""The optimizer on shards against the optimizer of one process on the whole parameters."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.errors import CheckpointError
from hybrid_rl.training.optimizer import Optimizer
from hybrid_rl.training.sharding.fsdp import ShardOptions, device_mesh
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = 4
# The norm sums squares in another order: float32 rounding, through the clipping into every weight.
EXACT = {"rtol": 1e-6, "atol": 1e-7}


class Parts(nn.Module):
    """Parameters that 2 and 4 ranks cut evenly, unevenly, or that are smaller than the number of ranks; one frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {"even": (8, 3), "uneven": (5, 2), "vector": (7,), "single": (1,), "frozen": (4, 2)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape), requires_grad=name != "frozen"))


def optimizer_of(module: nn.Module, **keys: Any) -> Optimizer:
    settings = {"learning_rate": 1e-2, "max_grad_norm": 1.0, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
    return Optimizer(module, OptimizerConfig(**{**settings, **keys}), num_optimizer_steps=10)


def gradient_of(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    seed = 100 * step + sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (1 + step)


def give_gradients(module: nn.Module, step: int) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = gradient_of(name, parameter.shape, step)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            mine = whole.chunk(mesh.size(-1), 0)[mesh.get_local_rank(mesh.ndim - 1) :][:1]
            local = mine[0] if mine else whole[:0]
            whole = DTensor.from_local(
                local.contiguous(), mesh, parameter.placements, shape=whole.shape, stride=whole.stride()
            )
        parameter.grad = whole


def update_on_ranks(rank: int, num_ranks: int, dp_replicate: int) -> dict[str, Any]:
    options = ShardOptions(dp_replicate, num_ranks // dp_replicate, torch.float32)
    module = Parts()
    fully_shard(module, mesh=device_mesh(options, "cpu"))
    optimizer = optimizer_of(module)
    seen: dict[str, Any] = {"norms": [], "rates": []}
    for step in range(STEPS):
        give_gradients(module, step)
        norm, updated = optimizer.step()
        assert updated
        seen["norms"].append(norm)
        seen["rates"].append(optimizer.learning_rate)
    state = optimizer.state_dict()
    seen["weights"] = {name: p.full_tensor().detach() for name, p in module.named_parameters()}
    seen["state"] = {kind: {n: t.full_tensor() for n, t in state[kind].items()} for kind in ("exp_avg", "exp_avg_sq")}
    seen["steps"] = {name: float(step) for name, step in state["step"].items()}
    seen["bytes"] = optimizer.num_bytes
    # One rank's gradient is NaN: no rank updates.
    give_gradients(module, STEPS)
    if rank == num_ranks - 1:
        module.even.grad.to_local().fill_(math.nan)
    norm, updated = optimizer.step()
    seen["refused"] = (math.isnan(norm), not updated, torch.equal(module.even.full_tensor(), seen["weights"]["even"]))
    # A new optimizer goes on from the state, on the same shards.
    again = Parts()
    fully_shard(again, mesh=device_mesh(options, "cpu"))
    with torch.no_grad():
        for parameter, source in zip(again.parameters(), module.parameters(), strict=True):
            parameter.to_local().copy_(source.to_local())
    resumed = optimizer_of(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for made, its in ((module, optimizer), (again, resumed)):
        give_gradients(made, STEPS + 1)
        its.step()
    seen["resumed"] = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )
    whole = {**optimizer.state_dict(), "exp_avg": seen["state"]["exp_avg"]}
    if num_ranks // dp_replicate > 1:
        with pytest.raises(CheckpointError, match="'exp_avg' differs"):
            resumed.load_state_dict(whole)
    return seen


@pytest.mark.parametrize(("num_ranks", "dp_replicate"), [(2, 1), (4, 2), (3, 1)])
def test_updates_norm_and_state_are_those_of_one_process(num_ranks: int, dp_replicate: int) -> None:
    module = Parts()
    before = copy.deepcopy(module)
    optimizer = optimizer_of(module)
    norms = []
    for step in range(STEPS):
        give_gradients(module, step)
        norms.append(optimizer.step()[0])
    trained = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]
    squares = sum(gradient_of(name, shape, 0).double().square().sum() for name, shape in trained)
    assert norms[0] == pytest.approx(math.sqrt(squares), rel=1e-6)
    expected = optimizer.state_dict()
    results = run_ranks(update_on_ranks, num_ranks, dp_replicate)
    assert all(seen["norms"] == results[0]["norms"] for seen in results)  # to the bit
    for seen in results:
        assert seen["norms"] == pytest.approx(norms, rel=1e-6)
        assert seen["rates"][-1] == optimizer.learning_rate
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(seen["weights"][name], parameter.detach(), **EXACT)
        assert torch.equal(seen["weights"]["frozen"], before.frozen)
        for kind, tensors in seen["state"].items():
            assert tensors.keys() == expected[kind].keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected[kind][name], **EXACT)
        assert seen["steps"] == dict.fromkeys(("even", "uneven", "vector", "single"), float(STEPS))
        assert seen["refused"] == (True, True, True)
        assert seen["resumed"]
    num_elements = 8 * 3 + 5 * 2 + 7 + 1
    assert sum(seen["bytes"] - 4 * 4 for seen in results) == 8 * num_elements * dp_replicate
