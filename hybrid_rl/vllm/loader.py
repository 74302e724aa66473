"""vLLM's model, built without weights: instead of reading a checkpoint, the loader learns where each weight belongs.

Registered as load_format LOAD_FORMAT. The engine puts a `Loading` into vLLM's `model_loader_extra_config` and finds the
result in it: vLLM builds its loader from the config and gives nothing back but the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from hybrid_rl.compat.torch import plain_attributes, storage_id
from hybrid_rl.engines.colocated import TracedWeights
from hybrid_rl.errors import ConfigError, HandoffError, HybridRLError, ModelError
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.resharding.tracer import UNWRITTEN, trace_loader
from hybrid_rl.weights.views import CheckpointViews

LOAD_FORMAT = "hybrid_rl"
LOADING = "loading"  # the key in model_loader_extra_config


class _Place:
    """The place of a tensor, without keeping its memory: what post-processing replaces has to be freed, and its address
    must not be taken for the same place when it is used again."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._view = _view(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor is at this place."""
        return self._storage.cdata == storage_id(tensor) and self._view == _view(tensor)


@dataclass(frozen=True)
class Derived:
    """What vLLM's own reload has to load, because post-processing rearranged it or made copies of it.

    reasons: by name of the destination; whole layers, since vLLM reloads by layer. names: of the checkpoint, that a
    reload takes. layers: module names to reload. copies: names of modules that hold copies of others' parameters (a
    packed head that is tied to the embeddings).
    """

    reasons: dict[str, str]
    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedWeights(TracedWeights):
    """An engine's model and where its weights come from.

    trace: with what is derived as untraced; a handoff writes the destinations that are traced, and no others.
    whole_trace: with what is derived too, as it was before post-processing.
    constants: tensors that layers made for themselves, besides parameters and buffers (slopes of attention biases,
    say): nothing writes them again.
    """

    model: nn.Module
    derived: Derived
    whole_trace: Trace
    constants: list[Tensor] = field(default_factory=list)

    def check_places(self) -> None:
        """Raise HandoffError if vLLM has moved or replaced a tensor since it was traced: what a handoff wrote there
        would not be what vLLM computes with."""
        live = _engine_tensors(self.model)
        for spec, tensor in zip(self.trace.destinations, self.destinations, strict=True):
            if spec.name not in self.trace.untraced and (
                spec.name not in live or not _Place(tensor).is_of(live[spec.name])
            ):
                raise HandoffError(f"vLLM replaced {spec.name} after it was traced; start the engine again")


class Loading:
    """What goes into the loader (views: the trainer's checkpoint) and comes out of it (weights, None before vLLM has
    built the model)."""

    def __init__(self, views: CheckpointViews) -> None:
        self.views = views
        self.weights: LoadedWeights | None = None

    def __deepcopy__(self, memo: Any) -> Loading:
        return self  # vLLM copies its configs; there is one result


@register_model_loader(LOAD_FORMAT)
class TracingLoader(BaseModelLoader):
    """Runs the model's own `load_weights` on meta tensors and records it. Weights are zero until the first handoff."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra_config = load_config.model_loader_extra_config
        if not isinstance(extra_config, dict) or not isinstance(extra_config.get(LOADING), Loading):
            raise HandoffError(
                f"load_format={LOAD_FORMAT!r} needs model_loader_extra_config={{{LOADING!r}: Loading(...)}}"
            )
        self._loading: Loading = extra_config[LOADING]
        self._trace: Trace | None = None
        self._before: dict[str, _Place] = {}
        self._attributes: dict[nn.Module, dict[str, Any]] = {}
        self._constants: list[Tensor] = []

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Build the model, trace its loading, let vLLM post-process it, and see what that changed."""
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        assert self._trace is not None
        self._loading.weights = self._compared(model, self._trace)
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Trace, then set constants; everything else is zero, so that warm-up passes meet no NaN."""
        self._trace = trace_model(
            model, self._loading.views, with_tied=getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
        )
        live = _engine_tensors(model)
        destinations = [live[spec.name] for spec in self._trace.destinations]
        self._before = {spec.name: _Place(live[spec.name]) for spec in self._trace.destinations}
        for tensor in destinations:
            tensor.zero_()
        self._trace.fill(destinations)
        self._attributes = {module: plain_attributes(module) for module in model.modules()}
        self._constants = _constants(model)

    def _compared(self, model: nn.Module, trace: Trace) -> LoadedWeights:
        """Return the weights; what post-processing replaced or copied, with the other tensors of its layers, is
        derived."""
        after = _engine_tensors(model)
        reasons = dict(trace.untraced)
        for spec in trace.destinations:
            if spec.name not in after or not self._before[spec.name].is_of(after[spec.name]):
                reasons[spec.name] = "vLLM's post-processing replaced it"
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        above: set[str] = set()
        copies: list[str] = []
        for name, module in model.named_modules():
            made = self._made(module)
            # What was made may hold a copy of any parameter below, a tied one under its first name.
            below = [names[id(parameter)] for parameter in module.parameters()] if made else []
            for parameter_name in below:
                reasons.setdefault(parameter_name, f"vLLM's post-processing made {name}.{made}")
            if below and not any(_layer(parameter_name) == name for parameter_name in below):
                (copies.append if any(True for _ in module.parameters(recurse=False)) else above.add)(name)
        after_constants = {id(tensor) for tensor in _constants(model)}
        layers = {_layer(name): reason for name, reason in reasons.items()}
        check_reloadable(model, layers)
        derived = {
            spec.name: reasons.get(spec.name, f"of a layer with {layers[_layer(spec.name)]}")
            for spec in trace.destinations
            if _layer(spec.name) in layers
        }
        return LoadedWeights(
            trace.without({name: reason for name, reason in derived.items() if name not in trace.untraced}),
            [after.get(spec.name, torch.empty(0)) for spec in trace.destinations],
            model,
            Derived(
                derived,
                _checkpoint_names(self._loading.views, trace, derived),
                tuple(sorted(layers.keys() | above)),
                tuple(copies),
            ),
            trace,
            [tensor for tensor in self._constants if id(tensor) in after_constants],
        )

    def _made(self, module: nn.Module) -> str | None:
        """Return the name of an attribute that post-processing gave to a module, through which old weights could be
        computed with."""
        before = self._attributes.get(module, {})
        for name, value in plain_attributes(module).items():
            if (isinstance(value, Tensor) or callable(value)) and before.get(name) is not value:
                return name
        return None


def trace_model(model: Any, views: CheckpointViews, *, with_tied: bool = False) -> Trace:
    """Return the trace of a vLLM model, live or on meta, whose weights are as they are before post-processing.

    with_tied: offer tied tensors under all of their names. Raises HandoffError if vLLM has a parameter for which the
    trainer has no weight, ConfigError if it makes one only as it loads (a bias of the head, in models that it runs
    through transformers): there is nothing yet that a handoff could write.
    """
    offered = views.views + (views.tied if with_tied else [])
    buffers = {name for name, _ in model.named_buffers()}
    live = _engine_tensors(model)
    with _casts_expected():
        try:
            trace = trace_loader(model.load_weights, offered, views.tensors, live, optional=buffers)
        except (HybridRLError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise ModelError(
                f"vLLM's {type(model).__name__} cannot load weights of this shape: {error}; its code for the "
                "architecture expects another config.json; set rollout.engine=inplace (or hf)"
            ) from error
    made = sorted(_engine_tensors(model).keys() - live.keys())
    if made:
        raise ConfigError(
            f"vLLM's {type(model).__name__} creates {made[0]} every time it loads weights, so that no handoff can "
            f"write it; set rollout.engine=inplace"
        )
    unwritten = [name for name, reason in trace.untraced.items() if reason == UNWRITTEN]
    if unwritten:
        lost = "".join(f"; {name}: {reason}" for name, reason in list(views.without_view.items())[:1])
        raise HandoffError(
            f"vLLM's {type(model).__name__} has {len(unwritten)} parameters for which the trainer has no weight, e.g. "
            f"{unwritten[0]}; do both sides have one config?{lost}"
        )
    return trace


@contextmanager
def _casts_expected() -> Iterator[None]:
    """vLLM warns for each weight of another dtype than the engine's. A trainer's are, and the handoff casts them."""

    def is_of_interest(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Attempted to load weight %s with dtype")

    theirs = logging.getLogger("vllm.model_executor.models.utils")
    theirs.addFilter(is_of_interest)
    try:
        yield
    finally:
        theirs.removeFilter(is_of_interest)


def _engine_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a shared one once, without gradient history; they are vLLM's own memory."""
    named: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


def _constants(model: nn.Module) -> list[Tensor]:
    """Tensors with memory that modules, and the objects that modules hold, have as plain attributes, and that are not
    part of a parameter or buffer."""
    known = {storage_id(tensor) for tensor in _engine_tensors(model).values()}
    constants: dict[int, Tensor] = {}
    for module in model.modules():
        held = list(plain_attributes(module).values())
        inside = [
            value for held_object in held if hasattr(held_object, "__dict__") for value in vars(held_object).values()
        ]
        for value in (*held, *inside):
            if not isinstance(value, Tensor) or value.is_meta or not value.numel():
                continue
            if storage_id(value) not in known:
                constants[id(value)] = value
    return list(constants.values())


def check_reloadable(model: nn.Module, layers: Iterable[str]) -> None:
    """Raise HandoffError for layers that vLLM's reload is known to leave unpacked: its experts on CPUs pack once."""
    packed = [name for name in layers if isinstance(model.get_submodule(name), RoutedExperts)]
    if packed and current_platform.is_cpu():
        raise HandoffError(
            f"vLLM packs experts such as {packed[0]} when it starts, and its reload does not pack them again; set "
            f"rollout.engine_args.plain_weights=true, or rollout.engine=inplace"
        )


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _checkpoint_names(views: CheckpointViews, trace: Trace, derived: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a reload of the derived tensors takes: all of the weights that flow into one, and all that flow
    nowhere."""
    if not derived:
        return ()
    rows = [trace.destinations[int(i)].name in derived for i in trace.copies.destination]
    needed = {trace.sources[int(i)].name for i in trace.copies.source[rows]} | set(trace.unused)
    names = {storage_id(tensor): name for name, tensor in views.tensors.items()}
    return tuple(name for name, view in views.views if names[storage_id(view)] in needed)
