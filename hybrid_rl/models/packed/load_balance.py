"""The load-balancing loss of a mixture of experts, over packed rows.

E * sum over the E experts of (share of the tokens that choose it) * (mean probability that the router gives it), over
the tokens of all layers together (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6; transformers'
load_balancing_loss_func, which TRL adds to its loss). It is a number of a whole mini-batch: the shares multiply the
probabilities of all tokens. They carry no gradient, so with the shares of the mini-batch known the loss is a sum over
tokens, and its parts over micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models.attention.unpacked import UnpackedRow
from hybrid_rl.models.experts.routing import find_routers, hooked
from hybrid_rl.models.packed.causal_lm import CausalLM
from hybrid_rl.models.packed.startup_check import verify_row
from hybrid_rl.models.row import PackedRow


@dataclass(frozen=True)
class ExpertLoad:
    """How often experts are chosen. counts: float64 [E], by tokens of all layers; num_rows: of these, float64 []."""

    counts: Tensor
    num_rows: Tensor

    def __add__(self, other: ExpertLoad) -> ExpertLoad:
        return ExpertLoad(self.counts + other.counts, self.num_rows + other.num_rows)

    def to(self, device: torch.device | str) -> ExpertLoad:
        """Copy it to a device."""
        return ExpertLoad(self.counts.to(device), self.num_rows.to(device))


class LoadBalance:
    """The routers of a model, read with gradient. coef: weight of the loss. They have hooks inside `reading` only.

    Runs the model once, on all ranks if it is sharded. Raises ModelError if a router's scores cannot be read.
    """

    def __init__(self, model: CausalLM, coef: float) -> None:
        self.coef = coef
        self._name = type(model.module).__name__
        self._routers = find_routers(model.module)
        self._is_packed = model.attention.is_packed
        self._top_k = int(model.module.config.get_text_config().num_experts_per_tok)
        row = verify_row(model)
        with torch.no_grad(), self.reading(row, torch.ones(row.layout.num_tokens)) as reading:
            model.row_logprobs(row, 1.0)
        reading.load()

    @classmethod
    def of(cls, model: CausalLM, coef: float | None) -> LoadBalance | None:
        """Make it with this weight, None = that of the model's config; return None for a weight of 0.

        Raises ConfigError for a weight that a model without such a loss is given.
        """
        config: Any = model.module.config.get_text_config()
        own = getattr(config, "router_aux_loss_coef", None) if find_routers(model.module) else None
        if own is None and coef:
            raise ConfigError(
                f"router_aux_loss_coef={coef:g}, but {type(model.module).__name__} has no load-balancing loss: its "
                f"config knows no router_aux_loss_coef (it is dense, or balances its experts otherwise); leave it out"
            )
        weight = own if coef is None else coef
        return cls(model, float(weight)) if weight else None

    @contextmanager
    def reading(self, row: PackedRow, weights: Tensor) -> Iterator[BalanceReading]:
        """Read the routers in the forward pass of this row inside the block.

        weights: float [T], how many tokens each place of the row counts (`place_weights`).
        """
        device = row.token_ids.device
        beside = None if self._is_packed else UnpackedRow(row.layout, device)
        reading = BalanceReading(self._name, len(self._routers), self._top_k, weights.to(device), beside)
        with hooked(self._routers, reading.take):
            yield reading


class BalanceReading:
    """The scores of L routers for the T tokens of a row. beside: how the row runs if it is not packed."""

    def __init__(self, name: str, num_layers: int, top_k: int, weights: Tensor, beside: UnpackedRow | None) -> None:
        self._name, self._top_k, self._weights, self._beside = name, top_k, weights.float(), beside
        self._scores: list[Tensor | None] = [None] * num_layers

    def take(self, layer: int, index: int, _: nn.Module, __: Any, output: Any) -> None:
        """Keep the output of a router, as a forward hook. It computes nothing: under checkpointing that would be missed
        when its block is recomputed, without the hook."""
        if self._scores[layer] is None:
            self._scores[layer] = output[index] if isinstance(output, tuple) else output

    def load(self) -> ExpertLoad:
        """Count how often these tokens choose each expert."""
        scores = self._read()
        num_experts, weights = scores[0].shape[-1], self._weights.double()
        counts = torch.zeros(num_experts, dtype=torch.float64, device=weights.device)
        for layer in scores:
            chosen = layer.detach().float().softmax(-1).topk(self._top_k, dim=-1).indices
            counts.index_add_(0, chosen.flatten(), weights.repeat_interleave(self._top_k))
        return ExpertLoad(counts, weights.sum() * len(scores))

    def part(self, total: ExpertLoad) -> Tensor:
        """Compute these tokens' part of the loss, without its weight: float32 []. total: of the whole mini-batch."""
        scores = self._read()
        num_rows = total.num_rows.clamp(min=1)
        shares = (total.counts / num_rows).float()
        sums = torch.stack([(layer.float().softmax(-1) @ shares) @ self._weights for layer in scores]).sum()
        return sums * scores[0].shape[-1] / num_rows.float()

    def _read(self) -> list[Tensor]:
        num_tokens = len(self._weights) if self._beside is None else self._beside.shape.numel()
        readings = [scores.reshape(-1, scores.shape[-1]) for scores in self._scores if scores is not None]
        if not readings or len(readings) < len(self._scores) or any(len(scores) != num_tokens for scores in readings):
            raise ModelError(
                f"the routers of {self._name} cannot be read ({len(readings)} of {len(self._scores)} ran as modules of "
                f"their own and scored every token); set router_aux_loss_coef=0, or torch_compile=false if that is on"
            )
        return readings if self._beside is None else [scores[self._beside.places] for scores in readings]
