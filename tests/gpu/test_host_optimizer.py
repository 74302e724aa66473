"""Masters and moments in host memory under weights on a GPU: the numbers of an optimizer that is all on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.training import host_optimizer
from hybrid_rl.training.host_optimizer import HostOptimizer
from hybrid_rl.training.optimizer import Optimizer
from tests.gpu.device import DEVICE, cuda_only
from tests.support.inside.workers import optimizer_of
from tests.support.tiny import build_model


@pytest.mark.parametrize("streamed", [1, 3000, 1 << 26], ids=["each", "some", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_streamed_updates_are_those_of_the_cpu(
    dtype: torch.dtype, streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clipping, whose norm is another sum there. Gradients are accumulated over two micro-batches, and one
    parameter is changed by hand."""
    monkeypatch.setattr(host_optimizer, "STREAMED_ELEMENTS", streamed)
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 33), nn.Linear(33, 7)]
    on_cpu = nn.Sequential(*layers).to(dtype)
    on_gpu = copy.deepcopy(on_cpu).to(DEVICE)
    config = OptimizerConfig(learning_rate=1e-2, max_grad_norm=None, weight_decay=0.1)
    usual = Optimizer(on_cpu, config, num_optimizer_steps=9)
    host = HostOptimizer(on_gpu, config, num_optimizer_steps=9)
    for step in range(5):
        if step == 3:
            with torch.no_grad():
                for module in (on_cpu, on_gpu):
                    module[2].bias.fill_(0.5)
        assert host.take_over().tolist() == usual.take_over().tolist()
        for _ in range(2):
            for mine, theirs in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
                gradient = torch.randn(mine.shape).to(dtype)
                mine.grad = gradient if mine.grad is None else mine.grad + gradient
                theirs.grad = gradient.to(DEVICE) if theirs.grad is None else theirs.grad + gradient.to(DEVICE)
            for optimizer in (usual, host):
                optimizer.accumulate()
        (norm, updated), (host_norm, host_updated) = usual.step(), host.step()
        assert updated and host_updated and host_norm == pytest.approx(norm, rel=1e-5)
        for mine, theirs in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
            assert torch.equal(mine, theirs.cpu())
    assert {tensor.device.type for tensor in host.tensors()} == {"cpu"}


@cuda_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_run_learns_the_same(dtype: torch.dtype, make_trainer: Any, records: Any) -> None:
    """Two implementations of AdamW round differently; weights of bfloat16 hide most of it, or show it as 2^-8."""
    found = []
    for on_host in (False, True):
        model = build_model(dtype=dtype).to(DEVICE)
        trainer = make_trainer(model, max_steps=3, **{"memory.on_host": ["optimizer"] if on_host else []})
        trainer.fit()
        optimizer = optimizer_of(trainer)
        assert {tensor.device.type for tensor in optimizer.tensors()} == {"cpu" if on_host else "cuda"}
        found.append([line for line in records(trainer) if line["step"] > 0])
    first, second = found
    for name in ("loss", "grad_norm", "entropy", "reward"):
        assert second[0][name] == pytest.approx(first[0][name], rel=1e-5, abs=1e-6), name  # before any update
    assert second[-1]["entropy"] == pytest.approx(first[-1]["entropy"], rel=0.02)
    assert all(line["handoff/probe_gap"] < (1e-3 if dtype == torch.float32 else 0.25) for line in second)
