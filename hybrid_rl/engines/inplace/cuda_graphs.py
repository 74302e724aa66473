"""Decode passes as CUDA graphs: one copy and one launch instead of some hundreds, for batches of a few fixed sizes.

A graph holds the layers, the head and the draw of a token per sequence. It also holds addresses: of every weight, of
the cache, and of the tensors that it reads its pass from. So before the first pass of a rollout the addresses are
compared with those of the capture; if one of them has moved, all graphs are dropped, which the log says, and captured
again. A handoff moves nothing; a cache that sleeps and wakes keeps its addresses, and so do weights that are gathered
for a rollout.

A pass in which the host waits for the device cannot be captured, and a capture that fails cannot be gone on from. So a
pass is watched first, and a model with such layers decodes without graphs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.engines.inplace.capturing import HostReads, capturable
from hybrid_rl.engines.inplace.host_to_device import ALIGNMENT, staging
from hybrid_rl.engines.inplace.kv_cache import PagedCache
from hybrid_rl.engines.inplace.paged_attention import TritonDecode
from hybrid_rl.engines.sampling import choose_plain
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM

NUM_LARGE_SIZES = 8  # equal steps up to the largest batch; powers of two below them
ROW_ALIGNMENT = 16  # sequences: a column of the block table begins at a multiple of them
_logger = logging.getLogger("hybrid_rl")


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of graphs, ascending: thirteen for 256 sequences. A batch is filled up to the next of
    them."""
    step = max(1, -(-max_num_seqs // (NUM_LARGE_SIZES * 8)) * 8)
    sizes = {1 << power for power in range(step.bit_length()) if 1 << power < min(step, max_num_seqs)}
    return sorted(sizes | {*range(step, max_num_seqs, step), max_num_seqs})


@dataclass(frozen=True)
class DecodePass:
    """One new token per sequence. token_ids, positions: int64 [B]; temperature: float32 [B]; uniform: float64 [B], the
    number that picks each token; block_table: int32 [B, M], as far as the longest sequence goes."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64]
    block_table: npt.NDArray[np.int32]


class PassTables:
    """The bytes of a pass of `size` rows, in the same order on both sides. What is fixed comes first; then the block
    table, one block after the other for all sequences, so that one copy ends where the longest sequence does."""

    def __init__(self, size: int, num_blocks: int) -> None:
        self.size = size
        self._rows = -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
        fields = (("uniform", np.float64), ("token_ids", np.int64), ("positions", np.int64))
        self._places: dict[str, tuple[int, npt.DTypeLike]] = {}
        self._table = 0
        for name, dtype in (*fields, ("context_length", np.int32), ("temperature", np.float32)):
            self._places[name] = (self._table, dtype)
            self._table += -(-size * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self.num_bytes = self._table + 4 * self._rows * num_blocks

    def fill(self, step: DecodePass, memory: Tensor) -> Tensor:
        """Write a pass into host bytes, the rows that are not there as sequences of no tokens; the bytes in use."""
        count, num_blocks = step.block_table.shape
        end = self._table + 4 * self._rows * num_blocks
        bytes_ = memory.numpy()
        values = {"context_length": step.positions + 1}
        for name, (start, dtype) in self._places.items():
            column = bytes_[start : start + self.size * np.dtype(dtype).itemsize].view(dtype)
            column[:count] = values[name] if name in values else getattr(step, name)
            column[count:] = 0
        table = bytes_[self._table : end].view(np.int32).reshape(num_blocks, self._rows)
        table[:, :count] = step.block_table.T
        return memory[:end]

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Tensors over device bytes, by name; block_table: int32 [size, most blocks], with the columns side by side."""
        views = {}
        for name, (start, dtype) in self._places.items():
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            views[name] = memory[start : start + self.size * kind.itemsize].view(kind)
        table = memory[self._table : self.num_bytes].view(torch.int32)
        views["block_table"] = table.view(-1, self._rows)[:, : self.size].t()
        return views


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    tables: PassTables
    hidden: Tensor  # [size, H], overwritten by the next replay
    chosen: Tensor  # int32 [size, 2], likewise


@dataclass(frozen=True)
class _Memory:
    """Memory that all graphs read and write, and the addresses at which they were captured."""

    tables: Tensor  # uint8
    chosen: Tensor  # int32 [most sequences, 2]
    num_blocks: int  # columns of a block table that `tables` has room for
    addresses: dict[str, int]


class DecodeGraphs:
    """One graph per size, captured together, the largest first, in one pool of memory that all of them share.

    They are captured before the first pass of a rollout, when nothing is scored yet, and capturing concerns only calls
    of its own thread: what others ask of the device meanwhile neither fails nor ends up in a graph.
    """

    def __init__(self, model: CausalLM, cache: PagedCache, max_num_seqs: int) -> None:
        self._model = model
        self._cache = cache
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, _Graph] = {}
        self._memory: _Memory | None = None
        self._warm: set[int] = set()
        self.num_captures = 0

    def drop(self, reason: str) -> None:
        """Forget all graphs and give their memory back."""
        if self._graphs:
            _logger.info("%d decode graphs are dropped: %s", len(self._graphs), reason)
        self._graphs = {}
        self._memory = None

    def prepare(self, num_blocks: int) -> bool:
        """Have graphs that read what is there now, for sequences of up to so many blocks. False, with a warning, if
        passes of this model cannot be captured."""
        memory = self._memory
        if memory is not None:
            moved = [name for name, address in self._addresses().items() if memory.addresses.get(name) != address]
            if moved:
                self.drop(f"{moved[0]} has another address, or is new ({len(moved)} tensors in all)")
            elif num_blocks > memory.num_blocks:
                self.drop(f"a sequence may take {num_blocks} blocks, and they were made for {memory.num_blocks}")
        if not self._graphs:
            with capturable(self._model):
                return self._capture_all(num_blocks)
        return True

    def run(self, step: DecodePass) -> tuple[Tensor, Tensor]:
        """Hidden states [B, H] of one new token per sequence, and int32 [B, 2]: the next token of each and the bits of
        its logprob (see `choose_plain`). Both are valid until the next call."""
        assert self._memory is not None
        count = len(step.token_ids)
        graph = self._graphs[next(size for size in self._sizes if size >= count)]
        device = self._memory.tables.device
        host = graph.tables.fill(step, staging(graph.tables.num_bytes, device))
        self._memory.tables[: len(host)].copy_(host, non_blocking=True)
        graph.graph.replay()
        return graph.hidden[:count], graph.chosen[:count]

    def _addresses(self) -> dict[str, int]:
        """Addresses of everything that a graph reads and that is not its own."""
        module = self._model.module
        addresses = {name: tensor.data_ptr() for name, tensor in module.named_parameters(remove_duplicate=False)}
        addresses |= {name: tensor.data_ptr() for name, tensor in module.named_buffers(remove_duplicate=False)}
        for layer in self._cache.layers:
            keys, values = self._cache.memory(layer)
            addresses |= {f"keys of layer {layer}": keys.data_ptr(), f"values of layer {layer}": values.data_ptr()}
        return addresses

    def _capture_all(self, num_blocks: int) -> bool:
        device = self._model.device
        most = self._sizes[-1]
        tables = torch.zeros(PassTables(most, num_blocks).num_bytes, dtype=torch.uint8, device=device)
        chosen = torch.zeros(most, 2, dtype=torch.int32, device=device)
        self._memory = _Memory(tables, chosen, num_blocks, self._addresses())
        with HostReads(device) as reads:
            self._pass(PassTables(most, num_blocks).views(tables), chosen)
        if reads.first is not None:
            self._memory = None
            _logger.warning(
                "decode passes of %s are not captured as CUDA graphs, and take longer: in them the host waits for the "
                "device (%s). rollout.engine_args.cuda_graphs=false says so without this warning",
                *(type(self._model.module).__name__, reads.first),
            )
            return False
        pool = None
        graphs = {}
        try:
            for size in reversed(self._sizes):
                graphs[size] = self._capture(size, self._memory, pool)
                pool = graphs[size].graph.pool()
        except RuntimeError as error:
            self._memory = None
            raise ModelError(
                f"{type(self._model.module).__name__} cannot be captured as a CUDA graph ({error}); set "
                f"rollout.engine_args.cuda_graphs=false"
            ) from error
        self._graphs = graphs
        self.num_captures += len(graphs)
        return True

    def _capture(self, size: int, memory: _Memory, pool: Any) -> _Graph:
        device = self._model.device
        tables = PassTables(size, memory.num_blocks)
        views = tables.views(memory.tables)
        made = _Graph(torch.cuda.CUDAGraph(), tables, memory.chosen, memory.chosen[:size])
        if size not in self._warm:
            # Kernels are compiled and libraries make their workspaces in a run that is not captured.
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self._pass(views, made.chosen)
            torch.cuda.current_stream(device).wait_stream(side)
            self._warm.add(size)
        with torch.cuda.graph(made.graph, pool=pool, capture_error_mode="thread_local"):
            hidden = self._pass(views, made.chosen)
        return replace(made, hidden=hidden)

    def _pass(self, views: dict[str, Tensor], chosen: Tensor) -> Tensor:
        attention = TritonDecode(self._cache, views)
        hidden = self._model.hidden_states(views["token_ids"], views["positions"], attention)
        choose_plain(self._model.logits(hidden), views["temperature"], views["uniform"], chosen)
        return hidden
