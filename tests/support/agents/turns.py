"""Samples cut into turns: what a trajectory of one long turn would be, had it been made in several."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_rl.batch import FIELDS, Batch, Jagged


def cut_in_turns(batch: Batch) -> Batch:
    """Each completion of two and more tokens as two turns, of which the second has the first in its prompt. Rows of the
    last turns come first."""
    lengths = batch["completion_length"].tolist()
    spans = [(n, 1, length // 2, length) for n, length in enumerate(lengths) if length > 1]
    spans += [(n, 0, 0, length // 2 if length > 1 else length) for n, length in enumerate(lengths)]
    prompts, completions = ([row.tolist() for row in batch[name]] for name in ("prompt_ids", "completion_ids"))
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        rows = [column[n] for n, *_ in spans]
        if FIELDS[name].align == "completion":
            pieces = [row[a:b].tolist() for row, (_, _, a, b) in zip(rows, spans, strict=True)]
            columns[name] = Jagged.from_rows(pieces, column.values.dtype)
        elif not isinstance(column, Jagged):
            columns[name] = torch.stack(rows) if isinstance(column, torch.Tensor) else rows
    columns["prompt_ids"] = Jagged.from_rows([prompts[n] + completions[n][:a] for n, _, a, _ in spans], torch.int64)
    columns["prompt_length"] = columns["prompt_ids"].lengths
    columns["completion_length"] = columns["completion_ids"].lengths
    columns["turn"] = torch.tensor([turn for _, turn, _, _ in spans])
    return Batch(columns)
