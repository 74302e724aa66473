"""FSDP2: parameters sharded over ranks in fp32, gathered in the compute dtype for the forward and backward pass. The
frozen weights below adapters are sharded in the compute dtype.

Gradients are sums over ranks, not means: a loss is a sum over samples divided by counts of the whole mini-batch, so the
ranks' parts add up to it. With hybrid sharding (dp_replicate > 1) shards are summed over the replicas as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from hybrid_rl.compat import torch_fsdp as fsdp2
from hybrid_rl.errors import ConfigError, MemoryStateError, ModelError
from hybrid_rl.memory.region import Region, capacity_for
from hybrid_rl.memory.transfer import move_buffers
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.attention.attention_function import AttentionContext
from hybrid_rl.models.attention.unpacked import UnpackedRow
from hybrid_rl.models.lora.model_weights import weights_of
from hybrid_rl.models.packed.repeated_layers import transformer_blocks
from hybrid_rl.models.packed.startup_check import VERIFY_TOLERANCE, relative_gap, verify_row
from hybrid_rl.training.sharding.twin import Twin

DP_REPLICATE, DP_SHARD = "dp_replicate", "dp_shard"
CALL = "_hybrid_rl_call"  # the method of a sharded module that everything runs in
Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardOptions:
    """The way a model is sharded over dp_replicate x dp_shard ranks.

    param_dtype: what it computes in; the shards are the masters and at least float32, but for the frozen weights below
    adapters, which need none. reduce_dtype: in which gradients are summed over ranks. reshard_after_forward: free a
    block's gathered parameters between its forward and backward pass; without it they are gathered once per mini-batch
    and stay. cpu_offload: shards, gradients and optimizer live in host memory. sync_every_micro_batch: reduce gradients
    after every micro-batch instead of after the last one of a mini-batch; more communication, but a rank holds full
    gradients of one block at a time only.
    """

    dp_replicate: int
    dp_shard: int
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    sync_every_micro_batch: bool = False

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the shards of what is trained."""
        return torch.promote_types(self.param_dtype, torch.float32)

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """The dtypes as FSDP takes them. Inputs of a block stay what the model makes them, as with one rank: FSDP would
        cast them to param_dtype, but torch 2.11 not again when a block is recomputed in the backward pass."""
        return MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, cast_forward_inputs=False)


def device_mesh(options: ShardOptions, device_type: str) -> DeviceMesh:
    """Make the mesh of all ranks of the process group: [dp_shard], or [dp_replicate, dp_shard] with replicas.

    Collective. Raises ConfigError if the product of the axes is not the number of ranks.
    """
    num_ranks = dist.get_world_size()
    if options.dp_replicate * options.dp_shard != num_ranks:
        raise ConfigError(
            f"dp_replicate={options.dp_replicate} times dp_shard={options.dp_shard} are not the {num_ranks} ranks of "
            f"this run; choose axes whose product is {num_ranks}"
        )
    if options.dp_replicate == 1:
        return init_device_mesh(device_type, (options.dp_shard,), mesh_dim_names=(DP_SHARD,))
    return init_device_mesh(
        device_type, (options.dp_replicate, options.dp_shard), mesh_dim_names=(DP_REPLICATE, DP_SHARD)
    )


@dataclass(frozen=True)
class Shards:
    """A module whose parameters are shards, and its plain twin. region: their memory, if they were moved to one."""

    module: PreTrainedModel
    twin: Twin
    mesh: DeviceMesh
    options: ShardOptions
    region: Region | None = None

    @property
    def device(self) -> torch.device:
        """The device of the shards: load weights to it."""
        return torch.device("cpu") if self.options.cpu_offload else _local_device(self.mesh)


def shard(module: PreTrainedModel, mesh: DeviceMesh, options: ShardOptions) -> Shards:
    """Shard a model in place: one unit per transformer block, one for the rest.

    A module on the meta device stays there: fill its shards before it is used. Frozen weights below adapters keep their
    dtype. Raises ConfigError for an option that this device cannot do, ModelError for an architecture without blocks.
    """
    if options.cpu_offload and mesh.device_type == "cpu":
        raise ConfigError(
            "memory.on_host=[shards] does nothing on CPU ranks: all is in host memory anyway; leave it out"
        )
    twin = Twin(module, reshard_after_forward=options.reshard_after_forward)
    with torch.no_grad():
        for parameter in weights_of(module).masters():
            parameter.data = parameter.data.to(options.master_dtype)
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": options.precision, "offload_policy": offload}
    for block in transformer_blocks(module):
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **settings)
    # The root holds embedding and head. Its backward pass begins where its forward pass ends: None keeps it gathered.
    fully_shard(module, reshard_after_forward=None if options.reshard_after_forward else False, **settings)
    for unit in fsdp2.units(module):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # other factors need a premultiplied sum, which gloo lacks
        fsdp2.reduce_unused(unit)
    return Shards(module, twin, mesh, options)


@torch.no_grad()
def move_to_region(shards: Shards, tag: str) -> Region:
    """Move the parameter shards of a sharded model into a region, which other processes of the node can map: an engine
    of any rank then reads them in place. Their values stay.

    To be called once they hold their values and before the first forward pass: FSDP gathers from the new memory, and
    the optimizer steps in it. Raises MemoryStateError if shards are still on meta or not in host memory.
    """
    params = fsdp2.parameters(shards.module)
    wrong = [p for p in params if fsdp2.padded_shard(p).device.type != "cpu"]
    if wrong:
        raise MemoryStateError(f"{len(wrong)} parameter shards have no host memory, e.g. {wrong[0]!r}; load them first")
    region = Region(tag, capacity_bytes=capacity_for(map(fsdp2.padded_shard, params)))
    for param in params:
        padded = fsdp2.padded_shard(param)
        fsdp2.move_shard(param, region.allocate(tuple(padded.shape), padded.dtype).copy_(padded))
    return region


class ShardedCausalLM(CausalLM):
    """A CausalLM over shards. Every call is collective: all ranks make the same calls in the same order, with rows of
    any size; only while the twin is bound may they differ.

    Same arguments as CausalLM. dtype is the compute dtype.
    """

    def __init__(self, shards: Shards, attention: str = "auto", **options: bool) -> None:
        self.twin = shards.twin
        self.region = shards.region
        self._sharding = shards.options
        self._device = _local_device(shards.mesh)
        self._root: Any = shards.module
        self._is_gathered = False
        for module in self._root.modules():  # cpu_offload leaves buffers next to the shards
            move_buffers(module, self._device)
        super().__init__(shards.module, attention, **options)
        # Embedding and head are gathered by the root's hooks, which run around its forward method and this one.
        vars(self._root)[CALL] = _call
        register_fsdp_forward_method(self._root, CALL)

    def plain_twin(self) -> CausalLM:
        """Make a model over the twin, with this one's attention and head. It has weights while the twin is bound."""
        name, head, exact = self.attention.name, self.has_float32_head, self.is_exact
        return CausalLM(self.twin.module, name, float32_head=head, exact=exact)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        return self._sharding.param_dtype

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self._device

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext | UnpackedRow) -> Tensor:
        """Same as CausalLM."""
        return self._gathered(lambda: super(ShardedCausalLM, self).hidden_states(token_ids, positions, attention))

    def logits(self, hidden: Tensor) -> Tensor:
        """Same as CausalLM."""
        return self._gathered(lambda: super(ShardedCausalLM, self).logits(hidden))

    def row_logprobs(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """Same as CausalLM."""
        return self._gathered(lambda: super(ShardedCausalLM, self).row_logprobs(row, temperature))

    def row_distribution(self, row: PackedRow, temperature: float) -> Tensor:
        """Same as CausalLM."""
        return self._gathered(lambda: super(ShardedCausalLM, self).row_distribution(row, temperature))

    def row_values(self, row: PackedRow) -> Tensor:
        """Same as CausalLM."""
        return self._gathered(lambda: super(ShardedCausalLM, self).row_values(row))

    def _gathered(self, call: Callable[[], Result]) -> Result:
        """Run `call` inside the root's hooks."""
        if self._is_gathered:
            return call()
        if self.twin.is_bound and torch.is_grad_enabled():
            raise MemoryStateError("the full weights are gathered for generating; release them before training")
        self._is_gathered = True
        try:
            result: Result = getattr(self._root, CALL)(call)
        except BaseException:
            self.twin.release()
            fsdp2.reset(self._root)
            raise
        finally:
            self._is_gathered = False
        if not torch.is_grad_enabled() and not self.twin.is_bound:
            # No backward pass follows that would free what is gathered, and an update would not reach it.
            for unit in fsdp2.units(self._root):
                unit.reshard()
        return result

    def shards(self) -> list[Tensor]:
        """Return this rank's shards, with the padding that makes all ranks' equally large: the memory itself. The
        module's own parameters are the full ones while these are gathered."""
        return [fsdp2.padded_shard(parameter) for parameter in fsdp2.parameters(self._root)]

    def set_last_micro_batch(self, is_last: bool) -> None:
        """Say whether the next backward pass is the last one of its mini-batch (`accumulating`)."""
        self._root.set_requires_gradient_sync(is_last or self._sharding.sync_every_micro_batch)
        self._root.set_requires_all_reduce(is_last)  # shards that every micro-batch sums still wait for the replicas'
        self._root.set_is_last_backward(is_last)
        if not self._sharding.reshard_after_forward:
            self._root.set_reshard_after_backward(is_last)

    def discard_gradients(self) -> None:
        """Forget accumulated gradients, and what an interrupted forward or backward pass has left."""
        fsdp2.reset(self._root)
        fsdp2.forget_gradients(self._root)
        for parameter in self._root.parameters():
            parameter.grad = None

    @torch.no_grad()
    def verify(self, prompt_ids: Sequence[int] = ()) -> float:
        """Compare the twin with the model's own forward, then this model with the twin; same errors as CausalLM."""
        row = verify_row(self)
        with self.twin.bound():
            plain = self.plain_twin()
            gap = plain.verify(prompt_ids)
            expected = plain.row_outputs(row)
        self.masked_from = plain.masked_from
        gaps = [relative_gap(*pair) for pair in zip(self.row_outputs(row), expected, strict=True)]
        tolerance = 0.0 if self.is_exact else VERIFY_TOLERANCE.get(self.dtype, 1e-3)
        for difference in gaps:
            if not difference <= tolerance:
                raise ModelError(
                    f"{type(self.twin.module).__name__} gives other logprobs on shards (relative gap "
                    f"{difference:.1e}); this architecture is not supported on several ranks"
                )
        return max(gap, *gaps)


@contextmanager
def accumulating(model: CausalLM, *, is_last: bool) -> Iterator[None]:
    """Run the forward and backward pass of one micro-batch inside the block. Its gradients stay on this rank; those of
    the whole mini-batch are summed over ranks in the backward pass of the last one (of every one with
    sync_every_micro_batch).

    If the block fails, the gradients of its mini-batch are discarded.
    """
    if not isinstance(model, ShardedCausalLM):
        yield
        return
    model.set_last_micro_batch(is_last)
    try:
        yield
    except BaseException:
        model.discard_gradients()
        raise


def _call(call: Callable[[], Result]) -> Result:
    return call()


def _local_device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
