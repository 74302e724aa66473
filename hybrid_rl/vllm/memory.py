"""vLLM's memory, by tag."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from vllm.device_allocator import cumem, get_mem_allocator_instance

from hybrid_rl.compat.vllm import clear_allocator_error
from hybrid_rl.engines.base import KV_CACHE, WEIGHTS
from hybrid_rl.memory.probe import free_device_bytes, require_room
from hybrid_rl.vllm.versions import has

logger = logging.getLogger(__name__)


def can_sleep_on(device: torch.device) -> bool:
    """Return whether vLLM can give memory of this device back."""
    return device.type == "cuda"


def bytes_to_map(tags: frozenset[str]) -> int:
    """Return the bytes of this process's vLLM that sleep and that a wake of these tags maps: whole pages, with what
    vLLM derives from the weights and what it wakes with any tag."""
    allocator = get_mem_allocator_instance()
    staying = {WEIGHTS, KV_CACHE} - tags
    return sum(
        data.handle[1] for data in allocator.pointer_to_data.values() if data.is_asleep and data.tag not in staying
    )


def clean_allocator() -> None:
    """Make vLLM's allocator fit for a new engine, whatever became of the last one: it keeps the error of an allocation
    or a free that failed, by which every later allocation fails too, and for each allocation that failed an entry that
    the next sleep would try to unmap."""
    clear_allocator_error()
    known = get_mem_allocator_instance().pointer_to_data
    for address in known.keys() - {segment["address"] for segment in torch.cuda.memory_snapshot()}:
        del known[address]


@contextmanager
def freed_asleep() -> Iterator[None]:
    """Let what sleeps be freed inside the block, in which an engine is dropped. vLLM would unmap what is not mapped,
    an error for CUDA (vllm-project/vllm#36651). So each allocation is mapped again as it is freed, one at a time; if
    there is no memory even for that, the error is cleared afterwards."""
    allocator: Any = get_mem_allocator_instance()

    def free(address: int) -> Any:
        data = allocator.pointer_to_data[address]
        if data.is_asleep:
            with suppress(RuntimeError):
                cumem.create_and_map(data.handle)
        return allocator.python_free_callback(address)

    cumem.init_module(allocator.python_malloc_callback, free)
    try:
        yield
        gc.collect()
        torch.cuda.empty_cache()  # which frees the segments that the engine's tensors were in
    finally:
        cumem.init_module(allocator.python_malloc_callback, allocator.python_free_callback)
        clean_allocator()


@contextmanager
def rest_shown(llm: Any) -> Iterator[None]:
    """Show vLLM only what is awake, inside the block: a version that puts everything to sleep or nothing does so with
    the rest. To wake what sleeps first would take memory in the very moment when there is none."""
    known = get_mem_allocator_instance().pointer_to_data
    asleep = {address: data for address, data in known.items() if data.is_asleep}
    for address in asleep:
        del known[address]
    llm.engine_core.engine_core.model_executor.is_sleeping = False
    try:
        yield
    finally:
        known.update(asleep)


class EngineMemory:
    """Puts an LLMEngine's weights and cache to sleep, and wakes them.

    Sleeping weights are lost, and nothing of them is copied, unless they are kept; vLLM keeps the model's buffers in
    host memory meanwhile. constants: tensors among the weights that are neither parameters nor buffers, and that a
    handoff does not write; they are kept here. can_sleep: whether its platform can give memory back; if it cannot,
    nothing is moved and the log says so once. keeps_weights: have vLLM copy the weights to host memory when they sleep,
    and back, because handoffs do not write all of them.
    """

    def __init__(
        self, llm: Any, *, can_sleep: bool, constants: Sequence[Tensor] = (), keeps_weights: bool = False
    ) -> None:
        self._llm, self._can_sleep, self._keeps_weights = llm, can_sleep, keeps_weights
        is_lost = can_sleep and not keeps_weights
        self._constants = [(tensor, tensor.cpu().clone()) for tensor in constants] if is_lost else []
        self.asleep: set[str] = set()
        self._has_told = False

    def sleep(self, tags: frozenset[str]) -> bool:
        """Give the memory of these tags back; whether weights were lost. The cache sleeps whenever the weights do:
        nothing can be cached then."""
        wanted = (tags | {KV_CACHE}) - self.asleep
        if not wanted:
            return False
        if self._can_sleep:
            self._sleep(wanted)
        elif not self._has_told:
            logger.warning(
                "vLLM cannot sleep on CPUs: its weights and its KV cache stay in memory while the trainer works"
            )
            self._has_told = True
        self.asleep |= wanted
        return self._can_sleep and WEIGHTS in wanted and not self._keeps_weights

    def _sleep(self, wanted: frozenset[str]) -> None:
        if WEIGHTS in wanted:
            is_rest = KV_CACHE in self.asleep and not has("weights_sleep_after_cache", self._llm)
            with rest_shown(self._llm) if is_rest else nullcontext():
                self._llm.sleep(level=1 if self._keeps_weights else 2, mode="keep")
        else:
            # The weights stay what they are, which takes a copy to the host and back. No phase of a training step asks
            # for it: there the cache sleeps with the weights, or is not awake yet.
            self._llm.sleep(level=1, mode="keep")
            self._llm.wake_up([WEIGHTS])

    def require_room(self, tags: frozenset[str], device: torch.device) -> None:
        """Raise MemoryStateError if the device has too little memory for these tags to wake. vLLM maps one allocation
        after the other: if there is no memory for one, it is left half awake."""
        free = free_device_bytes(device)
        if self._can_sleep and free is not None:
            require_room(bytes_to_map(tags & self.asleep), free)

    @torch.no_grad()
    def wake(self, tags: frozenset[str]) -> None:
        """Get the memory of these tags back; what the weights are then, is undefined if they were lost."""
        wanted = tags & self.asleep
        if self._can_sleep and wanted:
            self._llm.wake_up([tag for tag in (WEIGHTS, KV_CACHE) if tag in wanted])
            if WEIGHTS in wanted:
                for tensor, value in self._constants:
                    tensor.copy_(value)
        self.asleep -= wanted
