"""Handoff into vLLM: weights are written where its own loader would put them, element by element."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from vllm.lora.request import LoRARequest

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.adopt import adopted_views, check_adopted
from hybrid_rl.resharding.handoff.base import Delivered, Source
from hybrid_rl.resharding.handoff.merged import check_changes, full_merged, merge
from hybrid_rl.resharding.rank_plan import Plan, make_plan
from hybrid_rl.vllm.derived import reload_derived
from hybrid_rl.vllm.loader import LOAD_FORMAT, LOADING, LoadedWeights, Loading
from hybrid_rl.weights.sources import named_weights
from hybrid_rl.weights.views import CheckpointViews


class WeightWriter:
    """Writes the trainer's weights into a live vLLM model.

    views: of the trainer's checkpoint, or of the quantised one. rank: of this process among those that hold the
    weights. quantization: as vLLM is told (`quantization_of`); what it rearranges is loaded again by vLLM at every
    handoff.

    writes_all: whether every handoff writes all weights. lora_request: what a request must carry, if anything.
    slot_bytes: of adapters that vLLM adds to its weights itself.
    """

    writes_all = True
    lora_request: LoRARequest | None = None
    slot_bytes = 0

    def __init__(self, views: CheckpointViews, *, rank: int, quantization: str | None) -> None:
        self._views, self._rank, self._quantization = views, rank, quantization
        self._loading = Loading(views)
        self._plans: dict[str, Plan] = {}
        self._adopted: dict[str, Tensor] = {}

    def arguments(self) -> Mapping[str, Any]:
        """Return what vLLM has to be built with."""
        return {
            "load_format": LOAD_FORMAT,
            "model_loader_extra_config": {LOADING: self._loading},
            **({"quantization": self._quantization} if self._quantization else {}),
        }

    @property
    def weights(self) -> LoadedWeights:
        """The model that vLLM built, and where its weights come from. Raises HandoffError before it is built."""
        if self._loading.weights is None:
            raise HandoffError("vLLM has not built its model with this loader yet")
        return self._loading.weights

    def begin(self) -> None:
        """Take over the model that vLLM has built."""
        return

    def forget(self) -> None:
        """Trust nothing that earlier handoffs wrote."""
        return

    def check_adapters(self, source: Source) -> None:
        """Prove that what vLLM adds to its weights itself are the adapters of a source. Raises HandoffError."""
        return

    def close(self) -> None:
        """Let go of every tensor of vLLM's, whose config holds the loading for as long as the engine is there. The
        writer cannot be used afterwards."""
        self._loading.weights = None
        self._plans, self._adopted = {}, {}

    @torch.no_grad()
    def adopt(self, module: PreTrainedModel) -> None:
        """Move the trainer's weights into vLLM's memory, where they are from then on: a handoff copies nothing.

        Raises HandoffError, before anything moves, if the two store weights differently.
        """
        tensors = named_weights(module)
        views = adopted_views(self.weights.trace, self.weights.destinations)
        for name, view in views.items():
            view.copy_(tensors[name])
            tensors[name].data = view
        self._adopted = views

    @torch.no_grad()
    def write(self, source: Source, version: int, model_config: Any) -> Delivered:
        """Write all weights of a policy version. Collective over the participants of the source.

        Raises HandoffError on all of them if one fails; what has been written by then is undefined.
        """
        with source.opened(version):  # a rank that cannot even plan tells the others in here
            self.weights.check_places()
            if self._adopted:
                check_adopted({name: source.full(name) for name in self._adopted}, self._adopted)
                return Delivered(0)
            self.weights.trace.fill(self.weights.destinations)
            delivered = source.deliver(self._plan(source), self.weights.destinations)
            check_changes(source.changes, source.layout())
            num_merged = merge(self.weights.trace, self.weights.destinations, source.changes)
            num_reloaded = reload_derived(self.weights, self._views, partial(full_merged, source), model_config)
        more = {name: size for name, size in (("merged", num_merged), ("reloaded", num_reloaded)) if size}
        return dataclasses.replace(
            delivered,
            num_bytes=delivered.num_bytes + num_merged + num_reloaded,
            link_bytes={**delivered.link_bytes, **more},
        )

    def _plan(self, source: Source) -> Plan:
        layout = source.layout()
        digest = layout.digest()
        if digest not in self._plans:
            # One source has one layout; another one's plan is of no more use.
            rank = self._rank if len(layout.hosts) > 1 else 0  # a source of this process only knows of no ranks
            self._plans = {digest: make_plan(self.weights.trace, layout, rank)}
        return self._plans[digest]
