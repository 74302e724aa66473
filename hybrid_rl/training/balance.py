"""Mini-batches of whole groups, each split over the ranks at near-equal cost.

These functions need [N]-sized columns only: the driver, which calls them, never holds a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.batch import AnyBatch
from hybrid_rl.batch.trajectories import numbered
from hybrid_rl.data.packing import balance
from hybrid_rl.errors import ConfigError, DataError


def assign_mini_batches(group: Tensor, prompts_per_mini_batch: int, seed: int) -> Tensor:
    """Assign a mini-batch to each sample, int64 [N], from 0.

    Groups are in an order that `seed` decides; every mini-batch takes the next prompts_per_mini_batch of them, the
    last one what is left. Depends on the arguments alone: the number of ranks is not among them.

    group: int64 [N]. Raises ConfigError for prompts_per_mini_batch below 1.
    """
    if prompts_per_mini_batch < 1:
        raise ConfigError(f"prompts_per_mini_batch={prompts_per_mini_batch!r}; use at least 1.")
    number = numbered(group)
    order = torch.randperm(_count(number), generator=torch.Generator().manual_seed(seed))
    return order.argsort()[number] // prompts_per_mini_batch


def attention_pair_cost(num_layers: int, attention_width: int, num_parameters: int) -> float:
    """Compute how many tokens cost as much as one pair of a query and a key, in all layers of a model together.

    A token costs 2 flops per parameter that multiplies it; a pair 2 for its score and 2 for its value, per layer and
    channel. The backward pass doubles both. With 12 H^2 parameters per layer and H channels that is 1 / (6 H): a
    sequence of L tokens, which has L^2 / 2 causal pairs, costs as much as L + L^2 / (12 H) tokens without attention.

    attention_width: query heads times their size. num_parameters: without the input embedding, which multiplies
    nothing; of experts only those that a token visits.
    """
    return 2 * num_layers * attention_width / num_parameters


@dataclass(frozen=True)
class TokenCost:
    """What a model computes for tokens. num_parameters: those that multiply. pair_cost: see `attention_pair_cost`."""

    num_parameters: int
    pair_cost: float

    def forward_flops(self, batch: AnyBatch) -> float:
        """Compute the floating-point operations of a forward pass over a batch, as `group_costs` counts it: 2 per
        parameter and token, and those of attention."""
        return 2.0 * self.num_parameters * float(group_costs(batch, self.pair_cost).sum())


def group_costs(batch: AnyBatch, pair_cost: float) -> Tensor:
    """Compute what a forward and backward pass of each group costs, in tokens; float64 [G], groups in order of first
    appearance.

    As micro-batches compute it if nothing but the prompt is shared: P once for completions C_i, which makes
    P + sum(C_i) tokens and P^2 / 2 + sum((P + C_i)^2 - P^2) / 2 pairs. Samples of a group whose prompts are equally
    long are taken to share theirs. What completions have in common costs less, and so does the prefix of all prompts; a
    group that must be cut under a token cap costs some copies of its prompt more.
    """
    number = numbered(batch["group"])
    prompts, completions = batch["prompt_length"], batch["completion_length"]
    # Whole numbers: their sums do not depend on the order.
    tokens, squares = torch.zeros(2, _count(number), dtype=torch.int64)
    stride = max(_count(prompts), 1)
    shared = (number * stride + prompts).unique()  # one number per pair: many times faster than unique pairs
    shared_number, shared_prompts = shared // stride, shared % stride
    tokens.index_add_(0, shared_number, shared_prompts).index_add_(0, number, completions)
    squares.index_add_(0, shared_number, shared_prompts**2)
    squares.index_add_(0, number, (prompts + completions) ** 2 - prompts**2)
    return tokens.double() + pair_cost / 2 * squares.double()


def split_over_ranks(batch: AnyBatch, num_ranks: int, pair_cost: float) -> list[Tensor]:
    """Choose the samples of each rank, int64 [N_rank] in the order of the batch; groups stay whole.

    All ranks work on the same mini-batch at the same time, so each mini-batch is balanced by itself: longest
    processing time first, after which two ranks differ by at most its costliest group. Its largest share goes to the
    rank that has had least in the mini-batches before. A rank may get nothing, in a mini-batch or at all. A batch
    without the column `mini_batch` is one mini-batch.

    `torch.cat(parts).argsort()` restores the order of the batch. pair_cost: see `attention_pair_cost`.

    Raises ConfigError for num_ranks below 1, DataError for a group in two mini-batches.
    """
    if num_ranks < 1:
        raise ConfigError(f"num_ranks={num_ranks!r}; use at least 1.")
    number = numbered(batch["group"])
    costs = group_costs(batch, pair_cost).tolist()
    mini_batch = _mini_batch_of_groups(batch, number)
    home = torch.zeros_like(mini_batch)
    had = [0.0] * num_ranks
    for index in mini_batch.unique().tolist():
        groups = (mini_batch == index).nonzero()[:, 0].tolist()
        shares = [[groups[i] for i in share] for share in balance([costs[group] for group in groups], num_ranks)]
        totals = [sum(costs[group] for group in share) for share in shares]
        largest_first = sorted(range(num_ranks), key=lambda i: -totals[i])
        for rank, share in zip(sorted(range(num_ranks), key=lambda rank: had[rank]), largest_first, strict=True):
            home[shares[share]] = rank
            had[rank] += totals[share]
    rank_of = home[number]
    return list(rank_of.argsort(stable=True).split(rank_of.bincount(minlength=num_ranks).tolist()))


def _mini_batch_of_groups(batch: AnyBatch, number: Tensor) -> Tensor:
    """Return the mini-batch of each group, int64 [G]."""
    mini_batches = torch.zeros(_count(number), dtype=torch.int64)
    if "mini_batch" not in batch:
        return mini_batches
    mini_batches[number] = batch["mini_batch"]
    torn = (mini_batches[number] != batch["mini_batch"]).nonzero()[:, 0]
    if torn.numel():
        raise DataError(
            f"group {batch['group'][torn[0]]} is in mini-batches {mini_batches[number[torn[0]]]} and "
            f"{batch['mini_batch'][torn[0]]}; a group is compared within itself: give all of its samples one mini-batch"
        )
    return mini_batches


def _count(number: Tensor) -> int:
    return int(number.max()) + 1 if number.numel() else 0
