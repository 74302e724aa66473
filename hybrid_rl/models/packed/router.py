"""The routers of a mixture-of-experts model, read while it runs: which experts a token went to, and how likely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.errors import ModelError
from hybrid_rl.models.experts.routing import find_routers, hooked, tensors_of
from hybrid_rl.models.packed.causal_lm import CausalLM
from hybrid_rl.models.packed.startup_check import verify_row
from hybrid_rl.models.row import PackedRow


class Routers:
    """The L routers of a model, in the order of its layers. They have hooks inside `reading` only.

    Which modules they are, and which of their outputs are the logits, transformers says itself. Blocks that run through
    torch.compile do not see the hooks. Runs the model once, on all ranks if it is sharded. Raises ModelError for a
    model without routers, and for routers that do not give away which experts they choose.
    """

    def __init__(self, model: CausalLM) -> None:
        self._routers = find_routers(model.module)
        name = type(model.module).__name__
        if not self._routers:
            raise ModelError(
                f"{name} has no routers that can be read: it is not a mixture of experts, or transformers "
                f"does not name them; use a loss without router scores (policy_loss=gmpo)"
            )
        row = verify_row(model)
        with torch.no_grad(), self.reading(row) as reading:
            model.row_logprobs(row, 1.0)
        try:
            reading.check()
        except ModelError as error:
            raise ModelError(f"the routers of {name} cannot be read: {error}") from None

    @property
    def num_layers(self) -> int:
        """Layers that are mixtures of experts (L)."""
        return len(self._routers)

    @contextmanager
    def reading(self, row: PackedRow, expert_ids: Tensor | None = None) -> Iterator[RouterReading]:
        """Read the routers in the forward pass of this row inside the block: see RouterReading."""
        if expert_ids is not None and tuple(expert_ids.shape[:2]) != (row.sources.shape[0], self.num_layers):
            raise ValueError(
                f"expert_ids must be [M, L, K] for {row.sources.shape[0]} tokens and {self.num_layers} layers, not "
                f"{tuple(expert_ids.shape)}"
            )
        reading = RouterReading(row.sources, expert_ids, self.num_layers)
        with hooked(self._routers, reading.take):
            yield reading


class RouterReading:
    """The scores that the routers gave M tokens, at the places that predict them: detached.

    sources: int64 [M], those places. expert_ids: int64 [M, L, K], the experts that are asked for; None = the K that
    each router chooses.
    """

    def __init__(self, sources: Tensor, expert_ids: Tensor | None, num_layers: int) -> None:
        self._sources = sources
        self._asked = expert_ids
        self._ids: list[Tensor | None] = [None] * num_layers
        self._logprobs: list[Tensor | None] = [None] * num_layers
        self._problem = ""

    @property
    def expert_ids(self) -> Tensor:
        """The experts, int64 [M, L, K]."""
        self.check()
        return torch.stack([ids for ids in self._ids if ids is not None], dim=1)

    @property
    def logprobs(self) -> Tensor:
        """ln of their shares of the softmax over all experts, float32 [M, L, K].

        The same if a model weighs its experts otherwise (by a sigmoid, or among the chosen ones only).
        """
        self.check()
        return torch.stack([logprobs for logprobs in self._logprobs if logprobs is not None], dim=1)

    def check(self) -> None:
        """Raise ModelError if something was not read."""
        silent = [layer for layer, logprobs in enumerate(self._logprobs) if logprobs is None]
        if self._problem:
            raise ModelError(self._problem)
        if silent:
            raise ModelError(
                f"{len(silent)} of {len(self._logprobs)} routers did not run in the forward pass, or not as modules "
                f"(as in compiled or fused blocks); set torch_compile=false"
            )

    @torch.no_grad()
    def take(self, layer: int, index: int, router: nn.Module, _: Any, output: Any) -> None:
        """Note the experts and their logprobs, as a forward hook of a router. index: of the logits in its output."""
        if self._problem or self._logprobs[layer] is not None:
            return  # what comes first counts: a recomputation follows its forward pass
        parts = tensors_of(output)
        chosen = [part for part in parts if not part.is_floating_point()]
        logits = output[index]
        if len(chosen) != 1 or chosen[0].shape[:-1] != logits.shape[:-1]:
            shapes = [tuple(part.shape) for part in parts]
            self._problem = (
                f"{type(router).__name__} gives {shapes}, of which not exactly one names the experts of every "
                f"token; use a loss without router scores (policy_loss=gmpo)"
            )
            return
        if self._asked is None:
            ids = chosen[0].reshape(-1, chosen[0].shape[-1])[self._sources].long()
        else:
            ids = self._asked[:, layer]
        logprobs = torch.log_softmax(logits.reshape(-1, logits.shape[-1])[self._sources].float(), dim=-1)
        self._ids[layer], self._logprobs[layer] = ids, logprobs.gather(1, ids)
