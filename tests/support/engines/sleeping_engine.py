"""An engine for whole runs that really sleeps: rollout.engine=sleeping, colocated, on CPUs.

It computes as the in-place engine does, but from weights of its own, which lie in a region, as its cache does. A
handoff writes them by plan, sleep discards both, and nothing is generated with weights that were not published after
they woke. Whoever touches memory that sleeps is found out when it wakes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_rl.algos.options import entries, key
from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.engine_keys import InPlaceArgs
from hybrid_rl.config.schema import ColocatedRolloutConfig
from hybrid_rl.engines import registry
from hybrid_rl.engines.base import KV_CACHE, WEIGHTS, EngineState
from hybrid_rl.engines.colocated import ColocatedEngine, TracedWeights
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.engines.inplace.kv_cache import region_bytes
from hybrid_rl.engines.registry import EngineSetup
from hybrid_rl.errors import HandoffError
from hybrid_rl.memory.region import Region, capacity_for
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.resharding.handoff.merged import merge
from hybrid_rl.resharding.layout import TensorSpec
from hybrid_rl.resharding.rank_plan import Plan, make_plan
from hybrid_rl.resharding.tracer import trace_loader
from hybrid_rl.weights.sources import named_weights
from hybrid_rl.weights.views import checkpoint_views
from tests.support.inside.engines import set_cache_region

NAME = "sleeping"


@dataclass(frozen=True)
class SleepingRolloutConfig(ColocatedRolloutConfig):
    """rollout.engine=sleeping. A process that is sent one knows the engine from then on."""

    engine: Literal["sleeping"] = key(NAME, "for tests")
    engine_args: InPlaceArgs = entries(InPlaceArgs, "as in place")
    speculation: Literal["off"] = key("off", "as in place")

    def __reduce__(self) -> Any:
        return _arrived, tuple(getattr(self, item.name) for item in fields(self))


def _arrived(*values: Any) -> SleepingRolloutConfig:
    registry.MODULES[NAME] = __name__
    by_name = zip((item.name for item in fields(SleepingRolloutConfig)), values, strict=True)
    return SleepingRolloutConfig(**dict(by_name))


@contextmanager
def sleeping_engine() -> Iterator[None]:
    """Let configurations name the engine inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.MODULES, NAME, __name__)
        patch.setitem(CHOICES["rollout"].members, NAME, SleepingRolloutConfig)  # type: ignore[arg-type]
        yield


class SleepingEngine(ColocatedEngine, InPlaceEngine):
    """An InPlaceEngine over a model of its own in a region, written by plan."""

    can_sleep = True

    def __init__(self, setup: EngineSetup, config: SleepingRolloutConfig) -> None:
        trained = setup.model
        with torch.random.fork_rng():
            own = AutoModelForCausalLM.from_config(trained.module.config).to(trained.dtype)
        own.requires_grad_(False)
        tensors = dict(own.named_parameters())  # a tied one once
        self.weights_region = Region(WEIGHTS, capacity_bytes=capacity_for(tensors.values()))
        for tensor in tensors.values():
            tensor.data = self.weights_region.allocate(tuple(tensor.shape), tensor.dtype)
        model = CausalLM(own)
        model.masked_from = trained.masked_from
        super().__init__(
            model, config, max_length=setup.max_length, decode=setup.decode, memory_share=setup.memory_share
        )
        views = checkpoint_views(trained.module)

        def load(offered: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in offered:
                _place(tensors, name).copy_(tensor)

        live = {name: tensor.detach() for name, tensor in tensors.items()}
        trace = trace_loader(load, views.views, views.tensors, live)
        self._traced = TracedWeights(trace, list(live.values()))
        named = sorted(named_weights(trained.module).items())
        self._specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]
        self._plans: dict[str, Plan] = {}
        self.weights_region.release()
        room = region_bytes(self._cache.layers, self.kv_cache_tokens)
        set_cache_region(self, Region(KV_CACHE, capacity_bytes=room))

    @property
    def weights(self) -> TracedWeights:
        """The tensors in the region, and where each of their elements comes from."""
        return self._traced

    @torch.inference_mode()
    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Write the weights of a policy version. Collective over all ranks."""
        start = perf_counter()
        self.require_update(version)
        theirs = [sharded.spec for sharded in source.layout().tensors]
        if theirs != self._specs:
            raise HandoffError(f"the trainer's weights are {theirs}, the engine's {self._specs}")
        self._begin_rollout()
        self.policy_version = -1
        with source.opened(version):
            delivered = source.deliver(self._plan(source), self._traced.destinations)
            merge(self._traced.trace, self._traced.destinations, source.changes)
        self.policy_version = version
        seconds = perf_counter() - start
        return HandoffReport(**vars(delivered), version=version, num_tensors=len(self._specs), seconds=seconds)

    def _plan(self, source: Source) -> Plan:
        layout = source.layout()
        digest = layout.digest()
        if digest not in self._plans:
            rank = dist.get_rank() if len(layout.hosts) > 1 else 0
            self._plans = {digest: make_plan(self._traced.trace, layout, rank)}
        return self._plans[digest]

    def sleep(self, tags: Iterable[str]) -> None:
        """Discard the cache, and with WEIGHTS the weights too."""
        tags = self.require_sleep(tags)
        self._begin_rollout()
        self._release_cache()
        if WEIGHTS in tags and not self.weights_region.is_asleep:
            self.weights_region.release()
            self.policy_version = -1
        self._settle()

    def wake(self, tags: Iterable[str]) -> None:
        """Get pages back; weights that come back are zeros, of no version."""
        tags = self.require_wake(tags)
        if self.weights_region.is_asleep:
            self.weights_region.restore()
        if KV_CACHE in tags:
            self._allocate_cache()
        self._settle()

    def _settle(self) -> None:
        if self.weights_region.is_asleep:
            self.state = EngineState.ASLEEP
        else:
            self.state = EngineState.READY if self._cache.is_allocated else EngineState.WEIGHTS


def _place(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Where a tensor of a checkpoint goes: experts, which are one by one there, into one tensor of all."""
    expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if expert is None:
        return tensors[name]
    experts, number, kind = expert.groups()
    if kind == "down":
        return tensors[f"{experts}.down_proj"][int(number)]
    return tensors[f"{experts}.gate_up_proj"][int(number)].chunk(2)[kind == "up"]


def make_engine(setup: EngineSetup) -> SleepingEngine:
    """Make the engine of rollout.engine=sleeping."""
    assert isinstance(setup.config, SleepingRolloutConfig)
    return SleepingEngine(setup, setup.config)
