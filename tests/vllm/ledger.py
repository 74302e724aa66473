"""An LLMEngine without vLLM behind it: it generates with a model of transformers, one step late like a scheduler that
works ahead, and keeps a ledger of the device's memory in place of a device."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from vllm.device_allocator import AllocationData, cumem
from vllm.logprobs import FlatLogprobs

from hybrid_rl.engines.base import KV_CACHE, WEIGHTS
from hybrid_rl.vllm import memory
from hybrid_rl.vllm.loader import LOADING, Derived, LoadedWeights, _constants, trace_model
from hybrid_rl.weights.views import checkpoint_views

KV_BYTES = 1 << 20
BLOCK_SIZE, NUM_BLOCKS = 16, 257


class Ledger:
    """Bytes on the device by what they are, the most that there were at a time, bytes copied, and what happened."""

    def __init__(self) -> None:
        self.device = {WEIGHTS: 0, KV_CACHE: 0, "free blocks": 0, "staging": 0}
        self.host_bytes = self.peak_bytes = 0
        self.copied = {"to host": 0, "to device": 0}
        self.log: list[Any] = []

    def hold(self, what: str, num_bytes: int) -> None:
        """From now on there are so many bytes of this on the device."""
        self.device[what] = num_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self.device.values()))

    def empty_cache(self) -> None:
        """In the place of torch.cuda.empty_cache."""
        self.log.append("empty_cache")
        self.hold("free blocks", 0)

    @contextmanager
    def handoff(self, staging_bytes: int) -> Iterator[None]:
        """A handoff inside, which stages so much; the allocator keeps that afterwards."""
        self.log.append("handoff")
        self.hold("staging", staging_bytes)
        yield
        self.device["staging"] = 0
        self.hold("free blocks", self.device["free blocks"] + staging_bytes)


class Extension:
    """vLLM's compiled allocator over a driver that has no map to undo for what sleeps: the error of a free, or of an
    allocation for which there is no memory, stays, and fails every allocation from then on.

    mapped: addresses with memory behind them. has_room: whether the driver has memory to map. num_refused: frees of
    what is not mapped.
    """

    def __init__(self, mapped: Iterable[int] = ()) -> None:
        self.mapped, self.has_room, self.has_error = set(mapped), True, False
        self.num_refused = 0

    def init_module(self, malloc: Callable[..., None], free: Callable[[int], tuple[int, ...]]) -> None:
        self.callbacks = malloc, free

    def create_and_map(self, handle: tuple[int, ...]) -> None:
        assert handle[2] not in self.mapped, "mapped twice"
        if not self.has_room:
            raise RuntimeError("CUDA Error: out of memory")
        self.mapped.add(handle[2])

    def unmap_and_release(self, handle: tuple[int, ...]) -> None:
        if handle[2] not in self.mapped:
            raise RuntimeError("CUDA Error: invalid argument")
        self.mapped.remove(handle[2])

    def malloc(self, address: int) -> bool:
        """Whether PyTorch gets a segment there."""
        if self.has_error:
            return False
        self.callbacks[0]((0, 2 << 20, address, 0))
        self.has_error = not self.has_room
        self.mapped |= {address} if self.has_room else set()
        return self.has_room

    def free(self, address: int) -> None:
        """Free a segment of PyTorch's."""
        handle = self.callbacks[1](address)
        if handle[2] not in self.mapped:
            self.has_error = True
            self.num_refused += 1
        self.mapped.discard(handle[2])

    def patch_into(self, patch: Any, known: dict[int, Any]) -> None:
        """Have vLLM's allocator, which knows these allocations, use it; PyTorch has what is mapped and what sleeps."""
        for name in ("init_module", "create_and_map", "unmap_and_release"):
            patch.setattr(cumem, name, getattr(self, name))
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # an error where there is no device
        patch.setattr(memory, "clear_allocator_error", lambda: setattr(self, "has_error", False))
        patch.setattr(
            torch.cuda,
            "memory_snapshot",
            lambda: [{"address": place} for place, data in known.items() if data.is_asleep or place in self.mapped],
        )


class EngineModel(torch.nn.Module):
    """The engine's copy of a model, with a loader, and a tensor that no checkpoint has."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__()
        self.inner = copy.deepcopy(module).requires_grad_(False)
        self.slopes = torch.arange(1.0, 5.0)

    def load_weights(self, weights: Any) -> set[str]:
        own = {name.removeprefix("inner."): tensor for name, tensor in self.named_parameters(remove_duplicate=False)}
        loaded = set()
        for name, tensor in weights:
            own[name].data.copy_(tensor)
            loaded.add(f"inner.{name}")
        return loaded


class LedgerLLM:
    """What VLLMEngine touches of an LLMEngine.

    is_new: as 0.32 does it, where the weights may sleep after the cache; else as 0.25.1, where nothing sleeps while
    anything does. What vLLM would ignore with a warning is an error here.
    """

    def __init__(self, module: PreTrainedModel, arguments: dict[str, Any], ledger: Ledger, *, is_new: bool) -> None:
        self.model, self.ledger = EngineModel(module), ledger
        loading = arguments["model_loader_extra_config"][LOADING]
        live = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        trace = trace_model(self.model, checkpoint_views(module))
        destinations = [live[spec.name].detach() for spec in trace.destinations]
        loading.weights = LoadedWeights(trace, destinations, self.model, Derived({}), trace, _constants(self.model))
        self.arguments = arguments
        self.vllm_config = SimpleNamespace(
            model_config=None,
            cache_config=SimpleNamespace(num_gpu_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            use_v2_model_runner=False,
        )
        scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(usage=0.0))
        self.executor = SimpleNamespace(is_sleeping=False)
        self.engine_core = SimpleNamespace(
            engine_core=SimpleNamespace(scheduler=scheduler, model_executor=self.executor)
        )
        if is_new:
            self.release_kv_cache_memory = None  # by which the table of differences knows it
        self.is_new = is_new
        self.weight_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
        sizes = {WEIGHTS: self.weight_bytes, KV_CACHE: KV_BYTES}
        # As the allocator of vLLM knows them.
        self.pointer_to_data = {
            number: AllocationData((0, size, number, 0), tag) for number, (tag, size) in enumerate(sizes.items())
        }
        self.extension = Extension(self.pointer_to_data)
        self._saved: dict[str, list[torch.Tensor]] = {}
        self._requests: dict[str, Any] = {}
        self._ahead: deque[list[tuple[Any, int, float]]] = deque()
        ledger.hold(WEIGHTS, self.weight_bytes)
        ledger.hold(KV_CACHE, KV_BYTES)

    # ------------------------------------------------------------------------------------------------- memory

    def sleep(self, level: int, mode: str) -> None:
        is_ignored = WEIGHTS in self.asleep if self.is_new else self.executor.is_sleeping
        assert mode == "keep" and not is_ignored, "vLLM would ignore this"
        self.ledger.log.append(("sleep", level))
        for data in self.pointer_to_data.values():
            assert self.is_new or not data.is_asleep, "vLLM would give it back twice"
            if not data.is_asleep:
                self.extension.unmap_and_release(data.handle)
            data.is_asleep = True
        self.executor.is_sleeping = True
        parameters = list(self.model.parameters())
        if level == 1:
            self._saved[WEIGHTS] = [parameter.clone() for parameter in parameters]
            self.ledger.copied["to host"] += self.weight_bytes
            self.ledger.host_bytes += self.weight_bytes
        self._saved["buffers"] = [buffer.clone() for buffer in self.model.buffers()]
        for tensor in (*parameters, *self.model.buffers(), self.model.slopes):
            tensor.data.fill_(float("nan"))
        self.ledger.hold(WEIGHTS, 0)
        self.ledger.hold(KV_CACHE, 0)

    def python_malloc_callback(self, handle: tuple[int, ...]) -> None:
        self.pointer_to_data[handle[2]] = AllocationData(handle, WEIGHTS)  # type: ignore[arg-type]

    def python_free_callback(self, address: int) -> tuple[int, ...]:
        return self.pointer_to_data.pop(address).handle  # type: ignore[return-value]

    def drop(self) -> None:
        """Free everything, as PyTorch does once the engine's tensors are gone."""
        for address in [*self.pointer_to_data]:
            self.extension.free(address)

    @property
    def asleep(self) -> set[str]:
        return {data.tag for data in self.pointer_to_data.values() if data.is_asleep}

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep, "vLLM would ignore this"
        self.ledger.log.append(("wake", *tags))
        for data in self.pointer_to_data.values():
            if data.is_asleep and data.tag in tags:
                self.extension.create_and_map(data.handle)
                data.is_asleep = False
        self.executor.is_sleeping = bool(self.asleep)
        for tag in tags:
            self.ledger.hold(tag, KV_BYTES if tag == KV_CACHE else self.weight_bytes)
        if WEIGHTS in tags:
            for buffer, value in zip(self.model.buffers(), self._saved.pop("buffers"), strict=True):
                buffer.copy_(value)
            if WEIGHTS in self._saved:
                for parameter, value in zip(self.model.parameters(), self._saved.pop(WEIGHTS), strict=True):
                    parameter.data.copy_(value)
                self.ledger.copied["to device"] += self.weight_bytes
                self.ledger.host_bytes -= self.weight_bytes

    def reset_prefix_cache(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------- requests

    def add_request(self, identity: str, prompt: Any, params: Any, *, lora_request: Any = None) -> None:
        assert identity not in self._requests and params.flat_logprobs and params.logprobs == 0
        self._requests[identity] = SimpleNamespace(
            identity=identity, prompt=list(prompt["prompt_token_ids"]), tokens=[], params=params, num_finished=0
        )

    def abort_request(self, identities: list[str]) -> None:
        for identity in identities:
            self._requests.pop(identity, None)

    @torch.no_grad()
    def step(self) -> list[Any]:
        """Start a pass for all requests; give out the tokens of the pass before."""
        assert not self.asleep, "a pass over memory that sleeps"
        self._ahead.append([self._sampled(request) for request in self._requests.values() if self._wants_more(request)])
        if len(self._ahead) < 2:
            return []
        frames = [frame for frame in self._ahead.popleft() if self._requests.get(frame[0].identity) is frame[0]]
        return [self._output(*frame) for frame in frames]

    def _wants_more(self, request: Any) -> bool:
        return self._num_sampled(request) < request.params.max_tokens

    def _num_sampled(self, request: Any) -> int:
        return len(request.tokens) + sum(frame[0] is request for frames in self._ahead for frame in frames)

    def _sampled(self, request: Any) -> tuple[Any, int, float]:
        ahead = [frame[1] for frames in self._ahead for frame in frames if frame[0] is request]
        token_ids = torch.tensor([[*request.prompt, *request.tokens, *ahead]])
        logits = self.model.inner(input_ids=token_ids, use_cache=False).logits[0, -1]
        log_p = (logits / (request.params.temperature or 1.0)).log_softmax(0)
        return request, int(log_p.argmax()), float(log_p.max())

    def _output(self, request: Any, token: int, logprob: float) -> Any:
        request.tokens.append(token)
        is_finished = len(request.tokens) >= request.params.max_tokens
        if is_finished:
            del self._requests[request.identity]
        flat = FlatLogprobs()
        flat.append_fast([token], [logprob], iter([1]), [None])  # type: ignore[arg-type]
        made = SimpleNamespace(token_ids=[token], logprobs=flat, finish_reason="length" if is_finished else None)
        return SimpleNamespace(request_id=request.identity, outputs=[made], finished=is_finished, num_cached_tokens=0)
