"""The embedded engine: decodes from the actor's own modules, so that a handoff writes no byte.

Continuous batching over a paged cache. One step is schedule -> run -> postprocess; a pass of the model takes sequences
that decode and chunks of prompts together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows

import psutil
import torch

from hybrid_rl.config import InPlaceConfig
from hybrid_rl.engines.base import (
    KV_CACHE,
    WEIGHTS,
    EngineState,
    EngineStats,
    FinishedSample,
    RolloutRequest,
)
from hybrid_rl.engines.embedded import EmbeddedEngine
from hybrid_rl.engines.inplace.blocks import BlockPool
from hybrid_rl.engines.inplace.kv_cache import PagedCache, ShapeRecorder
from hybrid_rl.engines.inplace.runner import Runner, Sampled
from hybrid_rl.engines.inplace.scheduler import Chunk, Scheduler, Sequence
from hybrid_rl.engines.inplace.seats import SeatTable
from hybrid_rl.models import CausalLM

FREE_MEMORY_SHARE = 0.4  # of what the machine has free, where the size of the cache is not set
SPARE_MEMORY_SHARE = 0.15  # of a device, left free beside a cache that stays


class InPlaceEngine(EmbeddedEngine):
    """A RolloutEngine over a `CausalLM` of this process.

    max_length: longest sequence (prompt and completion) to expect. decode: token ids to text, special tokens kept; only
    requests with stop strings need it. memory_share: of the free memory that is this engine's to use; others in other
    processes have the rest. keeps_cache: keep the memory of the KV cache, and the CUDA graphs over it, while the engine
    sleeps; None = on CUDA, after the first time, if the most memory that this process ever used leaves room for it.
    """

    def __init__(
        self,
        model: CausalLM,
        config: InPlaceConfig,
        *,
        max_length: int,
        decode: Callable[[Rows[int]], str] | None = None,
        memory_share: float = 1.0,
        keeps_cache: bool | None = None,
    ) -> None:
        super().__init__(model, max_num_waiting=config.max_num_waiting, decode=decode)
        with torch.inference_mode():
            recorder = ShapeRecorder()
            zero = torch.zeros(1, dtype=torch.int64, device=model.device)
            model.hidden_states(zero, zero, recorder)
        num_blocks = _num_blocks(config, recorder, max_length, model.device, memory_share)
        self._cache = PagedCache(recorder.layers, num_blocks, config.block_size, model.device)
        seats = SeatTable(config.max_num_seqs, -(-max_length // config.block_size))
        self._scheduler = Scheduler(
            BlockPool(num_blocks, config.block_size),
            seats,
            max_num_batched_tokens=config.max_num_batched_tokens,
            remember_prefixes=config.enable_prefix_caching,
        )
        self._runner = Runner(model, self._cache, seats, cuda_graphs=config.cuda_graphs)
        self._keeps_cache = keeps_cache
        self._has_slept = self._has_stayed = self._cache_is_awake = False

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, requests: Rows[RolloutRequest], version: int) -> list[int]:
        """See RolloutEngine."""
        self.check(requests, version)
        if not self._ids:
            # What is found in the cache must not depend on what was generated before: a resumed run repeats its rollout
            # to the bit, whatever was evaluated between.
            self._scheduler.pool.forget()
            self._runner.expect_moves()
        self._ids.update(request.id for request in requests)
        lengths = (len(request.prompt_ids) + request.params.max_tokens for request in requests)
        self._scheduler.seats.widen(self._scheduler.blocks_for(max(lengths, default=0)))
        self._scheduler.add(Sequence(request) for request in requests)
        return [request.id for request in requests]

    @property
    def num_running(self) -> int:
        """See GuardedEngine."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """See GuardedEngine."""
        return len(self._scheduler.waiting)

    # ---------------------------------------------------------------------------------------------------- step

    @torch.inference_mode()
    def step(self) -> list[FinishedSample]:
        """See RolloutEngine."""
        self.require_ready(self.policy_version)
        leaving = self._take_aborted()
        chunks = [] if self._paused == "keep" else self._scheduler.schedule(admit=self._paused is None)
        sampled = None
        if chunks:
            try:
                sampled = self._runner.run(chunks)
            except BaseException:
                self._undo_pass(leaving)
                raise
        finished = [self._finish(sequence, "abort") for sequence in leaving]
        if sampled is not None:
            self._count(chunks)
            finished += self._postprocess(sampled)
        return finished

    def _undo_pass(self, leaving: list[Sequence]) -> None:
        """Everybody waits again: blocks count as written that were not, and what was written may be NaN, which a weight
        of zero does not hide. Those that were leaving leave at the next step."""
        self._scheduler.requeue_running()
        self._scheduler.add(leaving)
        self._aborted.update(sequence.request.id for sequence in leaving)
        self._cache.clear()

    def _take_aborted(self) -> list[Sequence]:
        if not self._aborted:
            return []
        everyone = [*self._scheduler.running, *self._scheduler.waiting]
        leaving = [sequence for sequence in everyone if sequence.request.id in self._aborted]
        self._aborted = set()
        for sequence in leaving:
            if sequence.seat >= 0:
                self._scheduler.remove(sequence)
            else:
                self._scheduler.waiting.remove(sequence)
        return leaving

    def _count(self, chunks: list[Chunk]) -> None:
        self._num_steps += 1
        for chunk in chunks:
            self._num_prompt_tokens += 0 if chunk.is_decode else chunk.count
            self._num_shared_tokens += (chunk.start + chunk.count) * len(chunk.followers)
            self._num_generated_tokens += len(chunk.sampled)

    def _postprocess(self, sampled: Sampled) -> list[FinishedSample]:
        finished = []
        version = self.policy_version
        for sequence, token, logprob in zip(sampled.sequences, sampled.tokens, sampled.logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            reason = self._finish_reason(sequence.request, sequence.tokens)
            if reason is not None:
                self._scheduler.remove(sequence)
                finished.append(self._finish(sequence, reason))
        return finished

    # --------------------------------------------------------------------------------------- weights and memory

    def _forget(self) -> None:
        self._drop_cache()
        self._runner.expect_moves()

    def sleep(self, tags: Iterable[str]) -> None:
        """See RolloutEngine. The weights are the actor's: its own resident decides about their memory. The cache
        gives its memory back, or keeps it with the graphs over it; what it held is lost."""
        tags = self.require_sleep(tags)
        self._drop_cache()
        if self._cache.is_allocated and not self._stays():
            self._runner.drop_graphs("the memory of the cache is given back")
            self._cache.free()
        self._cache_is_awake = False
        self.state = EngineState.ASLEEP if WEIGHTS in tags or self.state is EngineState.ASLEEP else EngineState.WEIGHTS

    def _stays(self) -> bool:
        """Whether the cache stays in memory while others work."""
        device = self._model.device
        if self._keeps_cache is not None or device.type != "cuda":
            return bool(self._keeps_cache)
        first, self._has_slept = not self._has_slept, True
        if first:
            return False  # what training takes has not been seen yet
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        missing = 0 if self._has_stayed else self._cache.num_bytes  # in the peak, that is
        self._has_stayed = cache_fits(total, others, torch.cuda.max_memory_allocated(device), missing)
        return self._has_stayed

    def wake(self, tags: Iterable[str]) -> None:
        """See RolloutEngine."""
        tags = self.require_wake(tags)
        if KV_CACHE in tags:
            if not self._cache.is_allocated:
                self._cache.allocate()
            self._cache_is_awake = True
        self._runner.expect_moves()
        self.state = EngineState.READY if self._cache_is_awake else EngineState.WEIGHTS

    def _drop_cache(self) -> None:
        self._scheduler.requeue_running()

    @property
    def kv_cache_tokens(self) -> int:
        """See RolloutEngine."""
        return self._cache.num_blocks * self._cache.block_size

    @property
    def kv_cache_bytes(self) -> int:
        """See RolloutEngine."""
        return self._cache.num_bytes

    def stats(self) -> EngineStats:
        """See RolloutEngine."""
        pool = self._scheduler.pool
        return self._stats(
            self._cache.num_bytes if self._cache.is_allocated else 0,
            1 - pool.num_free / pool.num_blocks,
            num_prefix_tokens=self._scheduler.num_prefix_tokens,
            num_preemptions=self._scheduler.num_preemptions,
        )


def cache_fits(total_bytes: int, other_bytes: int, peak_bytes: int, cache_bytes: int) -> bool:
    """Whether a cache can stay on a device beside training.

    total_bytes: of the device; other_bytes: what other processes, contexts and libraries hold; peak_bytes: most that
    tensors of this process ever held; cache_bytes: what the cache adds to that. The peak may have been reached with the
    cache in memory, so the answer errs to the side of giving it back. SPARE_MEMORY_SHARE is left for longer batches and
    for gaps between tensors.
    """
    return other_bytes + peak_bytes + cache_bytes <= (1 - SPARE_MEMORY_SHARE) * total_bytes


def _num_blocks(
    config: InPlaceConfig, recorder: ShapeRecorder, max_length: int, device: torch.device, memory_share: float
) -> int:
    block_bytes = config.block_size * sum(layer.bytes_per_token for layer in recorder.layers.values())
    blocks_per_sequence = -(-max_length // config.block_size)
    if config.kv_cache_memory_bytes is not None:
        return max(1, config.kv_cache_memory_bytes // block_bytes)
    free = psutil.virtual_memory().available
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    return max(
        blocks_per_sequence,
        min(config.max_num_seqs * blocks_per_sequence, int(FREE_MEMORY_SHARE * memory_share * free) // block_bytes),
    )
