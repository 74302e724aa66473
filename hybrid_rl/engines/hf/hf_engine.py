"""An engine for every architecture that transformers can generate with: the model's own forward, its own cache, our
sampler.

Sequences decode together if they are equally long, which asks nothing of an architecture: the samples of a group
always are, and their prompt is computed once. A running sequence keeps its memory until it is done; memory is counted
before it is admitted, so nothing is ever pushed out.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

import torch
from torch import nn

from hybrid_rl.config.schema import HFRolloutConfig
from hybrid_rl.engines.base import FinishedSample, RolloutRequest, join_line
from hybrid_rl.engines.embedded import EmbeddedEngine
from hybrid_rl.engines.guards import free_cache_bytes
from hybrid_rl.engines.hf.cohort import Cohort, Prompts
from hybrid_rl.engines.inplace.runner import Sampled
from hybrid_rl.engines.inplace.scheduler import Sequence
from hybrid_rl.engines.registry import EngineSetup
from hybrid_rl.memory.shortage import is_shortage, release_cached
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.cache import CacheSize, check_cache


class HFEngine(EmbeddedEngine):
    """A RolloutEngine over a `CausalLM` of this process.

    max_length: longest sequence (prompt and completion) to expect. decode: token ids to text, special tokens kept; only
    requests with stop strings need it. memory_share: of the free memory that is this engine's to use. Raises ModelError
    for a model whose cache is none of transformers', or does not give what the model gives without one.
    """

    def __init__(
        self,
        model: CausalLM,
        config: HFRolloutConfig,
        *,
        max_length: int,
        decode: Callable[[Rows[int]], str] | None = None,
        memory_share: float = 1.0,
    ) -> None:
        super().__init__(model, max_num_waiting=config.engine_args.max_num_waiting, decode=decode)
        self._config = config
        # The only ones that `enable_gradient_checkpointing` puts into training mode.
        self._parts = [part for part in model.module.modules() if hasattr(part, "gradient_checkpointing")]
        with _generating(self._parts):
            check_cache(model)
            self._size = size = CacheSize.of(model)
        wanted = config.max_num_seqs * size.num_bytes(max_length)
        self.kv_cache_bytes = config.kv_cache_memory_bytes or max(
            size.num_bytes(max_length), min(wanted, free_cache_bytes(model.device, memory_share))
        )
        # There is no limit if the model keeps nothing that grows with its sequences.
        free = max(0, self.kv_cache_bytes - size.fixed_bytes)
        self.kv_cache_tokens = free // size.token_bytes if size.token_bytes else sys.maxsize
        self._waiting: deque[Sequence] = deque()
        self._cohorts: list[Cohort] = []
        self._max_running = config.max_num_seqs
        self._num_tried = 0  # sequences of the last step, with those that it could not start

    # ------------------------------------------------------------------------------------------------ requests

    def _queue(self, requests: Rows[RolloutRequest]) -> None:
        join_line(self._waiting, (Sequence(request) for request in requests))

    @property
    def num_running(self) -> int:
        """Sequences of all cohorts."""
        return sum(len(cohort.sequences) for cohort in self._cohorts)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for memory, or for a place."""
        return len(self._waiting)

    # ---------------------------------------------------------------------------------------------------- step

    @torch.inference_mode()
    def step(self) -> list[FinishedSample]:
        """Make a token of everything that runs and of what can be admitted; returns what finished. A step that runs out
        of memory is undone, and later ones have half as many sequences; the error is raised if it had one."""
        self.require_ready(self.policy_version)
        leaving = self._take_aborted()
        finished: list[FinishedSample] = []
        sampled = None
        try:
            sampled = self._run()
        except BaseException as error:
            # The interrupted pass has written into some of the caches.
            self._requeue_running()
            self._waiting.extend(leaving)
            if self._num_tried <= 1 or not is_shortage(error):
                raise
            self._max_running = self._num_tried // 2
            self._tell_shortage(error, f"at most {self._max_running} at a time from now on (rollout.max_num_seqs)")
        if sampled is None:
            release_cached()
            return []
        self.counters.num_steps += bool(sampled)
        for part in sampled:
            ended, events = self._extended(part.sequences, part.tokens, part.logprobs)
            self._drop(ended)
            finished += events
        self._aborted = set()
        return [*(self._finish(sequence, "abort") for sequence in leaving), *finished]

    def _run(self) -> list[Sampled]:
        with _generating(self._parts):
            self._num_tried = self.num_running
            sampled = [cohort.decode() for cohort in self._cohorts]
            budget = self._config.engine_args.max_num_batched_tokens
            while prompts := self._admitted(budget, is_first=budget == self._config.engine_args.max_num_batched_tokens):
                self._num_tried = self.num_running + len(prompts.all_sequences)
                try:
                    cohort, first = Cohort.start(self._model, prompts)
                except BaseException:
                    self._waiting.extendleft(reversed(prompts.all_sequences))
                    raise
                self._cohorts.append(cohort)
                sampled.append(first)
                budget -= prompts.num_tokens
                self.counters.num_prompt_tokens += prompts.num_tokens
                self.counters.num_shared_prompt_tokens += prompts.length * len(cohort.sequences) - prompts.num_tokens
        return sampled

    def _admitted(self, budget: int, *, is_first: bool) -> Prompts | None:
        """Return the first that waits with all that wait and are as long, as far as places, memory and budget go; None
        if it must go on waiting itself. is_first: it need not fit the budget."""
        places = self._max_running - self.num_running
        free = self.kv_cache_bytes - self._held_bytes()
        prompts: Prompts | None = None
        staying: list[Sequence] = []
        while self._waiting and places > 0:
            sequence = self._waiting.popleft()
            prompts = prompts or Prompts(sequence.num_tokens)
            num_new = prompts.num_new_tokens(sequence)
            fits = self._reserved_bytes(sequence) <= free and (
                num_new <= budget or (is_first and not prompts.num_tokens)
            )
            if sequence.num_tokens == prompts.length and fits:
                prompts.add(sequence)
                places -= 1
                free -= self._reserved_bytes(sequence)
                budget -= num_new
            else:
                staying.append(sequence)
                if not prompts.num_tokens:
                    break
        self._waiting.extendleft(reversed(staying))
        return prompts if prompts is not None and prompts.num_tokens else None

    def _reserved_bytes(self, sequence: Sequence) -> int:
        """Return what a sequence may come to take; nothing is ever pushed out."""
        request = sequence.request
        return self._size.num_bytes(len(request.prompt_ids) + request.params.max_tokens)

    def _held_bytes(self) -> int:
        return sum(self._reserved_bytes(sequence) for cohort in self._cohorts for sequence in cohort.sequences)

    def _take_aborted(self) -> list[Sequence]:
        if not self._aborted:
            return []
        running = [sequence for cohort in self._cohorts for sequence in cohort.sequences]
        leaving = [sequence for sequence in (*running, *self._waiting) if sequence.request.id in self._aborted]
        self._drop(leaving)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.request.id not in self._aborted)
        return leaving

    def _drop(self, leaving: Rows[Sequence]) -> None:
        if leaving:
            for cohort in self._cohorts:
                cohort.drop(leaving)
            self._cohorts = [cohort for cohort in self._cohorts if cohort.sequences]

    # --------------------------------------------------------------------------------------- weights and memory

    def _requeue_running(self) -> None:
        running = [sequence for cohort in self._cohorts for sequence in cohort.sequences]
        self._waiting.extendleft(reversed(running))
        self._cohorts = []

    def _cache_usage(self) -> tuple[int, float]:
        return self.kv_cache_bytes if self._cache_is_awake else 0, self._held_bytes() / self.kv_cache_bytes


def make_engine(setup: EngineSetup) -> HFEngine:
    """Make the engine of rollout.engine=hf. Raises ModelError as HFEngine does."""
    assert isinstance(setup.config, HFRolloutConfig)
    return HFEngine(
        setup.model, setup.config, max_length=setup.max_length, decode=setup.decode, memory_share=setup.memory_share
    )


@contextmanager
def _generating(parts: Rows[nn.Module]) -> Iterator[None]:
    """Keep these parts out of training mode, in which transformers gives no cache if activations are recomputed."""
    training = [part for part in parts if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
