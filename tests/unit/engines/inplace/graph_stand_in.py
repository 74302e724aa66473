"""A stand-in for CUDA graphs and for the kernels that run on CUDA only, so that the device's path runs on a CPU.

What a block captures is recorded operation by operation, with the very tensors that it used; a replay runs the
operations again and puts their results where they lay at the capture. So it has what matters of a CUDA graph: it sees
what lies at the captured addresses now, and nothing that the host has learned since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.compat.torch import TorchDispatchMode
from hybrid_rl.engines.inplace import cuda_graphs, engine, kv_cache, paged_attention, runner
from hybrid_rl.engines.inplace import host_to_device as upload
from hybrid_rl.memory.cuda_region import CudaRegion
from hybrid_rl.models import AttentionOptions, masked_attention
from tests.support.cuda.cuda_stand_in import StandIn, stand_in
from tests.support.libraries.torch_names import tree_flatten


class Recorder(TorchDispatchMode):
    """Lists the operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        self.calls.append((func, args, kwargs or {}, results))
        return out


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    log: list[str] = []  # captures and replays of all graphs
    modes: list[str] = []  # the error modes of the captures

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.given_pool: Any = None

    def pool(self) -> Any:
        return self.given_pool or (0, id(self))

    def replay(self) -> None:
        Graph.log.append("replay")
        for func, args, kwargs, places in self.calls:
            out = func(*args, **kwargs)
            results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
            for place, result in zip(places, results, strict=True):
                if place.data_ptr() != result.data_ptr():
                    place.copy_(result)


@contextmanager
def capture(graph: Graph, pool: Any = None, *, capture_error_mode: str = "global") -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    Graph.log.append("capture")
    Graph.modes.append(capture_error_mode)
    graph.given_pool = pool
    with Recorder() as recorder:
        yield
    graph.calls = recorder.calls


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        Graph.log.append("wait")


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Stands in for torch.cuda.stream."""
    Graph.log.append("warm up")
    yield


class Kernels:
    """Stands in for triton_decode: the same in operations of PyTorch that ask no tensor for its values."""

    num_launches = 0  # of what would be a kernel

    @staticmethod
    def plan_parts(context_length: Tensor, *, num_key_heads: int, window: int | None) -> Tensor:
        return context_length + 0

    @staticmethod
    def paged_store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: Tensor) -> None:
        place = (length.long() - 1).clamp(min=0)
        block = table.gather(1, (place // keys.shape[1])[:, None])[:, 0].long()
        there = (length > 0)[:, None, None]
        # Rows that are not there write what is there already, to the block that a row of zeros names.
        for memory, new in ((keys, key), (values, value)):
            index = (block * there[:, 0, 0], place % keys.shape[1])
            # One row after the other: such rows may name a place that a real one writes.
            for row in range(len(new)):
                at = tuple(part[row : row + 1] for part in index)
                memory.index_put_(at, torch.where(there[row], new[row], memory[at][0])[None])

    @staticmethod
    def paged_decode(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: Tensor, *, plan: Tensor, **settings: Any
    ) -> Tensor:
        options = AttentionOptions(**settings)
        num_rows, num_heads, dim = query.shape
        # Behind the context a table may hold anything.
        is_read = torch.arange(table.shape[1]) * keys.shape[1] < length[:, None]
        table = torch.where(is_read, table, 0)
        context, weighed = (memory[table.long()].flatten(1, 2).transpose(1, 2) for memory in (keys, values))
        place = torch.arange(context.shape[2])
        visible = place < plan[:, None]  # stale if a plan outlives its pass
        if options.window is not None:
            visible = visible & (plan[:, None] - 1 - place < options.window)
        visible = (visible | (plan[:, None] == 0))[:, None, None, :]
        grouped = query.reshape(num_rows, keys.shape[2], num_heads // keys.shape[2], dim)
        out = masked_attention(grouped, context, weighed, visible, options)
        return out.reshape(num_rows, num_heads, -1)


def force_device_path(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Until the test ends, engines on a CPU upload, capture and replay as they do on CUDA, and their caches lie in
    regions. Returns the driver of the regions."""
    Graph.log, Graph.modes = [], []
    driver = stand_in()

    def cache_region(layers: dict[int, kv_cache.LayerShape], num_tokens: int, device: torch.device) -> CudaRegion:
        room = kv_cache.region_bytes(layers, num_tokens)
        return CudaRegion("kv_cache", capacity_bytes=room, device=device, driver=driver.driver)

    monkeypatch.setattr(engine, "cache_region", cache_region)
    for module in (runner, upload):
        monkeypatch.setattr(module, "reads_host_memory", lambda device: False)
    for module in (runner, paged_attention):
        monkeypatch.setattr(module, "decodes_in_triton", lambda cache: True)
    monkeypatch.setattr(paged_attention, "_operator", lambda cache: None)
    monkeypatch.setattr(paged_attention, "triton_kernels", lambda: Kernels)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    assert cuda_graphs.torch is torch
    return driver
