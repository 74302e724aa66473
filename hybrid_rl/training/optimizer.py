"""AdamW with fp32 masters, its schedule, clipping, and the refusal of gradients that are not numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

from hybrid_rl.compat.torch import foreach_add, foreach_copy, foreach_norm, foreach_zero, mark_stepped, set_schedule
from hybrid_rl.config import OptimizerConfig
from hybrid_rl.errors import CheckpointError, ConfigError, ModelError
from hybrid_rl.weights.boxes import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
SLICE_ELEMENTS = 1 << 28  # gradients that are taken over in one call


Item = TypeVar("Item")


class HasGradient(Protocol):
    """Whatever holds an accumulated gradient: a tensor, or something in its place."""

    grad: Tensor | None


class Optimizer:
    """Updates a module's parameters, of sharded ones this rank's part.

    fp32 parameters are updated as they are. Smaller ones get fp32 masters and fp32 gradient accumulators, so that
    neither small updates nor small gradients are lost; the parameters are rounded copies of the masters. Weight decay
    applies to matrices only, not to biases and norms.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, *, num_optimizer_steps: int) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ConfigError(
                "no parameter of the model requires a gradient: there is nothing to train; call "
                "model.requires_grad_(True) (peft's merge_and_unload leaves a model frozen), or set lora.r"
            )
        self.names = list(self._parameters)
        self.not_finite: tuple[list[str], list[str]] = ([], [])  # gradients and weights of the last skipped update
        self._shapes = {name: (p.shape, p.dtype) for name, p in self._parameters.items()}
        self._has_masters = any(p.dtype.itemsize < torch.float32.itemsize for p in self._parameters.values())
        self._mesh, self._num_copies = _mesh_of(self._parameters)
        # What AdamW updates: plain tensors, without the cost of DTensor operations.
        self._targets = self._make_targets({name: local_tensor(p.detach()) for name, p in self._parameters.items()})
        self._sums = self._make_sums()
        matrices = [t for t in self._targets.values() if t.dim() >= 2]
        vectors = [t for t in self._targets.values() if t.dim() < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._max_grad_norm = config.max_grad_norm
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )
        for target in self._targets.values():
            step = torch.zeros((), dtype=torch.float32, device=target.device)
            moments = {moment: torch.zeros_like(target) for moment in MOMENTS}
            self._adamw.state[target] = {"step": step, **moments}
        self._schedule = self._make_schedule(config, num_optimizer_steps)

    def _make_schedule(self, config: OptimizerConfig, num_optimizer_steps: int) -> Any:
        return get_scheduler(
            config.lr_scheduler_type,
            self._adamw,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=num_optimizer_steps,
        )

    def reconfigure(self, config: OptimizerConfig, num_optimizer_steps: int) -> None:
        """Go on with another peak learning rate, weight decay, limit of the gradient norm or length of the schedule.
        The schedule stays where it is: the next step has the new peak times the schedule's factor there."""
        num_done = self._schedule.last_epoch
        self._max_grad_norm = config.max_grad_norm
        for group in self._adamw.param_groups:
            group["lr"] = config.learning_rate
            group.pop("initial_lr", None)  # from which a schedule would start again
            if group["params"][0].dim() >= 2:
                group["weight_decay"] = config.weight_decay
        self._schedule = self._make_schedule(config, num_optimizer_steps)
        self._go_to(num_done)

    def _go_to(self, num_steps: int) -> None:
        """Put the schedule to where it is after so many optimizer steps."""
        rates = [
            base * factor(num_steps)
            for base, factor in zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self._adamw.param_groups, rates, strict=True):
            group["lr"] = rate
        set_schedule(self._schedule, num_steps, rates)

    def _make_targets(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what AdamW updates. local: this rank's part of each parameter."""
        return {name: t.float().clone() for name, t in local.items()} if self._has_masters else local

    def _make_sums(self) -> Mapping[str, HasGradient]:
        """Return what holds the accumulated gradients, as its `grad`."""
        return self._targets

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return self._schedule.get_last_lr()[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of masters and Adam moments on this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return masters, Adam moments and step counters of this rank: the memory itself, plain tensors."""
        own = list(self._targets.values()) if self._has_masters else []
        return own + [tensor for target in self._targets.values() for tensor in self._adamw.state[target].values()]

    def accumulate(self) -> None:
        """Take the gradients of one backward pass into the fp32 accumulators. Call after every micro-batch."""
        if not self._has_masters:
            return
        all_pairs = [(self._sums[name], p) for name, p in self._parameters.items() if p.grad is not None]
        for pairs in slices(all_pairs, lambda pair: pair[1].numel(), SLICE_ELEMENTS):
            new, more = ([pair for pair in pairs if (pair[0].grad is None) == is_new] for is_new in (True, False))
            for held, parameter in new:
                held.grad = torch.empty_like(local_tensor(parameter), dtype=torch.float32)
            for join, its in ((foreach_copy, new), (foreach_add, more)):  # both widen to fp32
                if its:
                    gradients = [local_tensor(cast(Tensor, parameter.grad)) for _, parameter in its]
                    join([cast(Tensor, held.grad) for held, _ in its], gradients)
            for _, parameter in pairs:
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the accumulated gradients on this rank, in the order of the parameters; zeros if there is none."""
        self._collect()
        return [
            torch.zeros_like(target) if held.grad is None else held.grad
            for target, held in zip(self._targets.values(), self._sums.values(), strict=True)
        ]

    def check(self) -> None:
        """Raise ModelError if parameters are no longer those that the optimizer was made for."""
        if {name: (p.shape, p.dtype) for name, p in self._parameters.items()} != self._shapes:
            raise ModelError(
                "parameters changed shape or dtype since the trainer was made (resize_token_embeddings, .to(dtype)?); "
                "change the model first, then make a new Trainer"
            )

    @torch.no_grad()
    def take_over(self) -> Tensor:
        """Let masters follow parameters that somebody else has changed since the last step, as fp32 parameters do by
        themselves: a number that is not its master's rounded one becomes the master.

        By value: what is written through `.data` leaves no trace in a tensor's version. Reads masters and parameters
        once. Returns which parameters of `names` were changed, bool [P] on their device, without waiting for it; empty
        if the parameters are the masters.
        """
        if not self._has_masters:
            return torch.zeros(0, dtype=torch.bool)
        self.check()
        return torch.stack([follow(self._targets[name], local_tensor(p)) for name, p in self._parameters.items()])

    def masters(self) -> Mapping[str, Tensor]:
        """Return the fp32 masters by the names of their parameters, after `take_over`; empty if the parameters are the
        masters. The memory itself."""
        self.take_over()
        return self._targets if self._has_masters else {}

    @torch.no_grad()
    def step(self) -> tuple[float, bool]:
        """Clip, update, advance the schedule and clear the gradients. Collective over shards.

        Returns the gradient norm before clipping and whether the weights were updated, the same on every rank. If the
        norm is not finite, weights and moments are left alone; the schedule advances all the same, so that it ends
        when it was planned to, and `not_finite` names what was to blame on this rank. Raises ModelError if
        parameters are no longer those that the optimizer was made for.
        """
        self.check()
        self._collect()
        sums = list(self._sums.values())
        norm = self._grad_norm([held.grad for held in sums if held.grad is not None])
        host_norm = float(norm)  # the one time that the host waits for the device
        updated = math.isfinite(host_norm)
        if updated:
            if self._max_grad_norm is not None:
                # It looks at their gradients only.
                torch.nn.utils.clip_grads_with_norm_(cast(list[Tensor], sums), self._max_grad_norm, norm)
            self._apply()
        else:
            self.not_finite = (
                [name for name, s in self._sums.items() if s.grad is not None and not s.grad.isfinite().all()],
                [name for name, t in self._targets.items() if not t.isfinite().all()],
            )
            # The scheduler warns when it runs before any optimizer step; a skipped one is counted by the caller
            # instead.
            mark_stepped(self._adamw)
        self._schedule.step()
        self.clear()
        return host_norm, updated

    def _apply(self) -> None:
        """Update weights and moments from the accumulated gradients."""
        self._adamw.step()
        if self._has_masters:
            foreach_copy([local_tensor(p) for p in self._parameters.values()], list(self._targets.values()))

    def _collect(self) -> None:
        """Point targets at the parameters' present memory and gradients."""
        if self._has_masters:
            return
        for name, parameter in self._parameters.items():
            target = self._targets[name]
            target.data = local_tensor(parameter.detach())
            target.grad = None if parameter.grad is None else local_tensor(parameter.grad)

    def _grad_norm(self, gradients: list[Tensor]) -> Tensor:
        """Compute the L2 norm over all ranks, float32 []; the same bits on each, so that replicas do not drift."""
        device = local_tensor(next(iter(self._parameters.values()))).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if gradients:
            total += torch.stack(foreach_norm(gradients)).double().square().sum()
        if self._mesh is not None:
            for axis in reversed(range(self._mesh.ndim)):
                dist.all_reduce(total, group=self._mesh.get_group(axis))
            total /= self._num_copies
        return total.sqrt().float()

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, value: float) -> None:
        """Set every number of a parameter, and of its master; do nothing if it is not trained."""
        for name in (name for name, own in self._parameters.items() if own is parameter):
            for tensor in (local_tensor(parameter), self._targets[name]):
                tensor.fill_(value)

    @torch.no_grad()
    def forget_moments(self) -> None:
        """Set moments and their bias correction to zero; schedule, masters and weights stay."""
        foreach_zero([t for target in self._targets.values() for t in self._adamw.state[target].values()])

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for held in (*self._parameters.values(), *self._sums.values()):
            held.grad = None

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return everything that a resumed run needs, by parameter name: the moments `exp_avg` and `exp_avg_sq`, the
        updates done `step`, `master` (empty without masters), and `schedule`.

        The tensors are the optimizer's own memory, of sharded parameters as DTensors of their mesh and placements.
        """
        states = {name: self._adamw.state[target] for name, target in self._targets.items()}
        masters = self._targets if self._has_masters else {}
        return {
            **{kind: {name: self._wrapped(name, state[kind]) for name, state in states.items()} for kind in MOMENTS},
            "step": {name: state["step"] for name, state in states.items()},
            "master": {name: self._wrapped(name, master) for name, master in masters.items()},
            "schedule": {"last_epoch": self._schedule.last_epoch},
        }

    def _wrapped(self, name: str, local: Tensor) -> Tensor:
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return local
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from `state_dict()`: moments, masters and the number of optimizer steps done.

        Learning rate, schedule, betas and weight decay are those of this run's config, also if they were changed.
        Raises CheckpointError, before anything is changed, if the state is of another model or another sharding.
        """
        own = self.state_dict()
        for kind in (*MOMENTS, "step", "master"):
            theirs = {name: tuple(local_tensor(value).shape) for name, value in state.get(kind, {}).items()}
            mine = {name: tuple(local_tensor(value).shape) for name, value in own[kind].items()}
            if theirs != mine:
                differing = sorted(set(theirs.items()) ^ set(mine.items()))
                raise CheckpointError(
                    f"the optimizer's state is of another model, dtype or number of ranks: {kind!r} differs in "
                    f"{len(differing)} entries, e.g. {differing[0]}"
                )
        for kind in (*MOMENTS, "step", "master"):
            for name, value in state.get(kind, {}).items():
                local_tensor(own[kind][name]).copy_(local_tensor(value))
        self._go_to(state["schedule"]["last_epoch"])


@contextmanager
def no_gradients_left(optimizer: Optimizer) -> Iterator[None]:
    """Drop accumulated gradients if the block fails: nobody reads them again, and others need their memory."""
    try:
        yield
    except BaseException:
        optimizer.clear()
        raise


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return whether the bits of two tensors of one dtype differ, bool []: eight bytes at a time if possible, which on
    a CPU is many times as fast as comparing numbers of two bytes."""
    one, other = one.reshape(-1), other.reshape(-1)
    per_word = 8 // one.itemsize
    is_even = not any(count % per_word for count in (len(one), one.storage_offset(), other.storage_offset()))
    bits = torch.int64 if is_even else {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return (one.view(bits) != other.view(bits)).any()


def follow(master: Tensor, parameter: Tensor) -> Tensor:
    """Let a master follow its parameter, on the same device, wherever that is not the master's rounded number. Returns
    whether it was changed, bool [], without waiting for a GPU."""
    rounded = master.to(parameter.dtype)
    differ = _differ(parameter, rounded)
    if parameter.device.type != "cpu" or bool(differ):  # to ask a GPU would mean to wait for it
        # Rounding may write another NaN than the one that is there.
        same = (parameter == rounded) | (parameter.isnan() & rounded.isnan())
        torch.where(same, master, parameter, out=master)
        differ = ~same.all()
    return differ


def slices(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield items, some at a time: many for one call, few enough that what a call needs beside them, which is freed
    after it, does not add to the memory of a step. size: of an item in elements; a slice ends with the item that takes
    it above `most`."""
    chunk: list[Item] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += size(item)
        if total > most:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _mesh_of(parameters: Mapping[str, nn.Parameter]) -> tuple[DeviceMesh | None, int]:
    """Return the mesh that the parameters are sharded over, None for plain ones, and how many ranks hold the same
    number. Raises ModelError unless it is the same for all: the gradient norm counts each number once."""
    meshes: dict[tuple[DeviceMesh | None, tuple[int, ...]], str] = {}  # with the axes of copies -> the first such name
    for name, p in parameters.items():
        copied = tuple(i for i, of in enumerate(p.placements) if of.is_replicate()) if isinstance(p, DTensor) else ()
        meshes.setdefault((p.device_mesh if isinstance(p, DTensor) else None, copied), name)
    if len(meshes) > 1:
        raise ModelError(
            f"the trainable parameters {', '.join(meshes.values())} are sharded over several meshes, or copied over "
            "different axes of one, so no gradient norm counts each number once; shard the whole model alike"
        )
    ((mesh, copied),) = meshes
    return mesh, 1 if mesh is None else math.prod(mesh.size(axis) for axis in copied)
