"""Decode passes as CUDA graphs: one launch instead of some hundreds, for batches of a few fixed sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.rollout.inplace.kv_cache import PagedCache
from hybrid_rl.rollout.inplace.paged_attention import TritonDecode
from hybrid_rl.rollout.inplace.upload import upload

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8  # above: every multiple of this


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor  # int64 [size]
    positions: Tensor  # int64 [size]
    block_table: Tensor  # int32 [size, widest]
    context_length: Tensor  # int32 [size]
    hidden: Tensor  # [size, H], overwritten by the next replay


class DecodeGraphs:
    """One graph per batch size, captured when it is first needed.

    A batch is filled up to the next size by rows without a context, which read and write nothing.
    Graphs hold addresses: they are dropped with the memory of the cache. New weights in the same memory are seen.
    """

    def __init__(self, model: CausalLM, cache: PagedCache, max_num_seqs: int) -> None:
        self._model = model
        self._cache = cache
        self._sizes = [size for size in SMALL_SIZES if size < max_num_seqs]
        self._sizes += range(SIZE_STEP, max_num_seqs + SIZE_STEP, SIZE_STEP)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None

    def drop(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._pool = None

    def run(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        block_table: npt.NDArray[np.int32],
        widest: int,
    ) -> Tensor:
        """Hidden states [B, H] of one new token per sequence, valid until the next call.

        token_ids, positions: [B]; block_table: [B, at most widest]; widest: columns of the longest possible sequence.
        """
        count = len(token_ids)
        size = next(size for size in self._sizes if size >= count)
        graph = self._graphs.get((size, widest))
        if graph is None:
            graph = self._graphs[size, widest] = self._capture(size, widest)
        device = self._model.device
        graph.context_length.zero_()
        graph.token_ids[:count].copy_(upload(token_ids, device), non_blocking=True)
        graph.positions[:count].copy_(upload(positions, device), non_blocking=True)
        graph.context_length[:count].copy_(upload(positions + 1, device, np.int32), non_blocking=True)
        table = upload(block_table, device, np.int32)
        graph.block_table[:count, : table.shape[1]].copy_(table, non_blocking=True)
        graph.graph.replay()
        return graph.hidden[:count]

    def _capture(self, size: int, widest: int) -> _Graph:
        device = self._model.device
        token_ids, positions = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        block_table = torch.zeros(size, widest, dtype=torch.int32, device=device)
        context_length = torch.zeros(size, dtype=torch.int32, device=device)
        attention = TritonDecode(self._cache, block_table, context_length)
        graph = torch.cuda.CUDAGraph()
        try:
            # Kernels are compiled and libraries make their workspaces in a run that is not captured.
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self._model.hidden_states(token_ids, positions, attention)
            torch.cuda.current_stream(device).wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool):
                hidden = self._model.hidden_states(token_ids, positions, attention)
        except RuntimeError as error:
            raise ModelError(
                f"{type(self._model.module).__name__} cannot be captured as a CUDA graph ({error}); set "
                f"rollout.inplace.cuda_graphs=false"
            ) from error
        self._pool = graph.pool()
        return _Graph(graph, token_ids, positions, block_table, context_length, hidden)
