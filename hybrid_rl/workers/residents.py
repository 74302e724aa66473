"""Residents of the workers: the contents of their memory, for leases."""

from __future__ import annotations

from torch import Tensor, nn

from hybrid_rl.engines.base import WEIGHTS
from hybrid_rl.engines.client import EngineClient
from hybrid_rl.memory.cycle import ENGINE_WEIGHTS, KV_CACHE, OPTIMIZER
from hybrid_rl.memory.leases import Resident
from hybrid_rl.models import CausalLM
from hybrid_rl.sharding.build import gathered_bytes
from hybrid_rl.sharding.fsdp import ShardedCausalLM
from hybrid_rl.tensors.boxes import local_tensor
from hybrid_rl.training.optimizer import Optimizer


def module_resident(tag: str, module: nn.Module) -> Resident:
    """Make the resident of weights that stay on their device."""
    return Resident(tag, lambda: sum(_local_bytes(p) for p in module.parameters()))


def optimizer_resident(optimizer: Optimizer, tag: str = OPTIMIZER) -> Resident:
    """Make the resident of masters and Adam moments, which stay on the device (fsdp.cpu_offload: on the host)."""
    return Resident(tag, lambda: optimizer.num_bytes)


def engine_weights_resident(model: CausalLM, client: EngineClient) -> Resident:
    """Make the resident of the weights that an embedded engine decodes from, in addition to the actor: if the actor is
    sharded, the full weights, gathered while they are published and generated with; otherwise nothing."""
    if not isinstance(model, ShardedCausalLM):
        client.at_rest().wake({WEIGHTS})  # they are the actor's, which stay
        return Resident(ENGINE_WEIGHTS, lambda: 0)
    twin = model.twin

    def sleep(tags: frozenset[str]) -> None:
        client.at_rest().sleep({WEIGHTS})
        twin.release()

    def wake() -> None:
        twin.bind()
        client.at_rest().wake({WEIGHTS})

    return Resident(ENGINE_WEIGHTS, lambda: gathered_bytes(model), sleep=sleep, wake=wake)


def _local_bytes(parameter: Tensor) -> int:
    local = local_tensor(parameter)
    return local.numel() * local.element_size()


def kv_cache_resident(client: EngineClient) -> Resident:
    """Make the resident of an embedded engine's cache: released while the actor trains, when its content is lost."""
    return Resident(
        KV_CACHE,
        lambda: client.engine.kv_cache_bytes,
        sleep=lambda tags: client.at_rest().sleep({KV_CACHE}),
        wake=lambda: client.at_rest().wake({KV_CACHE}),
        after=(ENGINE_WEIGHTS,),
    )
