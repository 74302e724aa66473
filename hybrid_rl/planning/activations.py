"""Activations, counted: the real forward and backward pass of a micro-batch, on a model without memory."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.algos import Needs
from hybrid_rl.batch import Jagged
from hybrid_rl.compat.transformers import unpacked_masks
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.engines.inplace.kv_cache import LayerShape, ShapeRecorder
from hybrid_rl.errors import HybridRLError, ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.activation_offload import NUM_AHEAD
from hybrid_rl.models.attention.backends import AttentionNeeds, Backend, expected_backend
from hybrid_rl.models.attention.unpacked import NAME as UNPACKED
from hybrid_rl.models.fused import FusedLayers
from hybrid_rl.models.heads.logprobs import chunked_logprobs
from hybrid_rl.models.lora.folder import settings_of
from hybrid_rl.models.lora.inject import inject
from hybrid_rl.models.packed.cache import CacheSize
from hybrid_rl.models.packed.load_balance import LoadBalance
from hybrid_rl.models.packed.repeated_layers import transformer_blocks
from hybrid_rl.models.packed.router import Routers
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.planning.fullest_rows import Samples, learning_batch
from hybrid_rl.planning.models import built
from hybrid_rl.planning.sharded import ShardedPass
from hybrid_rl.planning.stand_ins import (
    FlashKernel,
    FusedHead,
    Kernels,
    OffloadedActivations,
    allocate_compiled,
    autocast_on_meta,
)
from hybrid_rl.planning.storages import Held, LiveStorages, Peaks
from hybrid_rl.resharding.handoff.base import PROBE_TOKENS, num_probe_passes
from hybrid_rl.training.critic import micro_batch_value_loss
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.mini_batch import prepared_column
from hybrid_rl.training.sharding.fsdp import ShardOptions
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels
from hybrid_rl.weights.sources import StateSource

FEW_LAYERS = 4  # of a model in whose place one with more equal layers is counted; another has one more


@dataclass(frozen=True)
class PassMemory:
    """The fullest moments of the parts of a pass; host_bytes: activations that wait in host memory."""

    peaks: Mapping[str, Peaks]
    host_bytes: int = 0

    @property
    def fullest(self) -> Held:
        """The moment of most bytes together."""
        return max((part.fullest for part in self.peaks.values()), key=lambda held: held.total, default=Held())

    @property
    def most_others(self) -> Held:
        """The moment of most bytes without gradients and gathered weights."""
        return max((part.most_others for part in self.peaks.values()), key=lambda held: held.others, default=Held())

    def extended(self, longer: PassMemory, num_layers: int) -> PassMemory:
        """Return the same of a model with so many more layers. longer: of one with one more. Each part of a pass grows
        by the same bytes with every layer; which part is the fullest may change."""
        peaks = {
            name: Peaks(
                part.fullest.extended(longer.peaks[name].fullest, num_layers),
                part.most_others.extended(longer.peaks[name].most_others, num_layers),
            )
            for name, part in self.peaks.items()
            if name in longer.peaks
        }
        return PassMemory(peaks, self.host_bytes + num_layers * (longer.host_bytes - self.host_bytes))


Arguments = ParamSpec("Arguments")


def _by_layers(
    count: Callable[Concatenate[Counted, Arguments], PassMemory],
) -> Callable[Concatenate[Counted, Arguments], PassMemory]:
    """Let a method count a pass of a model with many equal layers on two with few; a reference has all of them."""

    @functools.wraps(count)
    def counted(self: Counted, *args: Arguments.args, **named: Arguments.kwargs) -> PassMemory:
        blocks = [] if any(isinstance(value, CausalLM) for value in args) else _equal_blocks(self.module)
        # Of what is offloaded, so many tensors are back at a time however many layers there are.
        num_few = FEW_LAYERS + (NUM_AHEAD if self.offloads else 0)
        if len(blocks) <= num_few + 1:
            return count(self, *args, **named)
        few, more = (count(replace(self, module=_shortened(self.module, num_few + n)), *args, **named) for n in (0, 1))
        return few.extended(more, len(blocks) - num_few)

    return counted


@dataclass(frozen=True)
class Counted:
    """A model on the meta device that is to be counted. device_type: of the ranks, "cuda" or "cpu"; config: of the run,
    whose keys decide how the model runs; sharding: over the ranks, None on a single one; is_base: whether a module with
    adapters runs without them."""

    module: PreTrainedModel
    config: TrainerConfig
    device_type: str
    is_packed: bool = True
    checkpoints: bool = False
    offloads: bool = False
    sharding: ShardOptions | None = None
    is_base: bool = False

    def model(self) -> CountedModel:
        """Wrap the module. Its parameters are shared with all others that were made of it."""
        return CountedModel(self)

    @_by_layers
    def update(self, samples: Samples, reference: CausalLM | None = None, *, is_first: bool) -> PassMemory:
        """Count the policy's forward and backward pass. reference: for a loss that reads its distribution. is_first:
        whether gradients of the mini-batch do not exist yet."""
        model, spec = self.model(), LossSpec.of(self.config)
        batch = learning_batch(samples, self.config, spec)
        prepared = prepared_column(batch, [[list(range(batch.num_samples))]], spec, RankContext(), seed=0)
        if prepared is not None:
            batch = batch.with_columns(prepared=prepared)
        with self._named(), Kernels(self.device_type):  # both run the model once
            routers = Routers(model) if spec.reads_routers else None
            balance = LoadBalance.of(model, self.config.algorithm.router_aux_loss_coef)
        beside = SideModels(reference, routers, balance)

        def run() -> None:
            loss, *_ = micro_batch_loss(model, batch, spec, MiniBatch.of(batch, spec), beside)
            loss.backward()  # type: ignore[no-untyped-call]

        return self._count(model, run, is_first=is_first)

    @_by_layers
    def update_values(self, samples: Samples, clip: float | None, *, is_first: bool) -> PassMemory:
        """Count the critic's forward and backward pass. Arguments as in `update`."""
        model = self.model()
        batch = learning_batch(samples, self.config, LossSpec.of(self.config))
        mask = batch["completion_mask"].values

        def run() -> None:
            loss, _ = micro_batch_value_loss(model, batch, mask, clip, len(mask))
            loss.backward()  # type: ignore[no-untyped-call]

        return self._count(model, run, is_first=is_first)

    @_by_layers
    def score(self, samples: Samples) -> PassMemory:
        """Count a forward pass without gradients: logprobs, or values if the model has one number per token."""
        model, spec = self.model(), LossSpec.of(self.config)
        scorer, columns = model.without_adapters() if self.is_base else model, samples.columns
        wants_all = bool(spec.num_top) or Needs.SUM_PI_SQUARED in self.config.advantage.needs

        def run() -> None:
            row = model.row_of(columns["prompt_ids"], columns["completion_ids"])
            with torch.no_grad():
                if not model.is_language_model:
                    model.row_values(row)
                elif wants_all:
                    scorer.row_distribution(row, self.config.rollout.temperature)
                else:
                    scorer.row_logprobs(row, self.config.rollout.temperature)

        return self._count(model, run, is_first=True)

    @_by_layers
    def generate(self, num_tokens: int, num_sequences: int, *, bytes_beside: int) -> PassMemory:
        """Count a pass of an engine over so many tokens, with logits of so many sequences. bytes_beside: what it holds
        beside each of them while it samples; kernels that draw from logits need none."""
        model = self.model()

        def run() -> None:
            with torch.no_grad():
                tokens = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
                if self.is_packed:
                    hidden = model.hidden_states(tokens, tokens, Values())
                else:
                    hidden = model.own_forward(tokens[None], use_cache=False).last_hidden_state[0]
                logits = model.logits(hidden[:num_sequences])
                held = torch.empty(*logits.shape, bytes_beside, dtype=torch.uint8, device=logits.device)
                del held

        return self._count(model, run, is_first=True)

    @_by_layers
    def probe(self, num_tokens: int, *, is_rounded: bool = False) -> PassMemory:
        """Count the trainer's half of the probe of a handoff, on a prompt of so many tokens. is_rounded: of an engine
        that rounds its weights, or keys and values."""
        model = self.model()
        prompt = Jagged.from_rows([[0] * num_tokens], torch.int64)
        num_passes = num_probe_passes(model.dtype, is_rounded=is_rounded)

        def run() -> None:
            # What is kept of it lies on the host.
            width = model.head.out_features if self.device_type == "cpu" else 0
            kept = torch.empty(num_passes, PROBE_TOKENS, width, device=model.device)
            with torch.no_grad():
                for labels in ([[0]], *[[[0] * PROBE_TOKENS]] * (num_passes - 1)):
                    row = model.row_of(prompt, Jagged.from_rows(labels, torch.int64))
                    model.row_distribution(row, 1.0)
            del kept

        return self._count(model, run, is_first=True)

    def layer_shapes(self, kv_cache_dtype: str = "auto") -> dict[int, LayerShape]:
        """Return what each layer caches of a token. kv_cache_dtype: as in the section `rollout`."""
        model, recorder = self.model(), ShapeRecorder(kv_cache_dtype)
        zero = torch.zeros(1, dtype=torch.int64, device="meta")
        with torch.no_grad(), self._named(), Kernels(self.device_type):
            model.hidden_states(zero, zero, recorder)
        if not recorder.layers:
            raise ModelError(
                f"{type(self.module).__name__} has no layer of attention that can read packed samples, and so no pages "
                "of a cache; choose rollout.engine=hf"
            )
        return recorder.layers

    def cache_size(self) -> CacheSize:
        """Return the bytes of a sequence in the model's own cache."""
        with self._named(), Kernels(self.device_type):
            return CacheSize.of(self.model())

    def _count(self, model: CountedModel, run: Callable[[], None], *, is_first: bool) -> PassMemory:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        live = LiveStorages(self.module, _blocks(self.module))
        try:
            with self._named(), torch.enable_grad(), Kernels(self.device_type), live:
                if self.sharding is not None:
                    with ShardedPass(self.module, self.sharding, live, is_first=is_first).running():
                        run()
                    return PassMemory(live.peaks, model.host_bytes)
                for parameter in [] if is_first else trained:
                    parameter.grad = torch.empty_like(parameter)
                    live.count_gradient(parameter)
                run()
        finally:
            for parameter in trained:
                parameter.grad = None
        return PassMemory(live.peaks, model.host_bytes)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise ModelError for whatever keeps a model from running without memory."""
        try:
            with autocast_on_meta(), unpacked_masks() if not self.is_packed else nullcontext():
                yield
        except HybridRLError:
            raise
        except Exception as error:  # foreign code: NotImplementedError of meta kernels, RuntimeError and others
            raise CannotCount(
                f"the memory of {type(self.module).__name__} cannot be counted before it is loaded: its code reads "
                f"numbers that exist only then ({type(error).__name__}: {str(error).splitlines()[0][:200]}); a run "
                f"without memory.device_memory needs no plan"
            ) from error


def _blocks(module: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks of a model, none if its class names none."""
    try:
        return transformer_blocks(module)
    except ModelError:
        return []


def _equal_blocks(module: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of a model if they are alike, else none."""
    blocks, settings = _blocks(module), module.config.get_text_config()
    kinds = {
        (type(block), tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()))
        for block in blocks
    }
    if len(kinds) != 1 or len(set(getattr(settings, "layer_types", None) or [None])) != 1:
        return []
    return blocks if getattr(settings, "num_hidden_layers", None) == len(blocks) else []


def _shortened(module: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return the model with fewer layers."""
    recipe = ModelRecipe.of_module(module, StateSource({}))
    config = copy.deepcopy(module.config)
    settings = config.get_text_config()
    settings.num_hidden_layers = num_layers
    if getattr(settings, "layer_types", None):
        settings.layer_types = settings.layer_types[:num_layers]
    dtype = next(module.parameters()).dtype
    shorter_model = built(replace(recipe, config=config), dtype)
    if (adapters := settings_of(module)) is not None:
        with warnings.catch_warnings(action="ignore"):
            inject(shorter_model, adapters)
        nn.Module.to(shorter_model, "meta")
    return shorter_model


class CannotCount(ModelError):
    """A model whose code does not run on the meta device."""


class Values:
    """An attention context that answers with the values."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        """Return values for every head."""
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


class CountedModel(CausalLM):
    """A CausalLM on the meta device that allocates what it would allocate on the planned one."""

    def __init__(self, counted: Counted) -> None:
        config, is_packed = counted.config, counted.is_packed
        super().__init__(
            counted.module, "sdpa" if is_packed else UNPACKED, float32_head=config.model.cast_lm_head_to_fp32
        )
        self._device_type = counted.device_type
        if counted.device_type == "cpu":
            allocate_compiled()
            self._fused = FusedLayers(counted.module if self.dtype == torch.float32 else nn.Module())
        self._offload = OffloadedActivations() if counted.offloads else None
        device = torch.device(counted.device_type)
        if is_packed:
            name = expected_backend(config.model.attention, AttentionNeeds.of(counted.module, device, self.dtype))
            if name != "sdpa":
                kernel: Any = None if name == "compiled" else FlashKernel()
                self.attention = Backend(name, kernel)
        self._has_fused_head = counted.device_type == "cuda" and self.dtype == torch.bfloat16
        if counted.checkpoints:
            self.enable_gradient_checkpointing()
        elif getattr(counted.module, "is_gradient_checkpointing", False):
            counted.module.gradient_checkpointing_disable()

    @property
    def host_bytes(self) -> int:
        """Bytes of activations that wait in host memory."""
        return 0 if self._offload is None else self._offload.host_bytes

    def token_logprobs(self, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Same as CausalLM."""
        if not self._has_fused_head:
            head = self.head
            return chunked_logprobs(
                hidden, head.weight, head.bias, labels, temperature, self._options, device_type=self._device_type
            )
        apply: Any = FusedHead.apply
        logprobs, entropy = apply(hidden, self.head.weight, self.head.bias, self.has_float32_head)
        return logprobs, entropy

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first, again = super()._checkpoint_contexts()
        return first, _with_kernels(again, self._device_type)  # a backward pass leaves function modes

    def _training(self) -> AbstractContextManager[None]:
        return nullcontext() if self._offload is None else self._offload.hooks()


@contextmanager
def _with_kernels(context: AbstractContextManager[None], device_type: str) -> Iterator[None]:
    with context, Kernels(device_type):
        yield
