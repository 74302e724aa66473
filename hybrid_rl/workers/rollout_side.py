"""The rollout engine of a rank, bound to its actor: the source of its weights, and its memory as residents."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from hybrid_rl.config.algorithm import is_rounded
from hybrid_rl.config.schema import ColocatedRolloutConfig, InPlaceRolloutConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.controller.ranks import BlockGather
from hybrid_rl.engines.base import KV_CACHE, TAGS, WEIGHTS, derive_seed
from hybrid_rl.engines.colocated import ColocatedEngine
from hybrid_rl.engines.coordinator import Coordinator
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.no_engine import NoEngine
from hybrid_rl.engines.registry import EngineSetup, make_engine
from hybrid_rl.errors import ConfigError, EngineStateError
from hybrid_rl.memory.cuda_region import CudaRegion
from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS
from hybrid_rl.memory.leases import Resident
from hybrid_rl.metrics.metric_sums import now
from hybrid_rl.models import CausalLM
from hybrid_rl.models.int8.int8_model import Int8CausalLM
from hybrid_rl.models.lora.factors import adapter_shapes
from hybrid_rl.resharding.handoff.base import HandoffReport, Source, agree
from hybrid_rl.resharding.handoff.disk import DiskSource, write_version
from hybrid_rl.resharding.handoff.distributed import DistributedSource
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from hybrid_rl.resharding.handoff.links import connect
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.resharding.handoff.verify import Verifier
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.training.sharding.build import gathered_bytes, generating_model
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM
from hybrid_rl.weights.low_rank import LowRank
from hybrid_rl.weights.sources import named_weights
from hybrid_rl.workers.setup import WorkerSetup
from hybrid_rl.workers.trainer_memory import engine_weights_resident, kv_cache_resident

Masters = Callable[[], Mapping[str, Tensor]]

SAME_MEMORY = "its weights are the trainer's own memory"


class RolloutSide(ABC):
    """An engine bound to the actor of the same rank. client: of the engine. residents: its memory, for the
    leases."""

    client: EngineClient
    residents: Sequence[Resident]

    @property
    def joined(self) -> Sequence[frozenset[str]] | None:
        """Names of the trainer's weights that the engine has as one on its grid; None if it has no grid."""
        return None

    @abstractmethod
    def publish(self, version: int) -> HandoffReport:
        """Hand the actor's weights to the engine. Collective. Raises HandoffError."""

    def let_go(self) -> None:
        """Forget where the actor's memory is, before it leaves: it may come back elsewhere. All ranks do, and the lease
        with which it leaves begins when all have."""
        return

    def verify(self, version: int) -> dict[str, float]:
        """Prove, if that is due, that the engine holds the trainer's weights, byte by byte. Returns metrics, none if it
        is not due, or if both are the same memory. Collective. Raises HandoffError."""
        return {}

    def proof(self, verified: Mapping[str, float]) -> str | None:
        """Say how it is known that the engine holds the trainer's weights, as a clause; None if it is not known.
        verified: the result of `verify` in this handoff."""
        return None

    def close(self) -> None:
        """End the engine; idempotent."""
        self.client.close()


def rollout_side(setup: WorkerSetup, model: CausalLM, context: RankContext, masters: Masters) -> RolloutSide:
    """Make the engine that the configuration names, bound to the actor. masters: gives those of the optimizer now, by
    name, none if the actor's own weights are. Collective.

    Raises ConfigError if it cannot run here. An engine in a separate process (placement "separate") needs a side here
    that starts it, reaches its weights through an IpcSource, and gives it a client that forwards the calls of
    EngineClient; none exists yet.
    """
    if not setup.generates:
        return NoSide(model)
    config = setup.config.rollout
    sides: dict[str, type[EmbeddedSide | ColocatedSide]] = {"embedded": EmbeddedSide, "colocated": ColocatedSide}
    if config.placement not in sides:
        raise ConfigError(
            f"rollout.engine={config.engine} runs in a separate process (placement={config.placement}), but workers "
            f"step engines in their own process only; choose an engine that is embedded or colocated"
        )
    if is_rounded(config):
        return RoundedSide(setup, model, context, masters)
    return sides[config.placement](setup, model, context)


def engine_setup(setup: WorkerSetup, model: CausalLM, context: RankContext) -> EngineSetup:
    """Return the arguments of this rank's engine. Collective."""
    config = setup.config.rollout
    return EngineSetup(
        model,
        config,
        setup.engine_length,
        context.device,
        setup.decode,
        memory_share=1 / num_ranks_of_host(context),
        seed=derive_seed(setup.config.seed, config.engine, context.rank // config.ranks_per_engine),
        trust_remote_code=setup.config.model.trust_remote_code,
        records_experts=setup.config.algorithm.routing_replay == "rollout",
    )


class NoSide(RolloutSide):
    """The place of an engine in a rank that only trains."""

    residents = ()

    def __init__(self, model: CausalLM) -> None:
        self.client = EngineClient(NoEngine(model.vocab_size))

    def publish(self, version: int) -> HandoffReport:
        """Raise EngineStateError: other ranks take the weights (`write_weights`)."""
        raise EngineStateError("this rank only trains; weights are handed to the ranks of rollout_ranks")


class EmbeddedSide(RolloutSide):
    """An engine that decodes from the actor's modules, or from a plain view of its gathered weights."""

    def __init__(self, setup: WorkerSetup, model: CausalLM, context: RankContext) -> None:
        self._model = model
        rollout, device = setup.config.rollout, model.device
        has_graphs = isinstance(rollout, InPlaceRolloutConfig) and rollout.engine_args.cuda_graphs
        has_graphs &= setup.config.algorithm.routing_replay != "rollout"
        if isinstance(model, ShardedCausalLM) and has_graphs and device.type == "cuda":
            # Graphs hold the addresses of the weights.
            model.twin.keep_addresses(
                lambda num_bytes: CudaRegion(ENGINE_WEIGHTS, capacity_bytes=num_bytes, device=device)
            )
        with generating_model(model) as whole:
            self.client = EngineClient(make_engine(engine_setup(setup, whole, context)))
        cache = kv_cache_resident(self.client)
        if isinstance(model, ShardedCausalLM):
            self.residents = (engine_weights_resident(model, self.client), cache)
        else:
            self.client.at_rest().wake({WEIGHTS})  # they are the actor's, which stay
            self.residents = (cache,)

    def publish(self, version: int) -> HandoffReport:
        """Hand over the actor's tensors themselves; the bytes are those that each rank has gathered."""
        report = self.client.at_rest().update_weights(TensorSource.of(self._model.module), version)
        return replace(report, num_bytes=gathered_bytes(self._model))

    def proof(self, verified: Mapping[str, float]) -> str | None:
        """Say that the memory is the same: a handoff checks that every tensor has the address of the trainer's."""
        return SAME_MEMORY


class RoundedSide(RolloutSide):
    """An engine that decodes from weights of 8 bits of its own, beside what is not rounded: that is the actor's, or
    gathered from its shards. Its weights never leave memory. masters: as for `rollout_side`."""

    def __init__(self, setup: WorkerSetup, model: CausalLM, context: RankContext, masters: Masters = dict) -> None:
        self._model, self._masters = model, masters
        module = model.twin.module if isinstance(model, ShardedCausalLM) else model.module
        self._rounded = Int8CausalLM(
            module, model.attention.name, dtype=model.dtype, float32_head=model.has_float32_head
        )
        self._rounded.masked_from = model.masked_from
        self.client = EngineClient(make_engine(engine_setup(setup, self._rounded, context)))
        self.client.at_rest().wake({WEIGHTS})
        weights = Resident(ENGINE_WEIGHTS, lambda: self._rounded.num_bytes)
        self.residents = (weights, kv_cache_resident(self.client))

    def publish(self, version: int) -> HandoffReport:
        """Round the actor's weights."""
        return self.client.at_rest().update_weights(self._source(), version)

    def verify(self, version: int) -> dict[str, float]:
        """Round them once more and compare every byte: it takes less time than the step's first forward pass."""
        start = now()
        self._rounded.check(self._source().tensors, version)
        return {"timing/verify": now() - start, "handoff/unproven_bytes": 0.0}

    def proof(self, verified: Mapping[str, float]) -> str | None:
        """Say what was compared."""
        return "its int8 weights were compared byte by byte with the trainer's, rounded again, and are equal"

    def _source(self) -> TensorSource:
        masters = self._masters()
        rounded = {name: masters[name] for name in self._rounded.rounded_names if name in masters}
        return TensorSource({**named_weights(self._model.module), **rounded})


class ColocatedSide(RolloutSide):
    """An engine in the same process whose own weights are written by plan from the shards of all ranks."""

    shares_memory = True  # with what trains: it sleeps meanwhile, if it can

    def __init__(self, setup: WorkerSetup, model: CausalLM, context: RankContext) -> None:
        config = setup.config.rollout
        assert isinstance(config, ColocatedRolloutConfig)
        self._config, self._model, self._context = config, model, context
        size = config.ranks_per_engine
        gather = BlockGather(size)
        # The engine adds adapters by itself; otherwise they are merged into its weights.
        self._sends_adapters = config.handoff.lora == "adapter"
        ranks = {name: each.rank for name, each in adapter_shapes(model.module).items() if self._sends_adapters}
        with model.weights.merged():  # the engine's model has no adapters
            engine = make_engine(replace(engine_setup(setup, model, context), adapter_ranks=ranks))
        assert isinstance(engine, ColocatedEngine)
        self._engine = engine
        coordinator = None
        if size > 1:
            coordinator = Coordinator(
                rank=context.rank % size,
                num_ranks=size,
                gather=gather,
                gather_numbers=gather.numbers,
                fingerprint=lambda: engine.fingerprint,
            )
        self.client = EngineClient(engine, in_thread=True, coordinator=coordinator)
        self._hosts: list[str] = context.gather(socket.gethostname())
        self._sources: dict[str, Source] = {}
        self._published = -1
        # Memory of the host keeps its address, and the mappings of other ranks; for messages no address is told.
        moves = ACTOR in (setup.config.memory.offload or ()) and context.device.type == "cuda"
        self._exports_again = moves and config.handoff.transport != "distributed"
        self._files: tuple[int, DiskSource] | None = None
        self._verifier: Verifier | None = None
        self.residents = self._residents()

    def _residents(self) -> Sequence[Resident]:
        engine = self._engine
        weights = Resident(ENGINE_WEIGHTS, lambda: engine.weight_bytes)
        cache = Resident(KV_CACHE, lambda: engine.kv_cache_bytes)
        if not (self.shares_memory and engine.can_sleep):
            # Whatever the leases ask for, they stay in memory: nothing may claim that their bytes are free.
            self.client.at_rest().wake(TAGS)
            return weights, cache

        def sleeping(resident: Resident, tag: str, after: tuple[str, ...] = ()) -> Resident:
            def require_room() -> None:
                engine.require_room(frozenset({tag}))

            def wake() -> None:
                self.client.at_rest().wake({tag})

            return replace(
                resident,
                sleep=self._sleep,
                wake=wake,
                after=after,
                require_room=require_room,
                collective=self._config.ranks_per_engine > 1,
            )

        return sleeping(weights, WEIGHTS), sleeping(cache, KV_CACHE, after=(ENGINE_WEIGHTS,))

    def _sleep(self, tags: frozenset[str]) -> None:
        """Release both in one call: vLLM copies nothing then."""
        self.client.at_rest().sleep({WEIGHTS if tag == ENGINE_WEIGHTS else KV_CACHE for tag in tags})

    @property
    def joined(self) -> Sequence[frozenset[str]] | None:
        """As its trace has shown."""
        return None if self._engine.quantisation is None else self._engine.quantisation.joined

    def publish(self, version: int) -> HandoffReport:
        """Write the actor's weights. A version may be published again, to an engine that has slept since."""
        if version <= self._published:  # a source hands over each version once
            self._close_sources()
        with self._source(version) as source:
            report = self.client.at_rest().update_weights(source, version)
        self._published = version
        return report

    def let_go(self) -> None:
        """Close the sources if the actor's memory gets other addresses when it wakes: it is exported again then."""
        if self._exports_again:
            self._close_sources()

    def verify(self, version: int) -> dict[str, float]:
        """Compare every byte, if it is due. What the engine derived from the weights cannot be compared; it is
        counted. Adapters that the engine adds by itself are read back every time: they are few bytes."""
        every = self._config.handoff.verify_steps
        is_due = bool(every) and version % every == 0
        if not is_due and not self._sends_adapters:
            return {}
        start = now()
        weights = self._engine.weights
        unproven = [spec for spec in weights.trace.destinations if spec.name in weights.trace.untraced]
        with self._source(version) as source:
            if self._sends_adapters:
                subject = f"the adapters of policy version {version}"
                agree(source.gather, subject, lambda: self._engine.check_adapters(source))
            if is_due:
                if self._verifier is None:
                    self._verifier = Verifier(weights.trace, source.layout(), gather=source.gather)
                self._verifier.verify(source, weights.destinations, version=version)
            elif not self._config.handoff.adopt_weights:
                unproven = list(weights.trace.destinations)
        num_bytes = sum(spec.num_elements * spec.dtype.itemsize for spec in unproven)
        return {"timing/verify": now() - start, "handoff/unproven_bytes": float(num_bytes)}

    def proof(self, verified: Mapping[str, float]) -> str | None:
        """Say that they were compared in this handoff, or are the same memory; None if it is not known."""
        if not verified:
            return SAME_MEMORY if self._config.handoff.adopt_weights else None
        unproven = int(verified["handoff/unproven_bytes"])
        but = f", but for {unproven} bytes that it derives from them, which may be stale" if unproven else ""
        if unproven and self._sends_adapters:
            but = (
                f", but for {unproven} bytes of base weights, which may have changed (handoff.verify_steps=1 "
                "compares them too)"
            )
        return f"its weights were compared with the trainer's byte by byte in this handoff, and are equal{but}"

    @contextmanager
    def _source(self, version: int) -> Iterator[Source]:
        """Yield the source of the weights, with what the adapters add to them now. Collective."""
        source, changes = self._weights(version)
        if self._sends_adapters:
            source.adapters = changes
        else:
            source.changes = changes
        try:
            yield source
        finally:
            source.adapters = source.changes = {}

    def _weights(self, version: int) -> tuple[Source, Mapping[str, LowRank]]:
        """Return the source of the weights, and what the adapters add to them now, whole on every rank. Collective."""
        changes = self._model.weights.changes(self._model.dtype)
        with self._model.weights.merged():
            if self._engine.quantisation is None:
                return self._plain_source(version), changes
            tensors, rank, gather = named_weights(self._model.module), self._context.rank, self._context.gather
            layout = SourceLayout.of(tensors, self._hosts)
            source = self._engine.quantisation.source(layout, tensors, changes, rank=rank, gather=gather)
        return source, source.changes

    def _plain_source(self, version: int) -> Source:
        """Return the source of the weights for handoff.transport; it is made once."""
        transport = self._config.handoff.transport
        if transport == "disk":
            return self._disk_source(version)
        if self._context.num_ranks == 1:
            return TensorSource.of(self._model.module)
        if transport not in self._sources:
            tensors = named_weights(self._model.module)
            layout = SourceLayout.of(tensors, self._hosts)
            rank, gather, device = self._context.rank, self._context.gather, self._context.device
            region = self._model.region if isinstance(self._model, ShardedCausalLM) else None
            regions = [region] if region else []
            if transport == "distributed":
                self._sources[transport] = DistributedSource(layout, rank, tensors, gather=gather)
            elif transport == "ipc":
                export = IpcExport(layout, rank, tensors, regions)
                self._sources[transport] = IpcSource.connect(layout, export, gather, device)
            else:
                self._sources[transport] = connect(layout, rank, tensors, regions=regions, device=device, gather=gather)
        return self._sources[transport]

    def _disk_source(self, version: int) -> Source:
        """Return the files of this version, written if they do not exist yet."""
        assert self._config.handoff.weights_path is not None
        if self._files is None or self._files[0] != version:
            root, rank, gather = Path(self._config.handoff.weights_path), self._context.rank, self._context.gather
            write_version(root, version, named_weights(self._model.module), rank=rank, gather=gather)
            files = DiskSource(
                root,
                version,
                reader=rank,
                num_readers=self._context.num_ranks,
                gather=gather,
                device=self._context.device,
            )
            self._files = version, files
        return self._files[1]

    def close(self) -> None:
        """End the engine and let go of the shards of other ranks; idempotent."""
        super().close()
        self._close_sources()

    def _close_sources(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources, self._files = {}, None


class FilesSide(ColocatedSide):
    """An engine of a rank that only generates, which takes weights from files that other ranks have written. The model
    has no weights. Nothing sleeps: nobody else needs the memory."""

    shares_memory = False
    _given: tuple[Source, Mapping[str, LowRank]] | None = None

    def give(self, source: Source, changes: Mapping[str, LowRank]) -> None:
        """Set the source of the next version, and what adapters add to it."""
        self._given = source, changes

    def _weights(self, version: int) -> tuple[Source, Mapping[str, LowRank]]:
        assert self._given is not None, "it is set before"
        return self._given

    def let_go(self) -> None:
        """Forget the source, which is closed by whoever set it."""
        self._given = None


def num_ranks_of_host(context: RankContext) -> int:
    """Count the ranks that share the host memory of this rank; 1 if it computes on an accelerator."""
    return context.gather(socket.gethostname()).count(socket.gethostname()) if context.device.type == "cpu" else 1
