"""The experts that vLLM chose for every token of a sample, as its routers gave them.

On GPUs vLLM returns them itself (`enable_return_routed_experts`). On CPUs it cannot: 0.32 does so in a model runner
that needs Triton, 0.25.1 returns zeros. There its routers are read in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.engines.base import Generation
from hybrid_rl.errors import ConfigError, EngineStateError, ModelError
from hybrid_rl.models.experts.expert_choices import NO_EXPERT
from hybrid_rl.models.experts.routing import find_routers
from hybrid_rl.vllm.quantization import PlainExpertsMethod
from hybrid_rl.vllm.versions import has

IN_PLACE = "or set rollout.engine=inplace"
RETURNS: dict[str, Any] = {"enable_return_routed_experts": True}  # the argument of vLLM


class ExpertRecord(ABC):
    """The experts of all tokens that an engine has computed and that a request may still ask for.

    num_layers: layers of experts of the trainer's model, which must be as many as vLLM has. Raises ModelError for
    layers that cannot be recorded. shape: (layers, experts per token).
    """

    def __init__(self, llm: LLMEngine, num_layers: int) -> None:
        self._llm = llm
        core: Any = llm.engine_core.engine_core
        self._scheduler, self._runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
        layers = [layer for layer in self._runner.get_model().modules() if isinstance(layer, MoERunner)]
        self._layers = sorted(layers, key=lambda layer: layer.layer_id)
        if len(self._layers) != num_layers:
            raise ModelError(
                f"the model has {num_layers} layers of experts, but vLLM's code for it has {len(self._layers)}, so "
                f"their choices cannot be matched; set routing_replay=scoring, {IN_PLACE}"
            )
        counts = {layer.moe_config.experts_per_token for layer in self._layers}
        if len(counts) > 1:
            raise ModelError(
                f"layers of this model choose different numbers of experts per token ({sorted(counts)}); set "
                "routing_replay=scoring"
            )
        self.shape = (len(self._layers), counts.pop())
        self._names: dict[int, str] = {}  # vLLM's own, of the requests that it was given

    def admit(self, request_id: int, name: str) -> None:
        """Remember vLLM's own name of a request that it was given."""
        self._names[request_id] = name

    @abstractmethod
    def end_step(self, outputs: Sequence[Any]) -> None:
        """Keep what the last step of vLLM computed. outputs: those of the step."""

    @abstractmethod
    def _rows(self, request_id: int, name: str, num_tokens: int) -> np.ndarray:
        """Return the experts of the first tokens of a request, at most num_tokens: those that have a record. name:
        vLLM's own of the request."""

    def take(self, generation: Generation, *, is_whole: bool) -> np.ndarray:
        """Return the experts of a request that ends, int16 [prompt and completion tokens, layers, experts per token];
        NO_EXPERT = no record. The last token has none: no pass has computed it. A request that vLLM was never given,
        or that it has just preempted, has none at all.

        is_whole: the request was not broken off, so all other tokens must have a record, else EngineStateError is
        raised. To be called before vLLM hears that the request was broken off, and before its next step.
        """
        name, request_id = self._names.pop(generation.request.id, None), generation.request.id
        num_tokens = len(generation.request.prompt_ids) + len(generation.tokens)
        experts = np.full((num_tokens, *self.shape), NO_EXPERT, np.int16)
        rows = experts[:0] if name is None else self._rows(request_id, name, num_tokens - 1)
        if is_whole and len(rows) != num_tokens - 1:
            raise EngineStateError(
                f"request {request_id} has {num_tokens} tokens, and vLLM gave the experts of {len(rows)} of the "
                f"{num_tokens - 1} that it computed"
            )
        experts[: len(rows)] = rows
        return experts


class ReadExperts(ExpertRecord):
    """The routers of a vLLM without CUDA graphs, read in this process.

    A token's experts are kept at its place in the KV cache, so they are found again wherever its keys are: by requests
    that share a prefix, after chunks, and, computed once more, after a preemption. The table takes 2 bytes per slot,
    layer and expert of a token, in host memory.
    """

    def __init__(self, llm: LLMEngine, num_layers: int) -> None:
        super().__init__(llm, num_layers)
        groups = self._runner.kv_cache_config.kv_cache_groups
        # Of windows vLLM frees what has slid out.
        full = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        if not full:
            raise ModelError(
                "no layer of this model attends to all tokens, so vLLM does not keep the places at which their experts "
                f"are recorded; set routing_replay=scoring, {IN_PLACE}"
            )
        self._group, group = full[0], groups[full[0]]
        self._layer_name, self._block_size = group.layer_names[0], group.kv_cache_spec.block_size
        num_slots = self._runner.kv_cache_config.num_blocks * self._block_size
        # Pages are touched when they are first written; nothing is read before.
        self._table = torch.from_numpy(np.zeros((num_slots, *self.shape), dtype=np.int16))
        self._slots: Tensor | None = None  # [tokens of the pass]
        self._chosen: dict[int, Tensor] = {}  # by layer, [tokens of the pass, experts per token]
        for number, layer in enumerate(self._layers):
            method: Any = layer.routed_experts.quant_method
            chooser = method if isinstance(method, PlainExpertsMethod) and method.is_monolithic else layer.router
            if not isinstance(chooser, (BaseRouter, PlainExpertsMethod)) or (
                method.is_monolithic and chooser is not method
            ):
                raise ModelError(
                    f"vLLM's experts of {layer.layer_name} ({type(method).__name__}) choose inside of their kernel, "
                    f"so that their choice cannot be read; set routing_replay=scoring, {IN_PLACE}"
                )
            chooser.capture_fn = partial(self._keep, number)

    def _keep(self, layer: int, ids: Tensor) -> None:
        slots = get_forward_context().slot_mapping
        if not slots:  # a pass without requests
            return
        if layer in self._chosen:
            raise EngineStateError(
                f"layer {layer} of experts chose twice in a step, which can be recorded once only; set "
                f"routing_replay=scoring, {IN_PLACE}"
            )
        self._slots, self._chosen[layer] = slots[self._layer_name], ids

    def end_step(self, outputs: Sequence[Any]) -> None:
        """Write the choices of the last pass into the table. Raises EngineStateError if a router was not seen."""
        chosen, self._chosen = self._chosen, {}
        if not chosen and not outputs:
            return
        if len(chosen) != len(self._layers):
            missing = sorted({*range(len(self._layers))} - chosen.keys())
            raise EngineStateError(
                f"vLLM made a step in which the layers of experts {missing} were not seen to choose; set "
                f"routing_replay=scoring, {IN_PLACE}"
            )
        ids = torch.stack([chosen[number] for number in range(len(chosen))], 1)
        assert self._slots is not None
        if len(self._slots) != len(ids):
            raise EngineStateError(
                f"vLLM chose experts for {len(ids)} tokens of a pass of {len(self._slots)}; set "
                f"routing_replay=scoring, {IN_PLACE}"
            )
        is_real = self._slots >= 0  # not padding
        self._table[self._slots[is_real]] = ids[is_real].short()

    def _rows(self, request_id: int, name: str, num_tokens: int) -> np.ndarray:
        request = self._scheduler.requests.get(name)  # None: it has ended; preempted: nothing is computed
        if request is not None:
            num_tokens = min(num_tokens, request.num_computed_tokens)
        if not num_tokens:
            return np.empty((0, *self.shape), np.int16)
        # The scheduler has freed the blocks of a request that has ended; the runner hears of it with the next step.
        blocks = torch.tensor(self._runner.requests[name].block_ids[self._group])
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        return self._table[slots[:num_tokens]].numpy()


class ReturnedExperts(ExpertRecord):
    """What vLLM's option `enable_return_routed_experts` returns: rows of all layers, those without experts too, with
    the request's last output; before that, in pieces. Written from vLLM's sources; no GPU has run it."""

    def __init__(self, llm: LLMEngine, num_layers: int) -> None:
        super().__init__(llm, num_layers)
        for layer in self._layers:
            if layer.is_monolithic and not has("monolithic_experts_return", FusedMoEExpertsMonolithic):
                raise ModelError(
                    f"vLLM's experts of {layer.layer_name} choose inside of their kernel, and this version returns "
                    "zeros for them; set rollout.engine_args.moe_backend=triton, or routing_replay=scoring"
                )
        self._numbers = [layer.layer_id for layer in self._layers]
        self._last: dict[str, np.ndarray | None] = {}  # of requests that vLLM ended in the last step

    def end_step(self, outputs: Sequence[Any]) -> None:
        """Keep what came with the last outputs of requests."""
        self._last = {output.request_id: output.outputs[0].routed_experts for output in outputs if output.finished}

    def _rows(self, request_id: int, name: str, num_tokens: int) -> np.ndarray:
        state = self._llm.output_processor.request_states.get(name)  # None: vLLM has ended it
        pieces = [self._last.get(str(request_id))] if state is None else state.routed_experts_chunks
        rows = [piece[:, self._numbers].astype(np.int16) for piece in pieces if piece is not None]
        return np.concatenate([np.empty((0, *self.shape), np.int16), *rows])[:num_tokens]


class PlannedRecord:
    """What will record the experts of the samples of an engine that is not built yet: of the trainer's model, on a
    device. Raises ConfigError or ModelError if nothing can.

    arguments: that vLLM is to be built with.
    """

    def __init__(self, config: VLLMRolloutConfig, device: torch.device, module: PreTrainedModel) -> None:
        args = config.engine_args
        self._num_layers = len(find_routers(module))
        if not self._num_layers:
            raise ModelError("the model has no experts whose choice could be recorded; leave routing_replay out")
        if device.type == "cpu" and args.enforce_eager is False:
            raise ConfigError(
                "rollout.engine_args.enforce_eager=false: on CPUs the experts of samples are read from vLLM's routers "
                "as they run, and those of a compiled model do not; leave it out, or set routing_replay=scoring"
            )
        if device.type != "cpu" and not args.enable_prefix_caching:
            raise ConfigError(
                "rollout.engine_args.enable_prefix_caching=false: vLLM returns the experts of samples by the blocks of "
                "its prefix cache; leave it out, or set routing_replay=scoring"
            )
        self._kind: type[ExpertRecord] = ReadExperts if device.type == "cpu" else ReturnedExperts
        self.arguments = RETURNS if self._kind is ReturnedExperts else {}

    def building(self) -> AbstractContextManager[None]:
        """Return what the engine is to be built in."""
        return returned_on_every_rank() if self.arguments else nullcontext()

    def of(self, llm: LLMEngine) -> ExpertRecord:
        """Make the record of the engine."""
        return self._kind(llm, self._num_layers)


@contextmanager
def returned_on_every_rank() -> Iterator[None]:
    """Have an engine that is built inside the block return experts on every rank of a replica. vLLM 0.32 keeps them on
    the first one, whose scheduler is the only one in a run of its own; here each rank has a scheduler, which ends with
    an assertion where there are none."""
    if not has("first_rank_keeps_experts", None):
        yield
        return
    worker: Any = import_module("vllm.distributed.aux_output_connector.worker")
    theirs = worker.get_tp_group
    worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    try:
        yield
    finally:
        worker.get_tp_group = theirs
