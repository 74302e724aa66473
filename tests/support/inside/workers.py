"""What a worker is made of. Each function takes a worker, a group of one rank in this process, or its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybrid_rl.controller import WorkerGroup
from hybrid_rl.workers.base import WorkerBase

if TYPE_CHECKING:
    import pytest

    from hybrid_rl.engines.engine_client import EngineClient
    from hybrid_rl.memory.arena import HostArena
    from hybrid_rl.memory.comparison import Comparison
    from hybrid_rl.memory.cycle import Cycle
    from hybrid_rl.models import CausalLM
    from hybrid_rl.training.actor import Actor
    from hybrid_rl.training.critic import Critic


def worker_of(owner: Any) -> Any:
    """The worker itself; a closed one is None."""
    if isinstance(owner, WorkerBase):
        return owner
    group = owner if isinstance(owner, WorkerGroup) else owner.policy
    return group._backend._worker


# -------------------------------------------------------------------------------------------------------- models


def actor_of(owner: Any) -> Actor:
    actor: Actor = worker_of(owner)._actor
    return actor


def module_of(owner: Any) -> Any:
    """The policy's module, which is trained."""
    return actor_of(owner).model.module


def optimizer_of(owner: Any) -> Any:
    """The policy's optimizer."""
    return actor_of(owner).optimizer


def critic_of(owner: Any) -> Critic | None:
    critic: Critic | None = worker_of(owner)._roles._critic
    return critic


def reference_of(owner: Any) -> CausalLM | None:
    """The reference model, also if it is the policy without its adapters."""
    model: CausalLM | None = worker_of(owner)._roles.reference_model
    return model


# ---------------------------------------------------------------------------------------------------- generating


def side_of(owner: Any) -> Any:
    """The engine bound to the actor, with the sources of its weights."""
    return worker_of(owner)._side


def client_of(owner: Any) -> EngineClient:
    client: EngineClient = worker_of(owner)._client
    return client


def engine_of(owner: Any) -> Any:
    return worker_of(owner)._engine


def stream_of(owner: Any) -> Any:
    """The stream of groups."""
    return worker_of(owner)._stream


def generating_model_of(owner: Any) -> CausalLM:
    """The policy of a rank that only generates."""
    model: CausalLM = worker_of(owner)._model
    return model


def step_in_calling_thread(owner: Any) -> None:
    """Have the engine stepped by whoever asks for samples: what counts operators sees only its own thread."""
    client = client_of(owner)
    client._thread, client._advance = None, client._step


# -------------------------------------------------------------------------------------------------------- memory


def cycle_of(owner: Any) -> Cycle:
    """What each phase needs in memory."""
    cycle: Cycle = worker_of(owner)._cycle
    return cycle


def arena_of(owner: Any) -> HostArena | None:
    """The host memory in which residents wait."""
    arena: HostArena | None = worker_of(owner)._memory._arena
    return arena


def comparison_of(owner: Any) -> Comparison | None:
    """What was predicted of the memory beside what was measured; None without a plan."""
    comparison: Comparison | None = worker_of(owner)._comparison
    return comparison


def reference_role_of(owner: Any) -> Any:
    """The reference as a role; None without one."""
    return worker_of(owner)._roles._reference


# ------------------------------------------------------------------------------------------------- a training step


def plan_of(owner: Any, batch: Any, step: int) -> Any:
    """Mini-batches and micro-batches of a training step on this rank."""
    return worker_of(owner)._plan(batch, step)


def scorers_of(owner: Any) -> list[tuple[Any, Any]]:
    """What adds columns before advantages, by what it needs in memory."""
    scorers: list[tuple[Any, Any]] = worker_of(owner)._scorers
    return scorers


def gather_with(patch: pytest.MonkeyPatch, owner: Any, gather: Callable[[Any], list[Any]]) -> None:
    """Let a rank believe that there are others, which say this."""
    worker = worker_of(owner)
    patch.setattr(worker, "_context", replace(worker._context, gather=gather))


# ------------------------------------------------------------------------------------------------------- a handoff


def probe_of(owner: Any) -> Any:
    """What compares the engine's logprobs with the trainer's."""
    return worker_of(owner)._probe


def opened_source(owner: Any, version: int) -> AbstractContextManager[Any]:
    """The source of the weights of a version."""
    source: AbstractContextManager[Any] = side_of(owner)._source(version)
    return source


def bare_side(*, exports_again: bool, sources: dict[str, Any]) -> Any:
    """The side of a colocated engine, of which only the sources are there."""
    from hybrid_rl.workers.rollout_side import ColocatedSide

    side = ColocatedSide.__new__(ColocatedSide)
    side._exports_again, side._sources = exports_again, sources
    return side


def sources_of(side: Any) -> dict[str, Any]:
    """The sources that a side keeps open, by transport."""
    sources: dict[str, Any] = side._sources
    return sources


def reading_of(verifier: Any) -> Any:
    """The boxes of the engine's tensors that a rank hashes."""
    return verifier._reading
