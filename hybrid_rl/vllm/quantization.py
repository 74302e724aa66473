"""A vLLM quantisation config that quantises nothing: weights stay as they were loaded.

vLLM's CPU platform packs the weights of linear layers and experts after loading; an engine whose weights are replaced
at every step would have to pack them again each time. With these methods they stay tensors that a handoff writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from hybrid_rl.errors import ConfigError

PLAIN = "hybrid_plain"


def quantization_of_platform() -> str | None:
    """Return what vLLM's `quantization` should be so that weights stay plain: PLAIN if the platform packs them."""
    return PLAIN if current_platform.is_cpu() else None


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
