"""vLLM inside the trainer's process, as a RolloutEngine.

One step of ours is one step of vLLM. What waits, waits here: vLLM is given as many requests as may run, so that an
abort need not look into its queues.
"""

from __future__ import annotations

import gc
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from vllm.inputs import tokens_input

from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.engines.base import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    EngineState,
    FinishedSample,
    FinishReason,
    Generation,
    RolloutRequest,
    join_line,
)
from hybrid_rl.engines.colocated import ColocatedEngine
from hybrid_rl.engines.registry import EngineSetup
from hybrid_rl.engines.sampling import check_finite
from hybrid_rl.errors import EngineStateError, HandoffError
from hybrid_rl.models.packed.startup_check import LengthLimit
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.vllm.adapter_slots import make_writer
from hybrid_rl.vllm.arguments import engine_arguments
from hybrid_rl.vllm.build_engine import (
    LIVE,
    build,
    explain_step,
    own_group,
    own_sockets,
    release_groups,
    require_none_live,
    run_name,
    tear_down,
    variables,
)
from hybrid_rl.vllm.config_folder import config_folder
from hybrid_rl.vllm.derived import log_derived
from hybrid_rl.vllm.expert_records import PlannedRecord
from hybrid_rl.vllm.loader import LoadedWeights
from hybrid_rl.vllm.memory import EngineMemory, can_sleep_on, clean_allocator, freed_asleep
from hybrid_rl.vllm.process_state import Guest, classes_kept, on_stream, process_kept, stream_of_thread
from hybrid_rl.vllm.quantization import quantization_of, weights_on_grid
from hybrid_rl.vllm.translated_requests import check_sampling, sampled_logprobs, vllm_params
from hybrid_rl.weights.sources import named_weights
from hybrid_rl.weights.views import checkpoint_views

NEW_ENGINE = "make a new one (of a Trainer: save(), and make a new Trainer with resume=)"


class VLLMEngine(ColocatedEngine):
    """A RolloutEngine over one vLLM replica of this process.

    With tensor parallelism this is one rank of a replica: all of its ranks make the same calls in the same order (see
    EngineClient). torch.distributed is set up by whoever has several ranks, before; a single rank gets a group of its
    own for as long as the engine lives.

    module: the trainer's model: its class, its config and the names of its weights are used, never its weights. dtype:
    of the engine's weights. max_length: longest prompt and completion together. seed: equal on the ranks of a replica.
    decode: token ids to text. memory_share: of the free memory that is this engine's to use. adopts: have the
    trainer's weights in the engine's memory, for one rank of the engine's dtype; such memory cannot sleep.
    adapter_ranks: of the adapters that vLLM adds to its weights itself. records_experts: samples come with the experts
    that vLLM chose. can_sleep: whether memory is given back.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        config: VLLMRolloutConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        seed: int = 0,
        trust_remote_code: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        memory_share: float = 1.0,
        adopts: bool = False,
        adapter_ranks: Mapping[str, int] | None = None,
        records_experts: bool = False,
    ) -> None:
        require_none_live()
        records = PlannedRecord(config, device, module) if records_experts else None
        super().__init__(
            vocab_size=int(module.config.get_text_config().vocab_size),
            limit=LengthLimit(
                max_length, "vLLM was built for the longest prompt and max_completion_length, which may be raised"
            ),
            max_num_waiting=config.engine_args.max_num_waiting * config.tensor_parallel_size,
            decode=decode,
        )
        self._config, self._device = config, device
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(module).items()}
        views, quantisation = checkpoint_views(module), weights_on_grid(module, config, dtype)
        if quantisation is not None:
            views, self._shapes = quantisation.views(views), quantisation.shapes(self._shapes)
        self._guest = Guest(seed)
        self._owns_group = not dist.is_initialized()
        self.can_sleep = can_sleep = can_sleep_on(device) and not adopts
        try:
            if self._owns_group:
                own_group(device)
            self._writer = make_writer(
                views,
                adapter_ranks or {},
                rank=dist.get_rank(),
                quantization=quantization_of(config),
                dtype=dtype,
                device=device,
            )
            with (
                process_kept(variables(device, run_name()) | own_sockets()),
                on_stream(stream_of_thread(device)),
                self._guest.active(),
                classes_kept(module) as models,
                nullcontext() if records is None else records.building(),
            ):
                arguments = engine_arguments(
                    config,
                    config_folder(module),
                    dtype=dtype,
                    max_length=max_length,
                    seed=seed % 2**32,
                    trust_remote_code=trust_remote_code,
                    can_sleep=can_sleep,
                    device=device,
                )
                arguments = {**arguments, **self._writer.arguments(), **({} if records is None else records.arguments)}
                if can_sleep:
                    clean_allocator()
                self._llm, self.kv_cache_bytes = build(arguments, config, max_length, device, memory_share)
                self._record = None if records is None else records.of(self._llm)
                self.experts_shape = None if self._record is None else self._record.shape
                models.append(self._writer.weights.model)
                self._writer.begin()
                if quantisation is not None:
                    self.quantisation = quantisation.joined_as(self._writer.weights.whole_trace)
                self._guest.stream = stream_of_thread(device)  # the one to which vLLM has moved this thread
                self._memory = EngineMemory(
                    self._llm,
                    can_sleep=can_sleep,
                    constants=self._writer.weights.constants,
                    keeps_weights=not self._writer.writes_all,
                )
                self._memory.sleep(TAGS)
        except BaseException:
            release_groups(with_all=self._owns_group)
            raise
        log_derived(self._writer.weights, at="every handoff" if self._writer.writes_all else "the first handoff")
        # There a request without a seed has NumPy draw one; to bring its own costs nothing.
        self._draws_seeds = device.type == "cuda" and self._llm.vllm_config.use_v2_model_runner
        cache = self._llm.vllm_config.cache_config
        self.kv_cache_tokens = (cache.num_gpu_blocks - 1) * cache.block_size  # one block is vLLM's own
        self._waiting: deque[Generation] = deque()
        self._running: dict[int, Generation] = {}
        self._restarts_noise = True
        self._failure: BaseException | None = None
        self._is_closed = False
        LIVE.add(self)
        try:
            if adopts:
                self._writer.adopt(module)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------ requests

    def require_ready(self, version: int) -> None:
        """Raise EngineStateError unless the engine works and holds this version."""
        self._require_working()
        super().require_ready(version)

    def _require_working(self) -> None:
        if self._is_closed:
            raise EngineStateError("the engine is closed; make a new one")
        if self._failure is not None:
            cause = f"{type(self._failure).__name__}: {self._failure}"
            raise EngineStateError(f"the engine failed ({cause}); {NEW_ENGINE}") from self._failure

    def check(self, requests: Sequence[RolloutRequest], version: int) -> None:
        """Raise what every engine raises, and DataError for what vLLM would sample otherwise."""
        super().check(requests, version)
        for request in requests:
            check_sampling(request)

    def _begin_rollout(self) -> None:
        """Forget prefixes, and let the noise start again from the first request's seed: a resumed run repeats its
        rollout, whatever was evaluated in between."""
        self._forget_prefixes()
        self._restarts_noise = True

    def _queue(self, requests: Sequence[RolloutRequest]) -> None:
        if requests and self._restarts_noise:
            self._guest.random.restart(requests[0].params.seed)
            self._restarts_noise = False
        join_line(self._waiting, map(Generation, requests))

    @property
    def num_running(self) -> int:
        """Requests that vLLM has."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that vLLM has not been given yet."""
        return len(self._waiting)

    def _forget_prefixes(self) -> None:
        """Drop the cache."""
        if not self._llm.reset_prefix_cache():
            raise HandoffError(
                "vLLM did not drop its prefix cache, so cached keys of old weights would be used with the new ones"
            )

    # ---------------------------------------------------------------------------------------------------- step

    def step(self) -> list[FinishedSample]:
        """Run one step of vLLM; returns what finished. After an error of vLLM the engine cannot be used any more."""
        self.require_ready(self.policy_version)
        try:
            finished = self._take_aborted()
            self._admit()
            if not self._running:
                return finished
            with self._guest.stepping():
                outputs = self._llm.step()
                if self._record is not None:
                    self._record.end_step(outputs)
            finished += self._postprocess(outputs)
        except BaseException as error:
            self._failure = error
            explain_step(error, is_first=self.counters.num_steps == 0)
            error.add_note(f"the engine failed; {NEW_ENGINE}")
            raise
        self.counters.num_steps += 1
        return finished

    def _take_aborted(self) -> list[FinishedSample]:
        if not self._aborted:
            return []
        aborted, self._aborted = self._aborted, set()
        running = [self._running.pop(identity) for identity in [*self._running] if identity in aborted]
        waiting = [generation for generation in self._waiting if generation.request.id in aborted]
        self._waiting = deque(generation for generation in self._waiting if generation.request.id not in aborted)
        finished = [self._finish(generation, "abort") for generation in [*running, *waiting]]
        self._llm.abort_request([str(generation.request.id) for generation in running])
        return finished

    def _finish(self, generation: Generation, reason: FinishReason) -> FinishedSample:
        sample = super()._finish(generation, reason)
        if self._record is None:
            return sample
        return replace(sample, routed_experts=self._record.take(generation, is_whole=reason != "abort"))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            generation = self._waiting.popleft()
            request = generation.request
            has_own_seed = self._config.engine_args.per_request_seeds or self._draws_seeds
            params = vllm_params(request.params, has_own_seed=has_own_seed, num_begun=len(generation.tokens))
            self._running[request.id] = generation
            prompt = tokens_input([*request.prompt_ids, *generation.tokens])
            name = self._llm.add_request(str(request.id), prompt, params, lora_request=self._writer.lora_request)
            if self._record is not None:
                self._record.admit(request.id, name)

    def _postprocess(self, outputs: Sequence[Any]) -> list[FinishedSample]:
        finished, stopped = [], []
        for output in outputs:
            generation, made = self._running[int(output.request_id)], output.outputs[0]
            request = generation.request
            if len(generation.tokens) == len(request.begun.token_ids) and made.token_ids:
                cached = output.num_cached_tokens or 0
                self.counters.num_prompt_tokens += len(request.prompt_ids) + len(generation.tokens) - cached
                self.counters.num_prefix_tokens += cached
            logprobs = sampled_logprobs(made)
            check_finite(logprobs)
            reason = self._extend_all(generation, made.token_ids, logprobs)
            if reason is not None:
                del self._running[generation.request.id]
                finished.append(self._finish(generation, reason))
                if not output.finished:
                    stopped.append(output.request_id)
            elif output.finished:
                raise EngineStateError(
                    f"vLLM ended request {generation.request.id} after {len(generation.tokens)} of "
                    f"{generation.request.params.max_tokens} tokens, by {made.finish_reason!r}"
                )
        self._llm.abort_request(stopped)
        return finished

    def _extend_all(
        self, generation: Generation, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> FinishReason | None:
        """Append tokens up to the one that ends the completion; why it ends, if it does."""
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self.fingerprint = zlib.crc32(token.to_bytes(4, "little"), self.fingerprint)
            if reason := self._extend(generation, token, logprob):
                return reason
        return None

    # --------------------------------------------------------------------------------------- weights and memory

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Write the weights of a policy version. Collective over all ranks."""
        start = time.perf_counter()
        self._require_working()
        self.require_update(version)
        # Dtypes may differ: a handoff casts.
        theirs = {sharded.spec.name: sharded.spec.shape for sharded in source.layout().tensors}
        if theirs != self._shapes:
            other = sorted(theirs.items() ^ self._shapes.items())
            raise HandoffError(
                f"the trainer's weights are not those that the engine was built for, e.g. {other[0][0]} "
                f"{list(other[0][1])}; make a new Trainer"
            )
        held, self.policy_version = self.policy_version, -1
        with self._guest.active():
            if held < 0:
                self._writer.forget()
            delivered = self._writer.write(source, version, self._llm.vllm_config.model_config)
            self._forget_prefixes()
        self.policy_version = version
        seconds = time.perf_counter() - start
        return HandoffReport(**vars(delivered), version=version, num_tensors=len(self._shapes), seconds=seconds)

    def sleep(self, tags: Iterable[str]) -> None:
        """Release memory. Without weights nothing can be cached: the cache goes to sleep with them. Weights that sleep
        are lost: there is no version until they are updated again. An engine that failed drops its requests."""
        if self._failure is not None:
            self._llm.abort_request([*map(str, self._running)])
            self._running, self._waiting = {}, deque()
            self._ids.clear()
        tags = self.require_sleep(tags)
        with self._guest.active():
            if KV_CACHE not in self._memory.asleep and self._failure is None:
                self._forget_prefixes()
            if self._memory.sleep(tags):
                self.policy_version = -1
        self._settle()

    def require_room(self, tags: frozenset[str]) -> None:
        """Raise MemoryStateError if the device has too little memory for these tags to wake."""
        self._memory.require_room(tags, self._device)

    def wake(self, tags: Iterable[str]) -> None:
        """Get memory back."""
        tags = self.require_wake(tags)
        with self._guest.active():
            self._memory.wake(tags)
        self._settle()

    def _settle(self) -> None:
        if WEIGHTS in self._memory.asleep:
            self.state = EngineState.ASLEEP
        else:
            self.state = EngineState.WEIGHTS if KV_CACHE in self._memory.asleep else EngineState.READY

    @property
    def weights(self) -> LoadedWeights:
        """vLLM's own tensors, and where each of their elements comes from."""
        return self._writer.weights

    def check_adapters(self, source: Source) -> None:
        """Read the adapters back that vLLM adds to its weights itself, and compare them with a source's."""
        with self._guest.active():
            self._writer.check_adapters(source)

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights while they are awake, with the slot of an adapter."""
        return super().weight_bytes + self._writer.slot_bytes

    def _cache_usage(self) -> tuple[int, float]:
        """Return the cache's bytes and the share of it in use. What vLLM does not report stays 0: tokens shared within
        a group (they count as found in the cache) and preemptions."""
        num_bytes = 0 if KV_CACHE in self._memory.asleep else self.kv_cache_bytes
        return num_bytes, self._llm.engine_core.engine_core.scheduler.kv_cache_manager.usage

    def close(self) -> None:
        """End vLLM. The trainer's process groups stay; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        # vLLM gives its pools of memory back, in which no tensor of ours may be any more.
        self._writer.close()
        del self._writer, self._memory
        gc.collect()
        with process_kept(), on_stream(self._guest.stream), freed_asleep() if self.can_sleep else nullcontext():
            tear_down(self._llm, with_all_groups=self._owns_group)
            del self._llm
        LIVE.discard(self)
        gc.collect()


def make_engine(setup: EngineSetup) -> VLLMEngine:
    """Make the engine of rollout.engine=vllm. Collective over the ranks of a replica."""
    assert isinstance(setup.config, VLLMRolloutConfig)
    return VLLMEngine(
        setup.model.module,
        setup.config,
        dtype=setup.model.dtype,
        device=setup.device,
        max_length=setup.max_length,
        seed=setup.seed,
        trust_remote_code=setup.trust_remote_code,
        decode=setup.decode,
        memory_share=setup.memory_share,
        adopts=setup.config.handoff.adopt_weights,
        adapter_ranks=setup.adapter_ranks,
        records_experts=setup.records_experts,
    )
