"""vLLM quantisation configs of ours: one that quantises nothing, and one for each grid of rollout.quantization.

vLLM's CPU platform packs the weights of linear layers and experts after loading; an engine whose weights are replaced
at every step would have to pack them again each time. With these methods they stay tensors that a handoff writes.

Grids have the parameters of vLLM's own layouts and are loaded by its own loaders. On GPUs vLLM's own methods compute
with them. On CPUs its builds have kernels for few of these layouts and few processors; there a weight is dequantised
every time that it is computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from vllm.platforms import current_platform

from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.errors import ConfigError
from hybrid_rl.models.grid_linear import GridLinear
from hybrid_rl.resharding.handoff.quantised import Quantisation
from hybrid_rl.weights.grids import GRIDS, Grid, Part

PLAIN = "hybrid_plain"
GRID_PREFIX = "hybrid_"


def quantization_of(config: VLLMRolloutConfig) -> str | None:
    """Return what vLLM's `quantization` should be: that of a grid, or PLAIN if weights are to stay as they are and the
    platform packs them; None for vLLM's own choice. Raises ConfigError for a grid on other devices."""
    if config.quantization != "none":
        if not (current_platform.is_cpu() or current_platform.is_cuda()):
            raise ConfigError(
                f"rollout.quantization={config.quantization} is for CUDA and CPUs, and this vLLM computes on "
                f"{current_platform.device_type}; leave it out"
            )
        return GRID_PREFIX + config.quantization
    return PLAIN if config.engine_args.plain_weights and current_platform.is_cpu() else None


def weights_on_grid(module: PreTrainedModel, config: VLLMRolloutConfig, dtype: torch.dtype) -> Quantisation | None:
    """Return how the weights of the trainer's module become those of a quantised engine; None of a plain one."""
    if config.quantization == "none":
        return None
    trained_in = dtype if any(isinstance(layer, GridLinear) for layer in module.modules()) else None
    return Quantisation.of(module, config.quantization, dtype, trained_in)


class _Plain:
    """x W^T + b with the weight as it was loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]."""
        return F.linear(x, layer.weight, bias)


@register_weight_loader_v2_supported_method
class PlainLinearMethod(_Plain, UnquantizedLinearMethod):
    """Linear layers."""


class PlainEmbeddingMethod(_Plain, UnquantizedEmbeddingMethod):
    """Embeddings and heads, tied or not."""


class PlainExpertsMethod(UnquantizedFusedMoEMethod):
    """Experts one after the other, from weights as they were loaded; for checks and small models, not for speed.

    capture_fn: as that of vLLM's routers, called with the ids [tokens, k] where these experts choose themselves.
    """

    capture_fn: Callable[[Tensor], None] | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing. Raises ConfigError if the experts are not those that `apply` computes."""
        unlike = [
            feature
            for feature, is_used in (
                (f"activation={layer.activation}", layer.activation != MoEActivation.SILU),
                ("biases", self.moe.has_bias),
                ("expert parallelism", layer.expert_map is not None),
            )
            if is_used
        ]
        if unlike:
            raise ConfigError(
                f"rollout.engine_args.plain_weights has no experts with {' and '.join(unlike)}; set "
                f"rollout.engine_args.plain_weights=false, or rollout.engine=inplace"
            )

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """`apply` with the experts that vLLM itself would choose from router_logits [tokens, experts]; see
        "experts_choose" in versions.py."""
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        topk_weights, topk_ids = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            use_grouped_topk=layer.use_grouped_topk,
            top_k=layer.top_k,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        if self.capture_fn is not None:
            self.capture_fn(topk_ids)
        return self.apply(layer, x, topk_weights, topk_ids)

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *unused: Any, **shared: Any
    ) -> Tensor:
        """x [tokens, hidden], topk_weights and topk_ids [tokens, k] -> [tokens, hidden]."""
        if layer.apply_router_weight_on_input:
            raise ConfigError(
                "rollout.engine_args.plain_weights has no experts whose input is weighted by the router; set "
                "rollout.engine_args.plain_weights=false, or rollout.engine=inplace"
            )
        out = torch.zeros_like(x)
        for expert in topk_ids.unique().tolist():
            token, choice = torch.where(topk_ids == expert)
            gate, up = F.linear(x[token], layer.w13_weight[expert]).chunk(2, -1)
            expert_output = F.linear(F.silu(gate) * up, layer.w2_weight[expert])
            out.index_add_(0, token, (expert_output * topk_weights[token, choice, None]).to(x.dtype))
        return out


@register_quantization_config(PLAIN)
class PlainConfig(QuantizationConfig):
    """Which of the methods a layer gets."""

    def get_name(self) -> Any:
        """Return the name under which it is registered."""
        return PLAIN

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Whatever the platform computes in."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """There is nothing to configure."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainConfig:
        """There is nothing to configure."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the plain method of layers whose weights a platform may pack; None for others, which keep their
        own."""
        if isinstance(layer, LinearBase):
            return PlainLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return PlainEmbeddingMethod()
        if isinstance(layer, RoutedExperts):
            return PlainExpertsMethod(layer.moe_config)
        return None


@register_weight_loader_v2_supported_method
class DequantisedLinearMethod(LinearMethodBase):
    """x W^T + b with a weight that is dequantised to the dtype of x at every call."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the parameters of the grid. Raises ValueError if parts of the layer divide a group or block."""
        if input_size_per_partition % self._grid.multiple:
            raise ValueError(
                f"a layer of {input_size} inputs has {input_size_per_partition} of them on a rank, and the grid takes "
                f"{self._grid.multiple} together"
            )
        if self._grid.block is not None:
            layer.weight_block_size = [*self._grid.block]
            sizes = input_size, output_size, input_size_per_partition, output_partition_sizes
            validate_fp8_block_shape(layer, *sizes, layer.weight_block_size)
        shape = sum(output_partition_sizes), input_size_per_partition
        for name, part in self._grid.parts(shape, params_dtype).items():
            loader = extra_weight_attrs["weight_loader"]
            layer.register_parameter(name, _parameter(part, loader, len(output_partition_sizes)))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]."""
        parts = dict(layer.named_parameters(recurse=False))
        if whole := self._grid.whole_scale:
            parts[whole] = parts[whole][:1]  # a layer that joins weights has the scale of each, and they are equal
        return F.linear(x, self._grid.dequantise(parts).to(x.dtype), bias)


def _parameter(part: Part, loader: Any, num_weights: int) -> BasevLLMParameter:
    """Return one of vLLM's parameters. num_weights: that a layer joins."""
    if part.per_element is not None:
        data = torch.empty(part.shape, dtype=part.dtype)
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
    if part.shape == (1,):
        return PerTensorScaleParameter(data=torch.empty(num_weights, dtype=part.dtype), weight_loader=loader)
    data = torch.empty(part.shape, dtype=part.dtype)
    if part.dtype.is_floating_point:
        return BlockQuantScaleParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
    return BasevLLMParameter(data=data, weight_loader=loader)


class GridConfig(PlainConfig):
    """Linear layers on a grid; all else stays as it was loaded. name: of the grid."""

    name: str

    def get_name(self) -> Any:
        """Return the name under which it is registered."""
        return GRID_PREFIX + self.name

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of the grid for linear layers: vLLM's own on GPUs."""
        if not isinstance(layer, LinearBase):
            return super().get_quant_method(layer, prefix) if current_platform.is_cpu() else None
        if current_platform.is_cpu():
            return DequantisedLinearMethod(GRIDS[self.name])
        theirs = vllm_config_of(self.name)
        theirs.packed_modules_mapping = self.packed_modules_mapping
        return theirs.get_quant_method(layer, prefix)


def vllm_config_of(name: str) -> QuantizationConfig:
    """Return vLLM's own config of the layout of a grid, as a checkpoint in it would give it. Activations are quantised
    with fp8 and fp8_block, for each token, and not with the others."""
    if name in ("fp8", "fp8_block"):
        block = GRIDS[name].block
        return Fp8Config(weight_block_size=None if block is None else [*block])
    kinds = {"int4": ("pack-quantized", "int", "group"), "nvfp4": ("nvfp4-pack-quantized", "float", "tensor_group")}
    layout, kind, strategy = kinds[name]
    weights = {"num_bits": 4, "type": kind, "strategy": strategy, "group_size": GRIDS[name].multiple, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": layout}
    return CompressedTensorsConfig.from_config({"format": layout, "config_groups": {"linear": group}, "ignore": []})


for _name in GRIDS:
    register_quantization_config(GRID_PREFIX + _name)(type(f"GridConfig_{_name}", (GridConfig,), {"name": _name}))
