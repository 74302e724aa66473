"""What a decode step asks of the device besides the layers: few launches, and one read by the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import hybrid_rl.engines
from hybrid_rl.compat.torch import TorchDispatchMode, schema_of
from hybrid_rl.engines import sampling
from hybrid_rl.engines.inplace.slots import SlotSampling
from hybrid_rl.models import CausalLM
from tests.support.inside.engines import drawn_token
from tests.unit.engines.engines import inplace, request
from tests.unit.engines.inplace.graph_stand_in import Graph, force_device_path

MOST_LAUNCHES = 40
READS = ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique")
READING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")


class Counter(TorchDispatchMode):
    """Counts operations that would launch something on a device, and reads by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.reads: list[str] = []
        self._is_suspended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func)
        name = schema.name.removeprefix("aten::")
        is_view = any(value.alias_info and not value.alias_info.is_write for value in schema.returns)
        if not self._is_suspended and not is_view and not name.startswith(("empty", "new_empty", "detach")):
            (self.reads if name in READING else self.launches).append(name)
        return func(*args, **(kwargs or {}))

    def suspended(self, function: Any, *, as_launches: int = 0) -> Any:
        """The function without what it does being counted, but for itself as some launches."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._is_suspended = self._is_suspended, True
            if not before:
                self.launches += [function.__name__] * as_launches
            try:
                return function(*args, **kwargs)
            finally:
                self._is_suspended = before

        return call


class Reads(TorchFunctionMode):
    """Lists the methods by which the host asks a tensor for its values. On a CPU most of them are no operations."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and not self._counter._is_suspended:
            self._counter.reads.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Count inside the block, the layers left out. Noise is made on the host; the draw is two kernels."""
    counter = Counter()

    def choose(logits: Tensor, temperature: Tensor, uniform: Tensor, out: Tensor | None = None) -> Tensor:
        chosen = drawn_token(logits, temperature, uniform)
        return chosen if out is None else out.copy_(chosen)

    kernels = SimpleNamespace(choose=counter.suspended(choose, as_launches=2))
    monkeypatch.setitem(sys.modules, "hybrid_rl.engines.triton_sampling", kernels)
    monkeypatch.setattr(hybrid_rl.engines, "triton_sampling", kernels, raising=False)
    monkeypatch.setattr(sampling, "draws_in_triton", lambda device: True)
    monkeypatch.setattr(SlotSampling, "uniform", counter.suspended(SlotSampling.uniform))
    monkeypatch.setattr(CausalLM, "hidden_states", counter.suspended(CausalLM.hidden_states))
    monkeypatch.setattr(Graph, "replay", counter.suspended(Graph.replay, as_launches=1))
    with counter, Reads(counter):
        yield counter


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_decode_step_launches_little_and_is_read_once(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    force_device_path(monkeypatch)
    rig = inplace(cuda_graphs=graphs).ready()
    rig.engine.submit([request(i, 4, 9, temperature=0.5 * (i % 3)) for i in range(7)], 1)
    with counted(monkeypatch) as counter:
        rig.engine.step()  # prompts, and the captures
        counter.launches, counter.reads = [], []
        rig.engine.step()
    assert counter.reads == ["cpu"]
    assert "copy_" in counter.launches and ("replay" if graphs else "choose") in counter.launches
    assert len(counter.launches) <= MOST_LAUNCHES, counter.launches
    assert counter.launches.count("copy_") == 1  # one upload


def test_a_mixed_pass_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    force_device_path(monkeypatch)
    rig = inplace().ready()
    rig.engine.submit([request(0, 4, 9)], 1)
    rig.engine.step()
    rig.engine.submit([request(1, 9, 9, group=1), request(2, 9, 9, group=1)], 1)
    with counted(monkeypatch) as counter:
        rig.engine.step()
    assert {"replay", "choose", "cat"} <= {*counter.launches}
    assert counter.reads == ["cpu"]


def test_the_counter_sees_what_noise_on_the_device_would_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Philox in operations of PyTorch: what made a step of a small model longer than its layers."""
    monkeypatch.setattr(hybrid_rl.compat.native, "operator", lambda name: None)
    params = sampling.SamplingTensors.of([request(0).params], torch.device("cpu"))
    with Counter() as counter:
        positions = params.seed * 0
        sampling.uniform_numbers(params.seed, positions)
    assert len(counter.launches) > 100
