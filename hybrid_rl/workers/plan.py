"""How a batch is cut: mini-batches of whole groups, micro-batches under a token cap.

A pure function of the batch, so that the pass that computes logprobs and the pass that updates use the same plan and
see bit for bit the same numbers.
"""

from __future__ import annotations

import torch

from hybrid_rl.batch import Batch
from hybrid_rl.data import pack_by_tokens

Plan = list[list[list[int]]]  # mini-batches of micro-batches of sample indices


def make_plan(batch: Batch, *, prompts_per_mini_batch: int, tokens_per_micro_batch: int, seed: int) -> Plan:
    """Cut a batch. Groups are put in an order that `seed` decides; samples of a micro-batch run from long to short, so
    that equal lengths lie side by side. No micro-batch has more than tokens_per_micro_batch tokens."""
    groups = batch.group_rows()
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths = (batch["prompt_ids"].lengths + batch["completion_ids"].lengths).tolist()
    plan: Plan = []
    for start in range(0, len(order), prompts_per_mini_batch):
        rows = [row for group in order[start : start + prompts_per_mini_batch] for row in groups[group]]
        packed = pack_by_tokens([lengths[row] for row in rows], tokens_per_micro_batch)
        plan.append([sorted((rows[i] for i in micro), key=lambda row: (-lengths[row], row)) for micro in packed])
    return plan
