"""Columns that a model gives for a batch before the update, computed micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hybrid_rl.batch import FIELDS, Batch, Jagged, lengths_to_offsets
from hybrid_rl.batch.temperature import sampling_temperature
from hybrid_rl.memory.shortage import Halvings
from hybrid_rl.memory.transfer import finish_downloads, start_download
from hybrid_rl.models import CausalLM
from hybrid_rl.models.heads.distribution import sum_of_squares, top_tokens
from hybrid_rl.process import progress
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.training.batch_plan import micro_batch, row_size
from hybrid_rl.training.routing_replay import experts_of, followed, row_of

MicroBatches = Sequence[Sequence[int]]


@torch.no_grad()
def token_columns(
    batch: Batch,
    micro_batches: MicroBatches,
    compute: Callable[[Batch], dict[str, Tensor]],
    halvings: Halvings | None = None,
) -> dict[str, Jagged]:
    """Compute columns aligned with completion_ids. compute: gives the numbers of the M completion tokens of a
    micro-batch, [M, ...] each, by name of the column; of all tokens of its samples if the column is one of sequences.
    halvings: of the model, so that passes take fewer samples if
    memory runs out; None: that is an error. Collective if the model is sharded: every rank has as many
    micro-batches."""
    completions, halvings = batch["completion_ids"], halvings or Halvings(is_alone=False)
    prompts = batch["prompt_ids"]
    devices: set[torch.device] = set()

    def compute_part(rows: Sequence[int]) -> tuple[Sequence[int], dict[str, Tensor]]:
        mark_progress()
        computed = compute(micro_batch(batch, rows))
        devices.update(values.device for values in computed.values())
        progress.advance(len(rows))
        return rows, {name: start_download(values) for name, values in computed.items()}

    size = partial(row_size, batch)
    parts = [part for rows in micro_batches for part in halvings.each(compute_part, rows, size)]
    for device in devices:
        finish_downloads(device)
    columns: dict[str, Jagged] = {}
    places: dict[str, Jagged] = {}
    for rows, computed in parts:
        for name, values in computed.items():
            if name not in columns:
                is_whole = name in FIELDS and FIELDS[name].align == "sequence"
                offsets = lengths_to_offsets(prompts.lengths + completions.lengths) if is_whole else completions.offsets
                columns[name] = Jagged(values.new_zeros((int(offsets[-1]), *values.shape[1:])), offsets)
                places[name] = columns[name].with_values(torch.arange(int(offsets[-1])))
            if rows:
                columns[name].values[places[name].select(torch.as_tensor(rows)).values] = values
    return columns


def token_column(
    batch: Batch,
    micro_batches: MicroBatches,
    compute: Callable[[Batch], Tensor],
    halvings: Halvings | None = None,
) -> Jagged:
    """Compute one float32 column as `token_columns` does, also for a rank without micro-batches."""
    completions = batch["completion_ids"]
    columns = token_columns(batch, micro_batches, lambda micro: {"column": compute(micro).float()}, halvings)
    return columns.get("column", completions.with_values(torch.zeros(len(completions.values))))


def batch_logprobs(
    model: CausalLM,
    batch: Batch,
    micro_batches: MicroBatches,
    halvings: Halvings | None = None,
    *,
    follows_policy: bool = False,
) -> Jagged:
    """Compute ln p of all completion tokens of a batch, at the temperature that they were sampled at: float32, aligned
    with completion_ids. follows_policy: with the experts that are recorded for the policy, if there are any that this
    model can go by."""

    def compute(micro: Batch) -> Tensor:
        if follows_policy:
            row = followed(model, row_of(model, micro))
        else:
            row = model.row_of(micro["prompt_ids"], micro["completion_ids"])
        return model.row_logprobs(row, sampling_temperature(micro))[0]

    return token_column(batch, micro_batches, compute, halvings)


def old_logprobs(
    model: CausalLM, batch: Batch, micro_batches: MicroBatches, halvings: Halvings | None = None
) -> dict[str, Jagged]:
    """Compute old_logprobs of the policy, with the experts that are recorded; and replayed_experts, with those of
    tokens that have no record, if there is that column."""

    def compute(micro: Batch) -> dict[str, Tensor]:
        row = row_of(model, micro)
        logprobs = model.row_logprobs(row, sampling_temperature(micro))[0]
        return {"old_logprobs": logprobs.float()} | experts_of(model, micro, row)

    none = batch["completion_ids"].with_values(torch.zeros(len(batch["completion_ids"].values)))
    return {"old_logprobs": none} | token_columns(batch, micro_batches, compute, halvings)


def distribution_columns(
    model: CausalLM,
    batch: Batch,
    micro_batches: MicroBatches,
    halvings: Halvings | None = None,
    *,
    num_top: int,
    wants_squares: bool,
) -> dict[str, Jagged]:
    """Compute old_logprobs and what else is needed of the whole distribution: old_top_ids and old_top_logprobs
    [T, num_top] if num_top > 0, sum_pi_squared."""

    def compute(micro: Batch) -> dict[str, Tensor]:
        row = row_of(model, micro)
        log_probs = model.row_distribution(row, sampling_temperature(micro))
        columns = {"old_logprobs": log_probs.gather(1, row.labels[:, None])[:, 0].float()}
        if num_top:
            columns["old_top_ids"], top = top_tokens(log_probs, num_top)
            columns["old_top_logprobs"] = top.float()
        if wants_squares:
            columns["sum_pi_squared"] = sum_of_squares(log_probs).float()
        return columns | experts_of(model, micro, row)

    return token_columns(batch, micro_batches, compute, halvings)
