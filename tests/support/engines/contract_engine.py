"""A tiny engine that keeps, or on request breaks, every promise of the RolloutEngine contract.

Weights and cache are its own and lie in regions: sleep really gives their memory back, and weights that were discarded
really are gone. Faults can be injected into its calls (see `faults.py`), so that leases, handoff, probe and watchdog
can be tested against an engine that misbehaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.config.schema import InPlaceRolloutConfig
from hybrid_rl.engines.base import (
    KV_CACHE,
    WEIGHTS,
    EngineState,
    FinishedSample,
    RolloutRequest,
)
from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.engines.inplace.blocks import BlockPool
from hybrid_rl.engines.inplace.scheduler import Chunk, Scheduler, Sequence
from hybrid_rl.engines.inplace.slots import SlotTable
from hybrid_rl.engines.sampling import SamplingTensors, check_finite, penalise, sample
from hybrid_rl.errors import HandoffError
from hybrid_rl.models.packed.startup_check import LengthLimit
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.resharding.layout import WeightLayout
from hybrid_rl.weights.sources import named_weights
from tests.support.engines.engine_faults import Effect, Fault, Faults
from tests.support.engines.sleeping_region import SleepingRegion


def layout_bytes(layout: WeightLayout) -> int:
    """Bytes of all tensors of a layout."""
    return sum(spec.num_bytes for spec in layout.tensors)


class ContractModel(nn.Module):
    """The trainer's side: a language model that can be computed by hand.

    With v the embeddings of the tokens, the logits behind token t are `head (v_t + decay * sum of v_j for j <= t)`:
    they depend on every weight, on the buffer `decay`, and, in an engine, on all that the cache holds.
    """

    decay: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, *, decay: float = 0.5) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(vocab_size, hidden_size))
        self.head = nn.Parameter(torch.randn(vocab_size, hidden_size) / hidden_size**0.5)
        self.register_buffer("decay", torch.tensor([decay]))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        """int64 [B, T] to an object whose `logits` are float32 [B, T, V]."""
        embedded = self.embedding[input_ids]
        hidden = embedded + self.decay * embedded.cumsum(-2)
        return SimpleNamespace(logits=hidden @ self.head.T)


class ContractEngine(RolloutEngine):
    """A RolloutEngine with the weights of a `ContractModel` of the same sizes; on the CPU, in fp32.

    config: as for the in-place engine, without CUDA graphs. max_positions: longest prompt and completion together.
    decode: token ids to text, for stop strings. discard_weights: sleeping weights are lost and have to be published
    again, else they come back. faults: what is to go wrong.
    """

    def __init__(
        self,
        config: InPlaceRolloutConfig,
        *,
        vocab_size: int,
        hidden_size: int,
        max_positions: int,
        decode: Callable[[Rows[int]], str] | None = None,
        discard_weights: bool = False,
        faults: Iterable[Fault] = (),
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            limit=LengthLimit(max_positions, f"the model has {max_positions} positions"),
            max_num_waiting=config.engine_args.max_num_waiting,
            decode=decode,
        )
        self._config = config
        self._discard_weights = discard_weights
        self.faults = Faults(faults)
        self._first: dict[str, Tensor] | None = None  # what a stale engine comes back with

        with torch.device("meta"):
            template = named_weights(ContractModel(vocab_size, hidden_size))
        self._layout = WeightLayout.of(template.items())
        self._buffer_names = tuple(name for name, tensor in template.items() if not isinstance(tensor, nn.Parameter))
        self.weights_region, self.kv_region = SleepingRegion(WEIGHTS), SleepingRegion(KV_CACHE)
        self.own_weights = {
            spec.name: self.weights_region.allocate(spec.shape, spec.dtype) for spec in self._layout.tensors
        }
        size = config.engine_args.block_size
        num_blocks = config.max_num_seqs * -(-max_positions // size)
        if config.kv_cache_memory_bytes is not None:
            num_blocks = max(1, config.kv_cache_memory_bytes // (size * hidden_size * torch.float32.itemsize))
        self.keys = self.kv_region.allocate((num_blocks * size, hidden_size), torch.float32)
        self.kv_cache_tokens, self.kv_cache_bytes = len(self.keys), self.kv_region.num_bytes
        self.weights_region.sleep("discard")
        self.kv_region.sleep("discard")

        self._scheduler = Scheduler(
            BlockPool(num_blocks, size),
            SlotTable(config.max_num_seqs, -(-max_positions // size)),
            max_num_batched_tokens=config.engine_args.max_num_batched_tokens,
            remember_prefixes=config.engine_args.enable_prefix_caching,
            counters=self._counters,
        )

    # ------------------------------------------------------------------------------------------------ requests

    def _begin_rollout(self) -> None:
        self._scheduler.pool.forget()

    def _queue(self, requests: Rows[RolloutRequest]) -> None:
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
        """Compute a pass; returns what finished."""
        self.require_ready(self.policy_version)
        effect = self.faults.enter("step")
        leaving = self._scheduler.take_aborted(self._aborted)
        chunks = [] if self._paused == "keep" else self._scheduler.schedule(admit=self._paused is None)
        try:
            if effect == "raise":
                self.faults.fail("step")
            sampled = self._run(chunks)
        except BaseException:
            # Blocks count as written that were not: everybody is computed again, and who was leaving leaves later.
            self._scheduler.requeue_running()
            self._scheduler.add(leaving)
            raise
        self._aborted = set()
        finished = [self._finish(sequence, "abort") for sequence in leaving]
        for sequence, token, logprob in sampled:
            if reason := self._extend(sequence, token, logprob):
                self._scheduler.remove(sequence)
                finished.append(self._finish(sequence, reason))
        return finished

    def _run(self, chunks: list[Chunk]) -> list[tuple[Sequence, int, float]]:
        """A pass: copy what newcomers continue, write the keys of all chunks, then choose a token for every sequence
        whose last chunk it was."""
        size = self._config.engine_args.block_size
        copies = [(chunk.copied_block, chunk.sequence.blocks[chunk.start // size]) for chunk in chunks]
        pairs = [(source, block) for source, block in copies if source >= 0]
        held = [self.keys[source * size : (source + 1) * size].clone() for source, _ in pairs]
        for (_, block), keys in zip(pairs, held, strict=True):
            self.keys[block * size : (block + 1) * size] = keys
        for chunk in chunks:
            start, end = chunk.start, chunk.start + chunk.count
            token_ids = torch.tensor(chunk.sequence.context(start, end))
            self.keys[self._slots(chunk.sequence, start, end)] = self.own_weights["embedding"][token_ids]
        for chunk in chunks:
            end = chunk.start + chunk.count
            # Full blocks are shared; the last, partly filled one is written by each sequence and so is copied.
            own = end - end % size
            for follower in chunk.followers:
                self.keys[self._slots(follower, own, end)] = self.keys[self._slots(chunk.sequence, own, end)]
        sequences = [sequence for chunk in chunks for sequence in chunk.sampled]
        tokens, logprobs = self._choose(sequences) if sequences else ([], [])
        if chunks:
            self._scheduler.complete(chunks)
        return list(zip(sequences, tokens, logprobs, strict=True))

    def _slots(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Where tokens start .. end of a sequence lie in the cache."""
        size = self._config.engine_args.block_size
        return [sequence.blocks[i // size] * size + i % size for i in range(start, end)]

    def _choose(self, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        """The next token of each sequence, and ln p of it."""
        device = torch.device("cpu")
        params = SamplingTensors.of([sequence.request.params for sequence in sequences], device)
        # Row by row: the bits of a product may depend on its shape, and a sample must not depend on its batch.
        rows = []
        for row, sequence in enumerate(sequences):
            keys = self.keys[self._slots(sequence, 0, sequence.num_tokens)]
            logits = self.own_weights["head"] @ (keys[-1] + self.own_weights["decay"] * keys.sum(0))
            history = torch.tensor(sequence.context(0, sequence.num_tokens))
            rows.append(penalise(logits[None], params.repetition_penalty[row : row + 1], history[None]))
        positions = torch.tensor([len(sequence.tokens) for sequence in sequences])
        tokens, logprobs = sample(torch.cat(rows), params, positions)
        check_finite(logprobs.tolist())
        return tokens.tolist(), logprobs.tolist()

    # --------------------------------------------------------------------------------------- weights and memory

    @torch.inference_mode()
    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Copy the weights of a policy version. Raises HandoffError if the source has other tensors, or if
        a byte was not written; the engine then holds no version until it is given weights."""
        start = time.perf_counter()
        self.require_update(version)
        if source.weight_layout() != self._layout:
            raise HandoffError(f"the trainer's weights are {source.weight_layout()}, the engine's {self._layout}")
        effect = self.faults.enter("update_weights")
        num_bytes = layout_bytes(self._layout)
        if effect != "ignore":
            self._scheduler.requeue_running()
            self.policy_version = -1
            if effect != "stale_weights":
                num_bytes = self._copy(source, effect)
            if num_bytes != layout_bytes(self._layout):
                raise HandoffError(
                    f"{num_bytes} of {layout_bytes(self._layout)} bytes of policy version {version} were written"
                )
            self.policy_version = version
        if self._first is None:
            self._first = {name: tensor.clone() for name, tensor in self.own_weights.items()}
        return HandoffReport(
            num_bytes, version=version, num_tensors=len(self.own_weights), seconds=time.perf_counter() - start
        )

    def _copy(self, source: Source, effect: Effect | None) -> int:
        """Write the weights; returns the bytes written."""
        num_bytes = 0
        for number, (name, mine) in enumerate(self.own_weights.items(), start=1):
            if effect == "raise" and 2 * number > len(self.own_weights):
                self.faults.fail("update_weights")
            left_out = 1 if effect == "skip_byte" and number == len(self.own_weights) else 0
            end = mine.numel() * mine.itemsize - left_out
            theirs = source.full(name).detach().contiguous()
            mine.view(-1).view(torch.uint8)[:end] = theirs.view(-1).view(torch.uint8)[:end]
            num_bytes += end
        return num_bytes

    @torch.inference_mode()
    def sleep(self, tags: Iterable[str]) -> None:
        """Release regions. Without weights nothing can be cached: the cache goes to sleep with them."""
        tags = self.require_sleep(tags)
        effect = self.faults.enter("sleep")
        if effect == "raise":
            self.faults.fail("sleep")
        self._scheduler.requeue_running()
        if not self.kv_region.is_asleep:
            self.kv_region.sleep("discard")
        if WEIGHTS in tags and not self.weights_region.is_asleep:
            if effect == "drop_buffers":
                for name in self._buffer_names:
                    self.own_weights[name].zero_()
            self.weights_region.sleep("discard" if self._discard_weights else "offload")
            if self._discard_weights:
                self.policy_version = -1
        self._settle()

    @torch.inference_mode()
    def wake(self, tags: Iterable[str]) -> None:
        """Get regions back."""
        tags = self.require_wake(tags)
        effect = self.faults.enter("wake")
        if effect == "raise":
            self.faults.fail("wake")
        if self.weights_region.is_asleep:
            self.weights_region.wake()
        if effect == "stale_weights" and self._first is not None:
            for name, tensor in self._first.items():
                self.own_weights[name].copy_(tensor)
        if KV_CACHE in tags and self.kv_region.is_asleep:
            self.kv_region.wake()
        self._settle()

    def _settle(self) -> None:
        if self.weights_region.is_asleep:
            self.state = EngineState.ASLEEP
        else:
            self.state = EngineState.WEIGHTS if self.kv_region.is_asleep else EngineState.READY

    def _cache_usage(self) -> tuple[int, float]:
        pool = self._scheduler.pool
        num_bytes = 0 if self.kv_region.is_asleep else self.kv_region.num_bytes
        return num_bytes, 1 - pool.num_free / pool.num_blocks
