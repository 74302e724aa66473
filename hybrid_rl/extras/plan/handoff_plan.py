"""The plan of a run's handoff before there are ranks: bytes by link, from traces of the engine's loader."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import is_rounded
from hybrid_rl.config.schema import ColocatedRolloutConfig
from hybrid_rl.errors import ConfigError, HybridRLError
from hybrid_rl.extras.plan.trace_files import load_trace, read_sources
from hybrid_rl.extras.plan.traffic import LINKS, Traffic, fsdp_layout, gathered, report_of
from hybrid_rl.models.int8.int8_model import rounded_places
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.resharding.layout import SourceLayout, TensorSpec
from hybrid_rl.resharding.rank_plan import make_plan
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.weights.sources import named_weights

TRACE_NAME = re.compile(r"(?P<model>.+)-tp(?P<size>\d+)-rank(?P<rank>\d+)\.npz")


@dataclass(frozen=True)
class HandoffPlan:
    """What a handoff moves to one rank: of those that were planned, the one that takes most from others.

    links: by link (LINKS), as read in the trainer's dtype and written in the engine's. minimum: each element of the
    engine's tensors once. staging_bytes: extra peak of a rank that receives messages. gathered_bytes: what gathering
    full tensors would bring to a rank from others instead; 0 if that is not an alternative. source: where the numbers
    are from. missing: why there are none; empty if there are. words: what is done, in a sentence. is_on_gpus: whether
    shards and engine are; else shards are in host memory.
    """

    words: str
    links: Mapping[str, Traffic]
    minimum: Traffic = Traffic()
    staging_bytes: int = 0
    gathered_bytes: int = 0
    source: str = ""
    missing: str = ""
    is_on_gpus: bool = True

    @property
    def bytes_by_link(self) -> dict[str, int] | None:
        """Bytes that cross each link: of its own memory read and written, of others on the host read in place, from
        other hosts sent in the engine's dtype. From host memory to GPUs all is cast, and crosses "pcie". None if they
        are not known."""
        if self.missing:
            return None
        traffic = {name: self.links.get(name, Traffic()) for name in LINKS}
        remote = traffic["remote"].written_bytes
        if not self.is_on_gpus:
            return {"remote": remote, "pcie": sum(part.written_bytes for part in traffic.values())}
        local = traffic["local"].read_bytes + traffic["local"].written_bytes
        return {"local": local, "host": traffic["host"].read_bytes, "remote": remote}


def plan_handoff(
    config: TrainerConfig,
    skeleton: PreTrainedModel,
    *,
    ranks_per_host: int,
    layouts: Path | None = None,
    may_trace: bool = True,
) -> HandoffPlan:
    """Plan the handoff of a resolved config. skeleton: the model, which may be on meta. layouts: a folder of traces.
    may_trace: vLLM's loader is traced here if that folder has no trace of it and vLLM is installed.

    Raises ConfigError if that folder has no traces at all.
    """
    assert config.num_ranks != "auto"
    num_ranks, rollout = config.num_ranks, config.rollout
    on_host = config.model.device == "cpu" or (config.memory.keeps_on_host("shards") and num_ranks > 1)
    hosts = [f"host{rank // ranks_per_host}" for rank in range(num_ranks)]
    dtype = DTYPES[config.model.dtype]
    if not isinstance(rollout, ColocatedRolloutConfig):
        replicas = config.fsdp.dp_replicate
        plan = (
            _rounded(skeleton, hosts, replicas) if is_rounded(rollout) else _embedded(skeleton, dtype, hosts, replicas)
        )
        return replace(plan, is_on_gpus=not on_host)
    if rollout.handoff.adopt_weights:
        return HandoffPlan("trainer and engine share one copy of the weights: nothing is moved", {})
    words = f"{rollout.engine} gets each element once, from the rank nearest to it that holds it"
    try:
        traces, source = _traces(config, skeleton, layouts, may_trace=may_trace)
    except ConfigError:
        raise
    except HybridRLError as error:
        return HandoffPlan(words, {}, missing=f"{type(error).__name__}: {error}")
    if not traces:
        return HandoffPlan(words, {}, missing=source)
    size = rollout.ranks_per_engine
    held = torch.float32 if num_ranks > 1 else dtype  # several ranks hold fp32 shards, which are the masters
    specs = [replace(spec, dtype=held) for spec in traces[0].sources]
    layout = fsdp_layout(specs, num_ranks, replicas=config.fsdp.dp_replicate, hosts=hosts)
    reports = {}
    for rank in sorted({0, size - 1, num_ranks - size, num_ranks - 1}):
        trace = _in_dtype(traces[rank % size], dtype)
        reports[rank] = report_of(make_plan(trace, layout, rank), trace, layout)
    rank = max(reports, key=lambda number: reports[number].total.read_bytes - reports[number].local.read_bytes)
    report = reports[rank]
    words += f"; through files in {rollout.handoff.weights_path}" if rollout.handoff.transport == "disk" else ""
    words += "; its shards are in host memory" if config.memory.keeps_on_host("shards") and on_host else ""
    return HandoffPlan(
        words,
        {"local": report.local, "host": report.host, "remote": report.remote},
        minimum=report.minimum,
        staging_bytes=report.staging_bytes if report.remote.read_bytes else 0,
        gathered_bytes=_received(gathered(layout, rank)),
        source=source,
        is_on_gpus=not on_host,
    )


def adapter_handoff(config: TrainerConfig, module: PreTrainedModel, *, ranks_per_host: int) -> HandoffPlan:
    """Plan a handoff of adapters alone, which every rank gathers and puts into vLLM's slot. module: with adapters."""
    assert config.num_ranks != "auto"
    dtype = DTYPES[config.model.dtype]
    hosts = [f"host{rank // ranks_per_host}" for rank in range(config.num_ranks)]
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    specs = [TensorSpec(name, tuple(p.shape), dtype) for name, p in trained]
    links = gathered(fsdp_layout(specs, config.num_ranks, replicas=config.fsdp.dp_replicate, hosts=hosts), 0)
    return HandoffPlan(
        f"{config.rollout.engine} gets the adapters alone, into its own LoRA slot; the base is not sent again",
        links,
        minimum=sum(links.values(), Traffic()),
        source="counted from the shapes of the adapters",
        is_on_gpus=config.model.device != "cpu",
    )


def _embedded(skeleton: PreTrainedModel, dtype: torch.dtype, hosts: Sequence[str], replicas: int) -> HandoffPlan:
    """Return the plan of an engine that decodes from the trainer's modules: several ranks gather the full weights."""
    if len(hosts) == 1:
        return HandoffPlan("the engine generates with the trainer's own tensors: nothing is moved", {})
    specs = [TensorSpec(name, tuple(t.shape), dtype) for name, t in skeleton.named_parameters()]
    layout: SourceLayout = fsdp_layout(specs, len(hosts), replicas=replicas, hosts=hosts)
    links = gathered(layout, 0)
    return HandoffPlan(
        "every rank gathers a full copy of the weights to generate with, and drops it before the update",
        links,
        minimum=sum(links.values(), Traffic()),
        source="counted from the shapes of the model",
    )


def _rounded(skeleton: PreTrainedModel, hosts: Sequence[str], replicas: int) -> HandoffPlan:
    """Return the plan of an engine that rounds weights: each rank its rows, whose integers all gather, and the rest."""
    names = {place.name for place in rounded_places(skeleton)}
    kinds = {True: torch.int8, False: torch.float32}
    specs = [TensorSpec(name, tuple(t.shape), kinds[name in names]) for name, t in skeleton.named_parameters()]
    words = "the engine decodes from the trainer's weights rounded to 8 bits, which are written at every handoff"
    if len(hosts) == 1:
        return HandoffPlan(words, {})
    links = gathered(fsdp_layout(specs, len(hosts), replicas=replicas, hosts=hosts), 0)
    source = "counted from the shapes of the model, without scales"
    return HandoffPlan(f"{words}: every rank rounds its rows", links, sum(links.values(), Traffic()), source=source)


def _received(links: Mapping[str, Traffic]) -> int:
    return sum(part.read_bytes for name, part in links.items() if name != "local")


def _in_dtype(trace: Trace, dtype: torch.dtype) -> Trace:
    """Return a trace of an engine in bfloat16 as that of one in another dtype."""
    specs = (replace(d, dtype=dtype) if d.dtype == torch.bfloat16 else d for d in trace.destinations)
    return replace(trace, destinations=tuple(specs))


def _traces(
    config: TrainerConfig, skeleton: PreTrainedModel, layouts: Path | None, *, may_trace: bool
) -> tuple[dict[int, Trace], str]:
    """Return the traces of an engine's first and last rank, by rank, and their source; none and the reason if there
    are none."""
    size = config.rollout.ranks_per_engine
    wanted = sorted({0, size - 1})
    reason = "no folder of layouts was given"
    if layouts is not None:
        paths = _files(layouts, skeleton, size)
        if paths.keys() >= set(wanted):
            names = " and ".join(paths[rank].name for rank in wanted)
            return {rank: load_trace(paths[rank]) for rank in wanted}, f"traces of vLLM's loader in {names}"
        reason = f"{layouts} has no trace of this model with tensor_parallel_size={size}"
    if not may_trace:
        return {}, f"{reason} (layouts=, such as benchmarks/layouts); metrics of a step have handoff/*_bytes"
    if config.rollout.engine != "vllm" or importlib.util.find_spec("vllm") is None:
        help_ = "give --layouts benchmarks/layouts" if layouts is None else "benchmarks/make_layouts.py makes them"
        return {}, f"{reason}, and vLLM is not installed to trace its loader here; {help_}"
    # Imported here: it takes longer than everything else in a plan.
    import hybrid_rl.vllm.library  # noqa: F401
    from hybrid_rl.vllm.meta import trace_on_meta, views_on_meta

    settings: Any = skeleton.config
    views = views_on_meta(settings)
    architecture = (settings.architectures or [type(skeleton).__name__])[0]
    arguments = (settings, architecture, views)
    return {rank: trace_on_meta(*arguments, rank, size, torch.bfloat16) for rank in wanted}, "traced here, with vLLM"


def trace_files(folder: Path) -> list[tuple[re.Match[str], Path]]:
    """Return the traces in a folder, each with its name's parts. Raises ConfigError if there are none."""
    named = [(match, path) for path in sorted(folder.glob("*.npz")) if (match := TRACE_NAME.fullmatch(path.name))]
    if not named:
        missing = "has no traces (MODEL-tpN-rankN.npz)" if folder.is_dir() else "is no folder"
        raise ConfigError(f"layouts={str(folder)!r} {missing}; give the folder benchmarks/layouts, or leave it out")
    return named


def _files(folder: Path, skeleton: PreTrainedModel, size: int) -> dict[int, Path]:
    """Find the traces of a model by rank: those whose sources are the model's weights, whatever the files are called.

    Raises ConfigError if the folder has no traces at all.
    """
    weights = {name: tuple(tensor.shape) for name, tensor in named_weights(skeleton).items()}
    parameters = {name for name, _ in skeleton.named_parameters()}
    fitting: dict[str, bool] = {}
    paths = {}
    for match, path in trace_files(folder):
        if int(match["size"]) != size:
            continue
        if match["model"] not in fitting:
            sources = read_sources(path)
            fitting[match["model"]] = parameters <= sources.keys() and sources.items() <= weights.items()
        if fitting[match["model"]]:
            paths[int(match["rank"])] = path
    return paths
