"""The optimizer in host memory against the usual one: the same numbers to the bit, whatever slices they stream in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.training import actor, host_optimizer
from hybrid_rl.training.host_optimizer import HostOptimizer
from hybrid_rl.training.optimizer import Optimizer
from tests.support.inside.training import num_slices, sums_of, targets_of
from tests.support.inside.workers import optimizer_of

DTYPES = [torch.float32, torch.bfloat16]


def module_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 5), nn.LayerNorm(5), nn.Linear(5, 2), nn.Linear(2, 2)).to(dtype)


def pair(dtype: torch.dtype, **keys: Any) -> list[tuple[nn.Module, Optimizer]]:
    """A module with the usual optimizer, and an equal one with that of the host."""
    config = OptimizerConfig(**{"learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, **keys})
    modules = [(module_of(dtype), cls) for cls in (Optimizer, HostOptimizer)]
    return [(module, cls(module, config, num_optimizer_steps=8)) for module, cls in modules]


def take_step(module: nn.Module, optimizer: Optimizer, step: int, scale: float = 1.0) -> tuple[float, bool]:
    """Two micro-batches; the last layer has no gradient in odd steps."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(2):
        for name, parameter in module.named_parameters():
            gradient = scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if not (name.startswith("3.") and step % 2):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.accumulate()
    return optimizer.step()


def contents(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()
    found = {f"weight/{name}": p.detach() for name, p in module.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq", "step", "master"):
        found |= {f"{kind}/{name}": value for name, value in state[kind].items()}
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    ("streamed", "hashes"),
    [(1, True), (50, True), (50, False), (1 << 26, True)],
    ids=["each", "some", "numbers", "all"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_steps_are_those_of_the_usual_optimizer(
    dtype: torch.dtype, streamed: int, hashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, with weight decay; the fourth is skipped, the fifth begins after a user has changed some weights, which
    is seen from hashes, or without them number by number."""
    monkeypatch.setattr(host_optimizer, "STREAMED_ELEMENTS", streamed)
    if not hashes:
        monkeypatch.setattr(HostOptimizer, "_hashes", lambda _: None)
    usual, host = pair(dtype)
    assert isinstance(host[1], HostOptimizer) and num_slices(host[1]) == {1: 8, 50: 2, 1 << 26: 1}[streamed]
    found = []
    for module, optimizer in (usual, host):
        told = [take_step(module, optimizer, step) for step in range(3)]
        told.append(take_step(module, optimizer, 3, scale=math.inf))
        with torch.no_grad():
            module[0].weight[2] = 0.25  # type: ignore[index]
        changed = optimizer.take_over().tolist()
        told.append(take_step(module, optimizer, 4))
        found.append((told, changed, optimizer.not_finite, optimizer.learning_rate))
    assert repr(found[0]) == repr(found[1])  # the norm of the skipped one is not a number
    assert [updated for _, updated in found[0][0]] == [True, True, True, False, True]
    assert found[0][1] == ([] if dtype == torch.float32 else [True] + [False] * 7)
    assert_equal(contents(*host), contents(*usual))
    assert all(parameter.grad is None for parameter in host[0].parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_state_goes_from_one_to_the_other(dtype: torch.dtype) -> None:
    """Weights are loaded before the state, as from a checkpoint; nobody is told that they were changed by hand."""
    (first, usual), (second, host) = pair(dtype)
    for step in range(2):
        take_step(first, usual, step)
    second.load_state_dict(first.state_dict())
    host.load_state_dict(usual.state_dict())
    assert not host.take_over().any()
    for step in (2, 3):
        assert take_step(first, usual, step) == take_step(second, host, step)
    assert_equal(contents(second, host), contents(first, usual))


def test_gradients_are_added_up_beside_the_weights_and_not_on_the_host() -> None:
    _, (module, host) = pair(torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    host.accumulate()
    assert {held.grad.dtype for held in sums_of(host) if held.grad is not None} == {torch.float32}
    assert all(target.grad is None for target in targets_of(host).values())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_run_is_the_same(make_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cls in (Optimizer, HostOptimizer):
        monkeypatch.setattr(actor, "Optimizer", cls)
        bench = make_bench(dtype="bfloat16", num_iterations=2)
        metrics = [bench.train(1), bench.train(2)]
        optimizer = optimizer_of(bench.worker)
        assert type(optimizer) is cls
        found.append((metrics, contents(bench.module, optimizer)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def test_what_goes_to_the_device_has_the_dtype_of_its_parameter_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm in float32 in a model of bfloat16: a copy that converts between host and device is made on the host, in
    memory that is not pinned, and waits. The steps are those of the usual optimizer."""
    found = []
    copy = host_optimizer._Lane.copy

    def watched(lane: Any, targets: Any, sources: Any) -> Any:
        assert [t.dtype for t in targets] == [s.dtype for s in sources]
        assert all(s.data_ptr() % s.itemsize == 0 for s in sources)
        return copy(lane, targets, sources)

    monkeypatch.setattr(host_optimizer._Lane, "copy", watched)
    for module, cls in [(module_of(torch.bfloat16), cls) for cls in (Optimizer, HostOptimizer)]:
        module[1].float()  # type: ignore[index]
        optimizer = cls(module, OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5), num_optimizer_steps=8)
        for step in range(3):
            take_step(module, optimizer, step)
        found.append({name: p.detach() for name, p in module.named_parameters()})
    assert {p.dtype for p in found[0].values()} == {torch.float32, torch.bfloat16}
    assert_equal(*found)
