"""The embedded engine: decodes from the actor's own modules, so that a handoff copies nothing.

Continuous batching over a paged cache. One step is schedule -> prepare -> layers -> sample; a pass of the model takes
sequences that decode and chunks of prompts together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_rl.config.schema import InPlaceRolloutConfig
from hybrid_rl.engines.base import EngineState, FinishedSample, Generation, RolloutRequest
from hybrid_rl.engines.embedded import REPLACED, EmbeddedEngine
from hybrid_rl.engines.guards import free_cache_bytes
from hybrid_rl.engines.inplace.blocks import BlockPool
from hybrid_rl.engines.inplace.expert_cache import ExpertCache
from hybrid_rl.engines.inplace.kv_cache import PagedCache, ShapeRecorder, cache_region
from hybrid_rl.engines.inplace.runner import Pass, Runner
from hybrid_rl.engines.inplace.scheduler import Scheduler, Sequence
from hybrid_rl.engines.inplace.slots import SlotTable
from hybrid_rl.engines.inplace.speculation import Speculation
from hybrid_rl.engines.registry import EngineSetup
from hybrid_rl.errors import ConfigError, HandoffError
from hybrid_rl.memory.shortage import is_shortage, release_cached
from hybrid_rl.models import CausalLM
from hybrid_rl.models.int8.int8_model import Int8CausalLM
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.resharding.handoff.tensor import TensorSource, check_shared


class InPlaceEngine(EmbeddedEngine):
    """A RolloutEngine over a `CausalLM` of this process.

    max_length: longest sequence (prompt and completion) to expect. decode: token ids to text, special tokens kept; only
    requests with stop strings need it. memory_share: of the free memory that is this engine's to use; others in other
    processes have the rest. records_experts: samples say which experts their tokens went to; CUDA graphs are off then.

    Raises MemoryStateError on a GPU whose driver cannot map memory at addresses of our choice.
    """

    def __init__(
        self,
        model: CausalLM,
        config: InPlaceRolloutConfig,
        *,
        max_length: int,
        decode: Callable[[Rows[int]], str] | None = None,
        memory_share: float = 1.0,
        records_experts: bool = False,
    ) -> None:
        with torch.inference_mode():
            recorder = ShapeRecorder(config.kv_cache_dtype)
            zero = torch.zeros(1, dtype=torch.int64, device=model.device)
            model.hidden_states(zero, zero, recorder)
        _check_cache_dtype(config, model)
        args = config.engine_args
        # Not before a first pass, in which some rotary embeddings replace a buffer.
        super().__init__(model, max_num_waiting=args.max_num_waiting, decode=decode)
        num_blocks = _num_blocks(config, recorder, max_length, model.device, memory_share)
        region = cache_region(recorder.layers, num_blocks * args.block_size, model.device)
        self._cache = PagedCache(recorder.layers, num_blocks, args.block_size, model.device, region)
        self.kv_cache_tokens, self.kv_cache_bytes = num_blocks * args.block_size, self._cache.num_bytes
        slots = SlotTable(config.max_num_seqs, -(-max_length // args.block_size))
        self._scheduler = Scheduler(
            BlockPool(num_blocks, args.block_size),
            slots,
            max_num_batched_tokens=args.max_num_batched_tokens,
            remember_prefixes=args.enable_prefix_caching,
            shares_decoding=model.device.type == "cpu",  # elsewhere a pass of few rows takes as long as one of many
            counters=self.counters,
        )
        self._experts = ExpertCache(model, slots, num_blocks, args.block_size) if records_experts else None
        self.experts_shape = None if self._experts is None else self._experts.shape
        cuda_graphs = args.cuda_graphs and not records_experts
        self._runner = Runner(model, self._cache, slots, cuda_graphs=cuda_graphs, experts=self._experts)
        self._speculation = _speculation(self._scheduler, config, model.device)

    # ------------------------------------------------------------------------------------------------ requests

    def _begin_rollout(self) -> None:
        """Forget prefixes: what is found in the cache must not depend on what was generated before. A resumed run
        repeats its rollout to the bit, whatever was evaluated in between."""
        self._scheduler.pool.forget()
        self._runner.expect_moves()
        if self._speculation is not None:
            self._speculation.begin_rollout()

    def _queue(self, requests: Rows[RolloutRequest]) -> None:
        lengths = (len(request.prompt_ids) + request.params.max_tokens for request in requests)
        if self._scheduler.slots.widen(self._scheduler.blocks_for(max(lengths, default=0))):
            self._runner.expect_moves()
        self._scheduler.add(Sequence(request) for request in requests)

    @property
    def num_running(self) -> int:
        """Sequences that have blocks."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks."""
        return len(self._scheduler.waiting)

    # ---------------------------------------------------------------------------------------------------- step

    @torch.inference_mode()
    def step(self) -> list[FinishedSample]:
        """Schedule a pass, run it, and take its tokens; returns what finished.

        A pass that runs out of memory is undone, and later ones have half as many tokens of prompts, or sequences if
        these are more; the error is raised if it had one sequence, and a block of tokens at most."""
        self.require_ready(self.policy_version)
        leaving = self._scheduler.take_aborted(self._aborted)
        chunks = self._scheduler.schedule()
        batch: Pass | None = None
        sampled = hidden = None
        if chunks:
            try:
                if self._speculation is not None:
                    self._speculation.add(chunks)
                with self._runner.fewer_threads(chunks):
                    batch = self._runner.prepare(chunks)
                    with self._runner.recording(batch):
                        hidden = None if batch.inputs is None else self._model.hidden_states(*batch.inputs)
                    sampled = self._runner.sample(batch, hidden)
            except BaseException as error:
                self._undo_pass(leaving)
                if not (is_shortage(error) and self._scheduler.halve(chunks)):
                    raise
                limits = self._scheduler.max_running, self._scheduler.max_num_batched_tokens
                self._tell_shortage(
                    error,
                    "with at most {} of them, and {} tokens of prompts in a pass from now on "
                    "(rollout.max_num_seqs, rollout.engine_args.max_num_batched_tokens)".format(*limits),
                )
        if chunks and sampled is None:
            batch = hidden = None  # they hold tensors of the pass
            release_cached()
            return []
        self._aborted = set()
        finished = [self._finish(sequence, "abort") for sequence in leaving]
        if sampled is not None:
            self._scheduler.complete(chunks)
            ended, events = self._extended(sampled.sequences, sampled.tokens, sampled.logprobs)
            if self._speculation is not None:
                self._speculation.settle(chunks)
            for sequence in ended:
                if self._speculation is not None:
                    self._speculation.remember(sequence)
                self._scheduler.remove(sequence)
            finished += events
        return finished

    def _routed_experts(self, generation: Generation) -> npt.NDArray[np.int16] | None:
        assert isinstance(generation, Sequence)
        # A sequence that waits is computed again.
        return self._experts.of(generation) if self._experts is not None and generation.blocks else None

    def _undo_pass(self, leaving: list[Sequence]) -> None:
        """Let everybody wait again: blocks count as written that were not, and what was written may be NaN, which a
        weight of zero does not hide. Those that were leaving leave at the next step."""
        self._scheduler.requeue_running()
        self._scheduler.add(leaving)
        self._cache.clear()

    # --------------------------------------------------------------------------------------- weights and memory

    def _expect_moves(self) -> None:
        self._runner.expect_moves()

    def _release_cache(self) -> None:
        if self._cache.is_allocated:
            self._cache.free()

    def _allocate_cache(self) -> None:
        if not self._cache.is_allocated:
            self._cache.allocate()

    def close(self) -> None:
        """Give the memory of the cache back for good; idempotent."""
        self.state = EngineState.ASLEEP
        self._cache.close()

    def _cache_usage(self) -> tuple[int, float]:
        pool = self._scheduler.pool
        return self.kv_cache_bytes if self._cache.is_allocated else 0, 1 - pool.num_free / pool.num_blocks


class RoundedEngine(InPlaceEngine):
    """An InPlaceEngine over an `Int8CausalLM`, whose weights of 8 bits are made from the trainer's at each handoff.

    They stay while the trainer trains: they take a quarter of what is rounded, or less than half that in bfloat16.
    """

    def __init__(self, model: Int8CausalLM, config: InPlaceRolloutConfig, **arguments: Any) -> None:
        super().__init__(model, config, **arguments)
        self.rounded = model

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Round the weights of a policy version, `TensorSource.tensors`: masters where there are any, or shards.
        Collective if they are sharded. What is not rounded must be the very tensors that this engine decodes from, or
        is copied as well."""
        start = time.perf_counter()
        self.require_update(version)
        if not isinstance(source, TensorSource):
            raise HandoffError(f"the engine rounds the trainer's tensors; a {type(source).__name__} has none")
        if source.tensors.keys() != self.rounded.names:
            raise HandoffError(REPLACED)
        shared = self.rounded.shared
        check_shared(TensorSource({name: source.tensors[name] for name in shared}), shared)
        self._begin_rollout()
        self.policy_version = -1  # until all are written
        self.rounded.write(source.tensors)
        self.policy_version = version
        seconds = time.perf_counter() - start
        return HandoffReport(self.rounded.num_bytes, version=version, num_tensors=len(source.tensors), seconds=seconds)


def make_engine(setup: EngineSetup) -> InPlaceEngine:
    """Make the engine of rollout.engine=inplace."""
    assert isinstance(setup.config, InPlaceRolloutConfig)
    kind: Any = RoundedEngine if isinstance(setup.model, Int8CausalLM) else InPlaceEngine
    return kind(
        setup.model,
        setup.config,
        max_length=setup.max_length,
        decode=setup.decode,
        memory_share=setup.memory_share,
        records_experts=setup.records_experts,
    )


def _speculation(scheduler: Scheduler, config: InPlaceRolloutConfig, device: torch.device) -> Speculation | None:
    """Return what drafts tokens, None if nothing does. Raises ConfigError if it must and cannot."""
    if config.speculation == "on" and device.type != "cpu":
        raise ConfigError(
            f"rollout.speculation=on, but the model is on {device}, where every sequence decodes one token a pass; set "
            "rollout.speculation=off, or auto, which is off there"
        )
    return None if config.speculation == "off" or device.type != "cpu" else Speculation(scheduler, config.speculation)


def _check_cache_dtype(config: InPlaceRolloutConfig, model: CausalLM) -> None:
    """Raise ConfigError if no cache of this dtype is there for the model."""
    if config.kv_cache_dtype == "auto":
        return
    words = f"rollout.kv_cache_dtype={config.kv_cache_dtype}"
    if model.device.type != "cpu":
        raise ConfigError(f"{words} is for CPUs, but the model is on {model.device}; leave it out")
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"{words} rounds keys and values in float32 and bfloat16, not in {model.dtype}; leave it out")


def _num_blocks(
    config: InPlaceRolloutConfig, recorder: ShapeRecorder, max_length: int, device: torch.device, memory_share: float
) -> int:
    block_bytes = config.engine_args.block_size * sum(layer.bytes_per_token for layer in recorder.layers.values())
    blocks_per_sequence = -(-max_length // config.engine_args.block_size)
    if config.kv_cache_memory_bytes is not None:
        return max(1, config.kv_cache_memory_bytes // block_bytes)
    wanted = config.max_num_seqs * blocks_per_sequence
    return max(blocks_per_sequence, min(wanted, free_cache_bytes(device, memory_share) // block_bytes))
