"""How a batch is cut: mini-batches of whole groups, micro-batches under a token cap.

A pure function of the batch, so that the pass that computes logprobs and the pass that updates use the same plan and
see bit for bit the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_rl.batch import Batch
from hybrid_rl.data import pack_by_tokens
from hybrid_rl.models import prompt_groups

Plan = list[list[list[int]]]  # mini-batches of micro-batches of sample indices


def make_plan(batch: Batch, *, prompts_per_mini_batch: int, tokens_per_micro_batch: int, seed: int) -> Plan:
    """Cut a batch. Groups are put in an order that `seed` decides; samples of a micro-batch run from long to short, so
    that equal lengths lie side by side.

    No micro-batch computes more than tokens_per_micro_batch tokens, a prompt that samples share counted once. Samples
    of one prompt stay together where they fit.
    """
    groups = batch.group_rows()
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    prompts, completions = batch["prompt_ids"].lengths.tolist(), batch["completion_ids"].lengths.tolist()
    plan: Plan = []
    for start in range(0, len(order), prompts_per_mini_batch):
        rows = [row for group in order[start : start + prompts_per_mini_batch] for row in groups[group]]
        pieces: list[tuple[int, list[int]]] = []  # tokens and samples of what is not cut further
        for members in prompt_groups(batch["prompt_ids"], rows):
            prompt = prompts[members[0]]
            for piece in _cut_group(prompt, [completions[row] for row in members], tokens_per_micro_batch):
                samples = [members[i] for i in piece]
                pieces.append((prompt + sum(completions[row] for row in samples), samples))
        packed = pack_by_tokens([num_tokens for num_tokens, _ in pieces], tokens_per_micro_batch)
        micros = [[row for i in micro for row in pieces[i][1]] for micro in packed]
        plan.append([sorted(micro, key=lambda row: (-prompts[row] - completions[row], row)) for micro in micros])
    return plan


def _cut_group(prompt: int, completions: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Completions of one prompt that go together: all of them, or as many as fit beside a copy of the prompt."""
    if prompt + sum(completions) <= max_tokens:
        return [list(range(len(completions)))]
    sizes = [max(length, 1) for length in completions]
    if prompt + max(sizes) > max_tokens:  # a sample is over the cap, which is refused where they are packed
        return [[index] for index in range(len(sizes))]
    return pack_by_tokens(sizes, max_tokens - prompt)
