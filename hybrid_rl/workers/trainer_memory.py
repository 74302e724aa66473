"""Residents of the workers: the contents of their memory, for leases."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from hybrid_rl.compat.torch import storage_id
from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.sizes import memory_bytes
from hybrid_rl.controller import RankContext
from hybrid_rl.engines.base import WEIGHTS
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import ConfigError, MemoryStateError
from hybrid_rl.memory.arena import HostArena
from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS, KV_CACHE, OPTIMIZER
from hybrid_rl.memory.offload import OffloadedTensors, own_memory
from hybrid_rl.memory.probe import free_device_bytes, require_room, unused_bytes
from hybrid_rl.memory.region import Region
from hybrid_rl.memory.residents import Resident
from hybrid_rl.models import CausalLM
from hybrid_rl.training.optimizer import Optimizer
from hybrid_rl.training.sharding.build import gathered_bytes
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM


class TrainerMemory:
    """Makes the residents of what a rank trains with and scores with. Those that memory.offload names wait in host
    memory, and are there when they are returned, so that only what is being built is in memory.

    Collective if anything moves.
    """

    def __init__(self, config: TrainerConfig, context: RankContext) -> None:
        self._offload = frozenset(config.memory.offload or ())
        self._arena: HostArena | None = None
        self._owners: dict[int, str] = {}  # tag by storage
        if not self._offload:
            return
        limit = None
        if config.memory.host_memory is not None:
            hosts = context.gather(socket.gethostname())
            own = hosts.count(socket.gethostname())
            limit = memory_bytes(config.memory.host_memory, "memory.host_memory") // own
        self._arena = HostArena(context.device, limit)

    @property
    def arena_bytes(self) -> int | None:
        """Bytes of host memory in which residents wait, all slots together; None if nothing moves."""
        return None if self._arena is None else self._arena.num_bytes

    def models(self, tag: str, models: Sequence[CausalLM]) -> Resident:
        """Make the resident of the weights of models. Buffers stay: they are small, and shared with engines."""
        modules = [model.module for model in models]
        regions = [model.region for model in models if isinstance(model, ShardedCausalLM) and model.region is not None]
        if tag in self._offload:
            for module in modules:
                own_memory(module)

        def weights() -> list[Tensor]:
            return [tensor for model in models for tensor in _weights(model)]

        return self._resident(tag, weights, modules, regions)

    def optimizer(self, optimizer: Optimizer, tag: str = OPTIMIZER) -> Resident:
        """Make the resident of masters and Adam moments."""
        return self._resident(tag, optimizer.tensors)

    def close(self) -> None:
        """Release the host memory. What sleeps in it is lost; idempotent."""
        if self._arena is not None:
            self._arena.close()

    def _resident(
        self,
        tag: str,
        tensors: Callable[[], Sequence[Tensor]],
        modules: Sequence[nn.Module] = (),
        regions: Sequence[Region] = (),
    ) -> Resident:
        self._check_apart(tag, tensors())
        if tag not in self._offload:
            return Resident(tag, lambda: sum(tensor.nbytes for tensor in tensors()))
        assert self._arena is not None
        memory = OffloadedTensors(tag, tensors, self._arena, regions)
        guard = _Guard(tag, modules, tensors)

        def sleep(tags: frozenset[str]) -> None:
            memory.sleep()
            guard.close()

        def wake() -> None:
            memory.wake()
            guard.open()

        sleep(frozenset({tag}))
        return Resident(tag, lambda: memory.num_bytes, sleep=sleep, wake=wake, atomic=True)

    def _check_apart(self, tag: str, tensors: Sequence[Tensor]) -> None:
        """Raise ConfigError if what is to move is also another resident's memory, which would leave with it."""
        if not self._offload:
            return
        for tensor in tensors:
            other = self._owners.setdefault(storage_id(tensor), tag)
            if other != tag and {tag, other} & self._offload:
                raise ConfigError(
                    f"{tag} and {other} have weights in common (one module was made from the other?), so neither can "
                    f"move by itself; take both out of memory.offload, or pass a copy.deepcopy of one of them"
                )


# What may be asked of a parameter without memory; all else reads it, or makes a view that would.
HARMLESS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf")
    + ("grad", "grad_fn", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_nested", "is_quantized", "_base")
) | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size),
    *(Tensor.storage_offset, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
    *(Tensor.get_device, Tensor.untyped_storage, Tensor.is_inference),
}


class _Guard:
    """Refuses what would read modules without weights, and crash: a module may be the user's own."""

    def __init__(self, tag: str, modules: Sequence[nn.Module], tensors: Callable[[], Sequence[Tensor]]) -> None:
        """tensors: those of the modules that go away."""
        self._tag, self._modules, self._tensors, self._hooks = tag, modules, tensors, ExitStack()
        refuse = self._refuse

        class Sleeping(nn.Parameter):
            """A parameter while its memory is away: its objects are of this class then."""

            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
            ) -> Any:
                if func not in HARMLESS:
                    refuse()
                return super().__torch_function__(func, types, args, kwargs or {})

        self._class = Sleeping

    def close(self) -> None:
        """Refuse from now on."""
        for module in self._modules:
            self._hooks.callback(module.register_state_dict_pre_hook(self._refuse).remove)
            for child in module.modules():
                self._hooks.callback(child.register_forward_pre_hook(self._refuse).remove)
        # Who holds one of them may know nothing of the module. Shards, which are DTensors, are nobody's but ours; and
        # what was gathered from them does not go, although it may stand in their place in the module.
        for parameter in self._tensors():
            if type(parameter) is nn.Parameter:
                parameter.__class__ = self._class
                self._hooks.callback(setattr, parameter, "__class__", nn.Parameter)

    def open(self) -> None:
        """Refuse no more."""
        self._hooks.close()

    def _refuse(self, *_: Any) -> None:
        raise MemoryStateError(
            f"the weights of this module wait in host memory (memory.offload names {self._tag}); use it after "
            f"trainer.close(), save it with trainer.save(), or take {self._tag} out of memory.offload"
        )


def _weights(model: CausalLM) -> list[Tensor]:
    return model.shards() if isinstance(model, ShardedCausalLM) else list(model.module.parameters())


def engine_weights_resident(model: ShardedCausalLM, client: EngineClient) -> Resident:
    """Make the resident of the weights that an embedded engine decodes from beside a sharded actor: the full weights,
    gathered while they are published and generated with."""
    twin = model.twin

    def sleep(tags: frozenset[str]) -> None:
        client.at_rest().sleep({WEIGHTS})
        twin.release()

    def wake() -> None:
        twin.bind()
        client.at_rest().wake({WEIGHTS})

    def room() -> None:
        if (free := free_device_bytes(model.device)) is not None:
            require_room(gathered_bytes(model), free + unused_bytes(model.device))

    # They are gathered from the actor's shards, by all ranks together.
    return Resident(
        ENGINE_WEIGHTS,
        lambda: gathered_bytes(model),
        sleep=sleep,
        wake=wake,
        after=(ACTOR,),
        require_room=room,
        collective=True,
    )


def kv_cache_resident(client: EngineClient) -> Resident:
    """Make the resident of an embedded engine's cache: released while the actor trains, when its content is lost."""
    return Resident(
        KV_CACHE,
        lambda: client.engine.kv_cache_bytes,
        sleep=lambda tags: client.at_rest().sleep({KV_CACHE}),
        wake=lambda: client.at_rest().wake({KV_CACHE}),
        after=(ENGINE_WEIGHTS,),
        atomic=True,  # the cache of all layers is taken at once
    )
