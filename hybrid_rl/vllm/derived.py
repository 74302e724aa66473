"""Weights that vLLM rearranged after loading, loaded again by vLLM's own path for this, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hybrid_rl.compat.torch import storage_id
from hybrid_rl.errors import HandoffError
from hybrid_rl.vllm.loader import LoadedWeights
from hybrid_rl.weights.views import CheckpointViews

logger = logging.getLogger(__name__)


@torch.no_grad()
def reload_derived(
    weights: LoadedWeights, views: CheckpointViews, full: Callable[[str], Tensor], model_config: ModelConfig
) -> int:
    """Load the derived layers of an engine from whole tensors; the bytes given to vLLM, 0 if nothing is derived.

    full: gives a whole global tensor by the trainer's name; called once per tensor, in the same order on all ranks. To
    be called after the plan has been carried out. Raises HandoffError if vLLM did not take a weight.
    """
    derived = weights.derived
    if not derived.reasons:
        return 0
    num_bytes = 0

    def offered() -> Iterator[tuple[str, Tensor]]:
        nonlocal num_bytes
        for name, tensor in _whole_views(derived.names, views, full):
            num_bytes += tensor.nbytes
            yield name, tensor

    layers = [weights.model.get_submodule(name) for name in derived.layers]
    for layer in layers:
        initialize_layerwise_reload(layer)
    model: Any = weights.model
    loaded = set(model.load_weights(offered()))
    for layer in layers:
        finalize_layerwise_reload(layer, model_config)
    left = sorted(name for name in derived.reasons if name not in loaded)
    if left:
        plain = "" if model_config.quantization else "rollout.engine_args.plain_weights=true, or "
        raise HandoffError(
            f"vLLM's reload left {len(left)} weights as they were, e.g. {left[0]} ({derived.reasons[left[0]]}): this "
            f"model cannot take new weights; set {plain}rollout.engine=inplace"
        )
    for name in derived.copies:
        copy: Any = weights.model.get_submodule(name)
        copy.quant_method.process_weights_after_loading(copy)
    return num_bytes


def log_derived(weights: LoadedWeights, at: str) -> None:
    """Say once what a handoff cannot write directly, and why. at: when it is loaded again."""
    reasons = weights.derived.reasons
    if reasons:
        name, reason = next(iter(reasons.items()))
        logger.warning(
            "%d of %d weights of vLLM's model are loaded again at %s, from whole tensors, instead of being "
            "written where they are, e.g. %s: %s. That is several times slower.",
            len(reasons),
            len(weights.trace.destinations),
            at,
            name,
            reason,
        )


def _whole_views(
    names: tuple[str, ...], views: CheckpointViews, full: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a checkpoint, cut out of whole tensors of the trainer, of which one is held at a time."""
    wanted = set(names)
    owners = {storage_id(tensor): name for name, tensor in views.tensors.items()}
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, view in views.views:
        if name in wanted:
            groups.setdefault(owners[storage_id(view)], []).append((name, view))
    for owner, parts in groups.items():
        whole = full(owner).contiguous()
        for name, view in parts:
            yield name, whole.as_strided(view.shape, view.stride(), view.storage_offset())
