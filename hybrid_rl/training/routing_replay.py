"""Routing replay: the policy computes the tokens of a batch with the experts that were recorded for them.

Recorded by the engine as it sampled (R3, arXiv:2510.11370), or by the pass that computes old_logprobs (verl's R2).
Tokens without a record choose in the first pass that computes them, and keep that choice.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybrid_rl.batch import Batch, Jagged, lengths_to_offsets
from hybrid_rl.errors import DataError, ModelError
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.experts.expert_choices import NO_EXPERT

REPLAYED = "replayed_experts"


class RoutingReplay:
    """What a run replays: by="rollout", the choices of the engine; by="scoring", those of the pass before the update.

    Runs the model once, on all ranks if it is sharded. Raises ModelError for a model whose routers cannot be replayed.
    """

    def __init__(self, model: CausalLM, by: str) -> None:
        self._by, self._choices = by, model.choices

    def begun(self, batch: Batch) -> Batch:
        """Return the batch with the column replayed_experts: what is recorded of it so far. Raises DataError if the
        record of the engine is not there, or is of another model."""
        if REPLAYED in batch:
            return batch
        shape = (self._choices.num_layers, self._choices.top_k)
        if self._by == "rollout" and "routed_experts" in batch:
            recorded = batch["routed_experts"]
            if batch.num_samples and tuple(recorded.values.shape[1:]) != shape:
                raise DataError(
                    f"the column routed_experts has {list(recorded.values.shape[1:])} experts [layers, K] for each "
                    f"token, and the model chooses {list(shape)}; the samples are those of another model"
                )
            return batch.with_columns(replayed_experts=recorded)
        if self._by == "rollout":
            raise DataError(
                "routing_replay=rollout needs the column routed_experts, which the engine writes, and these samples "
                "have none: roll out again with routing_replay=rollout, or set it to scoring or off"
            )
        offsets = lengths_to_offsets(batch["prompt_ids"].lengths + batch["completion_ids"].lengths)
        none = torch.full((int(offsets[-1]), *shape), NO_EXPERT, dtype=torch.int16)
        return batch.with_columns(replayed_experts=Jagged(none, offsets))

    def take_metrics(self) -> MetricSums:
        """Return what was counted since the last call."""
        sums, (num_forced, num_changed) = MetricSums(), self._choices.take_counts()
        sums.mean("routing/changed_share", num_changed, num_forced)
        return sums


def followed(model: CausalLM, row: PackedRow) -> PackedRow:
    """Return a row of the policy as a reference computes it: with the policy's experts, if it chooses as many in as
    many layers, so that the KL between equal weights is 0 and not the noise of two choices; else with its own."""
    if row.experts is None:
        return row
    try:
        own = model.choices.num_layers, model.choices.top_k
    except ModelError:  # dense, or with routers of another kind
        own = None
    return row if own == tuple(row.experts.shape[1:]) else replace(row, experts=None)


def row_of(model: CausalLM, micro: Batch) -> PackedRow:
    """Lay a micro-batch out as a row, with the experts of the policy's passes, or before these those of the engine, if
    any are recorded."""
    return model.row_of(micro["prompt_ids"], micro["completion_ids"], micro.get(REPLAYED, micro.get("routed_experts")))


def experts_of(model: CausalLM, micro: Batch, row: PackedRow) -> dict[str, Tensor]:
    """Return the column of the experts that the tokens of the row have gone to in the last pass; nothing if the row
    names none."""
    if row.experts is None:
        return {}
    chosen = model.chosen_experts.to(torch.int16)
    return {REPLAYED: row.of_samples(chosen, micro[REPLAYED].lengths.tolist(), NO_EXPERT)}
