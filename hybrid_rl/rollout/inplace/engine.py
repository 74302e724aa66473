"""The embedded engine: decodes from the actor's own modules, so that a handoff writes no byte.

Continuous batching over a paged cache; the prompt of a group is computed once. One step is schedule -> run ->
postprocess.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from hybrid_rl.config import InPlaceConfig
from hybrid_rl.errors import DataError, EngineStateError, HandoffError
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.tensor import HandoffReport, TensorSource, check_shared
from hybrid_rl.resharding.layout import WeightLayout, named_weights
from hybrid_rl.rollout.base import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    EngineState,
    EngineStats,
    FinishedSample,
    PauseMode,
    RolloutEngine,
    RolloutRequest,
)
from hybrid_rl.rollout.inplace.kv_cache import BlockPool, DecodeAttention, PagedCache, PrefillAttention, ShapeRecorder
from hybrid_rl.rollout.inplace.scheduler import Prefill, Scheduler, Sequence
from hybrid_rl.rollout.sampling import SamplingTensors, sample

FREE_MEMORY_SHARE = 0.4  # of what the machine has free, where the size of the cache is not set


@dataclass
class _Decode:
    """The decode batch as tensors; rebuilt when its members change, advanced in place otherwise."""

    members: list[Sequence]
    slots: Tensor  # int64 [B, longest possible]
    length: Tensor  # int64 [B], tokens so far, the newest included (which is not in the cache yet)
    num_generated: Tensor  # int64 [B]
    last: Tensor  # int64 [B], the newest token
    sampling: SamplingTensors


class InPlaceEngine(RolloutEngine):
    """A RolloutEngine over a `CausalLM` of this process. max_length: longest sequence (prompt and completion) to
    expect."""

    def __init__(self, model: CausalLM, config: InPlaceConfig, *, max_length: int) -> None:
        super().__init__()
        self._model = model
        self._weights = named_weights(model.module)
        with torch.inference_mode():
            recorder = ShapeRecorder()
            zero = torch.zeros(1, dtype=torch.int64, device=model.device)
            model.hidden_states(zero, zero, recorder)
        num_blocks = _num_blocks(config, recorder, max_length)
        self._cache = PagedCache(recorder.layers, num_blocks, config.block_size, model.device)
        self._scheduler = Scheduler(
            BlockPool(num_blocks),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._decode: _Decode | None = None
        self._ids: set[int] = set()
        self._aborted: set[int] = set()
        self._paused: PauseMode | None = None
        self._num_finished = self._num_prompt_tokens = self._num_shared_tokens = 0
        self._num_generated_tokens = self._num_steps = 0

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, requests: Rows[RolloutRequest], version: int) -> list[int]:
        """See RolloutEngine."""
        self.require_ready(version)
        seen = set(self._ids)
        for request in requests:
            self._check(request, seen)
            seen.add(request.id)
        self._ids = seen
        self._scheduler.add(Sequence(request) for request in requests)
        return [request.id for request in requests]

    def _check(self, request: RolloutRequest, seen: set[int]) -> None:
        if request.id in seen:
            raise DataError(f"request id {request.id} is in use")
        if not request.prompt_ids:
            raise DataError(f"request {request.id} has an empty prompt")
        outside = [
            t for t in (*request.prompt_ids, *request.params.stop_token_ids) if not 0 <= t < self._model.vocab_size
        ]
        if outside:
            raise DataError(
                f"request {request.id}: token {outside[0]} is outside the vocabulary of {self._model.vocab_size}"
            )
        length = len(request.prompt_ids) + request.params.max_tokens
        limit = self._model.max_positions
        if limit is not None and length > limit:
            raise DataError(
                f"request {request.id}: {len(request.prompt_ids)} prompt tokens and "
                f"max_tokens={request.params.max_tokens} exceed "
                f"the model's {limit} positions; shorten the prompt or lower max_completion_length"
            )
        room = self._cache.num_blocks * self._cache.block_size
        if self._scheduler.blocks_for(length) > self._cache.num_blocks:
            raise DataError(
                f"request {request.id}: {length} tokens do not fit the KV cache of {room}; raise kv_cache_memory_bytes "
                "or lower max_completion_length"
            )

    @property
    def num_unfinished(self) -> int:
        """See RolloutEngine."""
        return len(self._ids)

    def abort(self, ids: Iterable[int]) -> None:
        """See RolloutEngine."""
        self._aborted |= self._ids & set(ids)

    def pause(self, mode: PauseMode) -> None:
        """See RolloutEngine."""
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"pause mode {mode!r} is unknown; use abort, wait or keep")
        if mode == "abort":
            self.abort(self._ids)
        self._paused = mode

    def resume(self) -> None:
        """See RolloutEngine."""
        self._paused = None

    # ---------------------------------------------------------------------------------------------------- step

    @torch.inference_mode()
    def step(self) -> list[FinishedSample]:
        """See RolloutEngine."""
        self.require_ready(self.policy_version)
        finished = self._take_aborted()
        if self._paused == "keep":
            return finished
        prefill = self._scheduler.admit() if self._paused is None else None
        if prefill is not None:
            tokens, logprobs = self._run_prefill(prefill)
            members = prefill.sequences
        elif self._scheduler.running:
            tokens, logprobs = self._run_decode()
            members = self._scheduler.running
        else:
            return finished
        self._num_steps += 1
        return finished + self._postprocess(members, tokens, logprobs)

    def _take_aborted(self) -> list[FinishedSample]:
        if not self._aborted:
            return []
        everyone = [*self._scheduler.running, *self._scheduler.waiting]
        leaving = [sequence for sequence in everyone if sequence.request.id in self._aborted]
        self._aborted = set()
        for sequence in leaving:
            if sequence.blocks:
                self._scheduler.remove(sequence)
            else:
                self._scheduler.waiting.remove(sequence)
        self._decode = None
        return [self._finish(sequence, sequence.finished("abort")) for sequence in leaving]

    def _run_prefill(self, prefill: Prefill) -> tuple[Tensor, Tensor]:
        device = self._model.device
        leaders = [fork[0] for fork in prefill.forks]
        contexts = [sequence.context_ids for sequence in leaders]
        lengths = [len(context) for context in contexts]
        slots = [self._slots(sequence)[:length] for sequence, length in zip(leaders, lengths, strict=True)]
        token_ids = torch.tensor([token for context in contexts for token in context], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        attention = PrefillAttention(self._cache, lengths, torch.cat(slots))
        hidden = self._model.hidden_states(token_ids, positions, attention)
        ends = torch.tensor(lengths, device=device).cumsum(0) - 1
        self._copy_tails(prefill, lengths)
        self._decode = None
        self._num_prompt_tokens += sum(lengths)
        self._num_shared_tokens += sum(n * (len(fork) - 1) for n, fork in zip(lengths, prefill.forks, strict=True))
        sizes = torch.tensor([len(fork) for fork in prefill.forks], device=device)
        members = prefill.sequences
        generated = torch.tensor([len(sequence.tokens) for sequence in members], device=device)
        sampling = SamplingTensors.of([sequence.request.params for sequence in members], device)
        return sample(self._model.logits(hidden[ends]).repeat_interleave(sizes, 0), sampling, generated)

    def _copy_tails(self, prefill: Prefill, lengths: list[int]) -> None:
        """Full prompt blocks are shared; the last, partly filled one is written by each sequence and so is copied."""
        source, destination = [], []
        for fork, length in zip(prefill.forks, lengths, strict=True):
            tail = slice(length - length % self._cache.block_size, length)
            for sequence in fork[1:]:
                source.append(self._slots(fork[0])[tail])
                destination.append(self._slots(sequence)[tail])
        if source:
            self._cache.copy_slots(torch.cat(source), torch.cat(destination))

    def _slots(self, sequence: Sequence) -> Tensor:
        """Slot of every token that the sequence may ever have, int64."""
        size = self._cache.block_size
        blocks = torch.tensor(sequence.blocks, device=self._model.device)
        return (blocks[:, None] * size + torch.arange(size, device=blocks.device)).reshape(-1)

    def _run_decode(self) -> tuple[Tensor, Tensor]:
        batch = self._decode or self._build_decode()
        self._decode = batch
        newest = batch.length - 1
        slots = batch.slots[:, : int(batch.length.max())]
        hidden = self._model.hidden_states(batch.last, newest, DecodeAttention(self._cache, slots, newest))
        tokens, logprobs = sample(self._model.logits(hidden), batch.sampling, batch.num_generated)
        batch.last, batch.length, batch.num_generated = tokens, batch.length + 1, batch.num_generated + 1
        return tokens, logprobs

    def _build_decode(self) -> _Decode:
        device = self._model.device
        members = list(self._scheduler.running)
        slots = [self._slots(sequence) for sequence in members]
        return _Decode(
            members=members,
            slots=torch.nn.utils.rnn.pad_sequence(slots, batch_first=True),
            length=torch.tensor([len(s.request.prompt_ids) + len(s.tokens) for s in members], device=device),
            num_generated=torch.tensor([len(s.tokens) for s in members], device=device),
            last=torch.tensor([s.tokens[-1] for s in members], device=device),
            sampling=SamplingTensors.of([s.request.params for s in members], device),
        )

    def _postprocess(self, members: list[Sequence], tokens: Tensor, logprobs: Tensor) -> list[FinishedSample]:
        finished, staying = [], []
        for row, (sequence, token, logprob) in enumerate(
            zip(list(members), tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            sequence.append(token, logprob, self.policy_version)
            reason = sequence.finish_reason()
            if reason is None:
                staying.append(row)
            else:
                self._scheduler.remove(sequence)
                finished.append(self._finish(sequence, sequence.finished(reason)))
        self._num_generated_tokens += len(tokens)
        if finished and self._decode is not None:
            self._shrink_decode(staying)
        return finished

    def _shrink_decode(self, staying: list[int]) -> None:
        batch = self._decode
        assert batch is not None
        index = torch.tensor(staying, dtype=torch.int64, device=self._model.device)
        self._decode = _Decode(
            members=[batch.members[row] for row in staying],
            slots=batch.slots[index],
            length=batch.length[index],
            num_generated=batch.num_generated[index],
            last=batch.last[index],
            sampling=batch.sampling.select(index),
        )

    def _finish(self, sequence: Sequence, event: FinishedSample) -> FinishedSample:
        self._ids.discard(sequence.request.id)
        self._num_finished += 1
        return event

    # --------------------------------------------------------------------------------------- weights and memory

    def update_weights(self, source: TensorSource, version: int) -> HandoffReport:
        """See RolloutEngine. The source must be the very tensors that this engine decodes from."""
        start = time.perf_counter()
        if self.state is EngineState.ASLEEP:
            raise EngineStateError("the engine is asleep; wake its weights before updating them")
        if version <= self.policy_version:
            raise EngineStateError(
                f"policy version {version} does not follow version {self.policy_version}, which the engine holds"
            )
        if (self._ids and self._paused is None) or (self._scheduler.running and self._paused != "keep"):
            raise EngineStateError(
                f"{len(self._scheduler.running)} requests are running and {len(self._scheduler.waiting)} waiting; "
                f"finish them, or hold them by pause('keep'), or end them by pause('abort') and a step"
            )
        current = named_weights(self._model.module)
        if any(current.get(name) is not tensor for name, tensor in self._weights.items()):
            raise HandoffError("modules of the model were replaced since the engine was made; make a new engine")
        num_tensors = check_shared(source, current)
        self._drop_cache()
        self.policy_version = version
        return HandoffReport(version, 0, num_tensors, time.perf_counter() - start)

    def weight_layout(self) -> WeightLayout:
        """See RolloutEngine."""
        return WeightLayout.of(self._weights.items())

    def sleep(self, tags: Iterable[str]) -> None:
        """See RolloutEngine. The weights are the actor's: its own resident decides about their memory."""
        tags = _known(tags)
        if self._scheduler.running and self._paused != "keep":
            raise EngineStateError(
                f"{len(self._scheduler.running)} requests are running; finish or pause them before sleeping"
            )
        self._drop_cache()
        self._cache.free()
        self.state = EngineState.ASLEEP if WEIGHTS in tags or self.state is EngineState.ASLEEP else EngineState.WEIGHTS

    def wake(self, tags: Iterable[str]) -> None:
        """See RolloutEngine."""
        tags = _known(tags)
        if self.state is EngineState.ASLEEP and WEIGHTS not in tags:
            raise EngineStateError("the engine's weights are asleep; wake them before, or together with, its cache")
        if KV_CACHE in tags and not self._cache.is_allocated:
            self._cache.allocate()
        self.state = EngineState.READY if self._cache.is_allocated else EngineState.WEIGHTS

    def _drop_cache(self) -> None:
        self._scheduler.requeue_running()
        self._decode = None

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the cache while it is awake."""
        return self._cache.num_bytes

    def stats(self) -> EngineStats:
        """See RolloutEngine."""
        pool = self._scheduler.pool
        return EngineStats(
            state=self.state,
            policy_version=self.policy_version,
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_finished=self._num_finished,
            num_prompt_tokens=self._num_prompt_tokens,
            num_shared_prompt_tokens=self._num_shared_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            kv_cache_bytes=self._cache.num_bytes if self._cache.is_allocated else 0,
            kv_cache_used_share=1 - pool.num_free / pool.num_blocks,
        )


def _known(tags: Iterable[str]) -> frozenset[str]:
    tags = frozenset(tags)
    if not tags or tags - TAGS:
        raise ValueError(f"tags {sorted(tags)} must be some of {sorted(TAGS)}")
    return tags


def _num_blocks(config: InPlaceConfig, recorder: ShapeRecorder, max_length: int) -> int:
    block_bytes = config.block_size * sum(layer.bytes_per_token for layer in recorder.layers.values())
    blocks_per_sequence = -(-max_length // config.block_size)
    if config.kv_cache_memory_bytes is not None:
        return max(1, config.kv_cache_memory_bytes // block_bytes)
    free = psutil.virtual_memory().available
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    return max(
        blocks_per_sequence,
        min(config.max_num_seqs * blocks_per_sequence, int(FREE_MEMORY_SHARE * free) // block_bytes),
    )
