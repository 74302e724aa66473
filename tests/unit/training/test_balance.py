"""Whole groups over ranks: every sample once, equal work per mini-batch, and no micro-batch over its cap anywhere."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.batch import Batch, BatchRef, Jagged
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.training.balance import (
    TokenCost,
    assign_mini_batches,
    attention_pair_cost,
    group_costs,
    split_over_ranks,
)
from hybrid_rl.training.batch_plan import Plan, align_plans, num_micro_batches
from tests.support.plans import make_plan

PAIR_COST = 1 / (6 * 64)
Lengths = list[tuple[int, list[int]]]  # per group: prompt, and completion of each sample

HEAVY_TAIL = st.integers(0, 9).map(lambda exponent: 2**exponent)
ANY_LENGTH = st.one_of(st.integers(0, 60), HEAVY_TAIL)


@st.composite
def groups_of_lengths(draw: st.DrawFn) -> Lengths:
    """Unequal groups of any lengths, all equal, one giant sample, no completion at all."""
    count, size = draw(st.integers(1, 24)), draw(st.integers(1, 16))
    kind = draw(st.sampled_from(["any", "unequal", "equal", "one giant", "nothing"]))
    prompts = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    if kind in ("equal", "nothing"):
        length = 0 if kind == "nothing" else draw(ANY_LENGTH)
        return [(prompts[0], [length] * size) for _ in range(count)]
    sizes = st.integers(1, 16) if kind == "unequal" else st.just(size)
    found = [(prompt, draw(st.lists(ANY_LENGTH, min_size=(n := draw(sizes)), max_size=n))) for prompt in prompts]
    if kind == "one giant":
        found[-1][1][0] = 5000
    return found


def batch_of(groups: Lengths, order: list[int] | None = None) -> Batch:
    """Samples with the columns that a driver has, and their tokens. Every group has its own prompt."""
    rows = [(100 + number, prompt, length) for number, (prompt, lengths) in enumerate(groups) for length in lengths]
    rows = [rows[index] for index in order] if order is not None else rows
    return Batch(
        {
            "group": torch.tensor([row[0] for row in rows]),
            "trajectory": torch.arange(len(rows)),
            "prompt_length": torch.tensor([row[1] for row in rows]),
            "completion_length": torch.tensor([row[2] for row in rows]),
            "prompt_ids": Jagged.from_rows([[row[0]] * row[1] for row in rows], torch.int64),
            "completion_ids": Jagged.from_rows([[0] * row[2] for row in rows], torch.int64),
        }
    )


def cost_of(batch: Batch) -> float:
    """Cost of whole groups, token by token: every token and every pair of query and key is counted."""
    total = 0.0
    for rows in batch.group_rows():
        (prompt,) = {int(batch["prompt_length"][row]) for row in rows}
        # A token sees itself (half a pair, as its score is half of a 2 x 2 triangle) and all before it.
        tokens = [range(prompt), *(range(prompt, prompt + int(batch["completion_length"][row])) for row in rows)]
        num_tokens = sum(map(len, tokens))
        total += num_tokens + PAIR_COST * (sum(map(sum, tokens)) + 0.5 * num_tokens)
    return total


def tokens_of(batch: Batch, rows: list[int]) -> int:
    """Tokens that a micro-batch computes: every prompt once, every completion."""
    prompts = {(int(batch["group"][row]), int(batch["prompt_length"][row])) for row in rows}
    return sum(length for _, length in prompts) + sum(int(batch["completion_length"][row]) for row in rows)


works = given(
    groups=groups_of_lengths(),
    num_ranks=st.integers(1, 64),
    per_mini_batch=st.integers(1, 24),
    spare=st.integers(0, 300),
    seed=st.integers(0, 2**40),
    data=st.data(),
)


@pytest.mark.slow
@settings(max_examples=40)
@works
def test_ranks_share_the_work(**work: Any) -> None:
    check_shares(**work)


@pytest.mark.sweep
@settings(max_examples=400)
@works
def test_ranks_share_much_more_work(**work: Any) -> None:
    check_shares(**work)


def check_shares(groups, num_ranks, per_mini_batch, spare, seed, data) -> None:
    num_samples = sum(len(lengths) for _, lengths in groups)
    batch = batch_of(groups, data.draw(st.permutations(range(num_samples))))
    minis = assign_mini_batches(batch["group"], per_mini_batch, seed)
    batch = batch.with_columns(mini_batch=minis)
    num_mini_batches = -(-len(groups) // per_mini_batch)

    # Mini-batches: whole groups, full but for the last one.
    homes = {(int(group), int(mini)) for group, mini in zip(batch["group"], minis, strict=True)}
    assert len(homes) == len(groups)
    sizes = Counter(mini for _, mini in homes)
    assert [sizes[mini] for mini in range(num_mini_batches - 1)] == [per_mini_batch] * (num_mini_batches - 1)
    assert 1 <= sizes[num_mini_batches - 1] <= per_mini_batch
    assert sum(sizes.values()) == len(groups)

    # Ranks: every sample once, groups whole, and the batch comes back in order.
    parts = split_over_ranks(batch, num_ranks, PAIR_COST)
    assert len(parts) == num_ranks
    assert all((part.diff() > 0).all() for part in parts)
    shares = [batch.select(part) for part in parts]
    assert sum(len(set(share["group"].tolist())) for share in shares) == len(groups)
    restored = Batch.concat(shares).select(torch.cat(parts).argsort())
    assert all(torch.equal(restored[name], batch[name]) for name in ("group", "trajectory", "mini_batch"))
    assert sorted(torch.cat(parts).tolist()) == list(range(num_samples))

    # Balance: two ranks differ by at most the costliest group of the mini-batch.
    for mini in range(num_mini_batches):
        chosen = [share.select((share["mini_batch"] == mini).nonzero()[:, 0]) for share in shares]
        totals = [cost_of(share) for share in chosen]
        whole = batch.select((minis == mini).nonzero()[:, 0])
        largest = max(cost_of(whole.select(rows)) for rows in whole.group_rows())
        assert max(totals) - min(totals) <= largest * (1 + 1e-9)

    # Micro-batches: under the cap on every rank, equally many, every sample once.
    cap = int((batch["prompt_length"] + batch["completion_length"]).max()) + spare
    arguments = {"num_mini_batches": num_mini_batches, "tokens_per_micro_batch": cap, "seed": seed}
    plans: list[Plan] = [make_plan(share, **arguments) for share in shares]
    counts = [num_micro_batches(plan) for plan in plans]
    plans = [align_plans(plan, counts) for plan in plans]
    assert len({tuple(num_micro_batches(plan)) for plan in plans}) == 1
    assert num_micro_batches(plans[0]) == [max(column) for column in zip(*counts, strict=True)]
    seen: list[int] = []
    for part, share, plan in zip(parts, shares, plans, strict=True):
        for mini, micros in enumerate(plan):
            for rows in micros:
                assert tokens_of(share, rows) <= cap
                assert all(int(share["mini_batch"][row]) == mini for row in rows)
                seen += part[rows].tolist()
    assert sorted(seen) == list(range(num_samples))

    again = split_over_ranks(batch, num_ranks, PAIR_COST)
    assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))


@given(groups=groups_of_lengths(), num_ranks=st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_a_reference_is_split_as_the_batch_that_it_stands_for(groups, num_ranks) -> None:
    batch = batch_of(groups)
    reference = BatchRef({name: batch[name] for name in ("group", "prompt_length", "completion_length")})
    both = zip(
        split_over_ranks(batch, num_ranks, PAIR_COST), split_over_ranks(reference, num_ranks, PAIR_COST), strict=True
    )
    assert all(torch.equal(one, other) for one, other in both)


def test_hand_computed_split() -> None:
    """Groups of 8, 5, 4, 3 tokens in one mini-batch: 8 + 3 and 5 + 4 on two ranks, longest first."""
    batch = batch_of([(2, [3]), (1, [2, 5]), (1, [1, 1]), (3, [1])])
    assert group_costs(batch, 0.0).tolist() == [5, 8, 3, 4]
    assert [part.tolist() for part in split_over_ranks(batch, 2, 0.0)] == [[1, 2, 3, 4], [0, 5]]
    assert [part.tolist() for part in split_over_ranks(batch, 1, 0.0)] == [[0, 1, 2, 3, 4, 5]]
    assert [part.tolist() for part in split_over_ranks(batch, 6, 0.0)] == [[1, 2], [0], [5], [3, 4], [], []]


def test_the_largest_share_goes_to_who_had_least() -> None:
    """Mini-batches of 9 and 1, then of 4 and 2: 9 + 2 and 1 + 4, where 9 + 4 and 1 + 2 would do for each alone."""
    batch = batch_of([(1, [8]), (1, [0]), (1, [3]), (1, [1])]).with_columns(mini_batch=torch.tensor([0, 0, 1, 1]))
    assert [part.tolist() for part in split_over_ranks(batch, 2, 0.0)] == [[0, 3], [1, 2]]
    # Three mini-batches of one group for three ranks: no rank waits for one that gets two of them.
    single = batch_of([(1, [4]), (1, [4]), (1, [4])]).with_columns(mini_batch=torch.tensor([0, 1, 2]))
    assert [part.tolist() for part in split_over_ranks(single, 3, 0.0)] == [[0], [1], [2]]


def test_mini_batches_are_balanced_one_by_one() -> None:
    """Equal totals are worth nothing if one rank has all of the first mini-batch and the other all of the second."""
    batch = batch_of([(1, [9]), (1, [9]), (1, [9]), (1, [9])]).with_columns(mini_batch=torch.tensor([0, 0, 1, 1]))
    for part in split_over_ranks(batch, 2, PAIR_COST):
        assert sorted(batch["mini_batch"][part].tolist()) == [0, 1]


def test_cost_of_a_shared_prompt() -> None:
    """Prompt 4, completions 2 and 3: 9 tokens; 4^2 / 2 + (6^2 - 4^2) / 2 + (7^2 - 4^2) / 2 = 34.5 pairs."""
    batch = batch_of([(4, [2, 3])])
    assert group_costs(batch, 0.0).item() == 9
    assert group_costs(batch, 2.0).item() == 9 + 2 * 34.5
    # Samples of one group with prompts of 2 and 3 tokens, as turns have: nothing is shared.
    turns = Batch(
        {
            "group": torch.tensor([7, 7]),
            "prompt_length": torch.tensor([2, 3]),
            "completion_length": torch.tensor([1, 1]),
        }
    )
    assert group_costs(turns, 2.0).item() == 7 + 3**2 + 4**2


def test_operations_of_a_forward_pass() -> None:
    """A prompt of 3 with completions of 2 and 4 tokens: 9 tokens, and 65 / 2 pairs at the price of 0.2 tokens."""
    lengths = {"prompt_length": torch.tensor([3, 3]), "completion_length": torch.tensor([2, 4])}
    batch = Batch({"group": torch.tensor([7, 7]), **lengths})
    assert TokenCost(num_parameters=10, pair_cost=0.2).forward_flops(batch) == 2 * 10 * (9 + 6.5)


def test_cost_of_a_pair() -> None:
    """The model for which the well-known L^2 / (12 H) holds: 12 H^2 parameters per layer, H channels of attention."""
    hidden_size, num_layers, length = 128, 5, 1000
    pair_cost = attention_pair_cost(num_layers, hidden_size, 12 * hidden_size**2 * num_layers)
    batch = batch_of([(1, [length - 1])])
    assert group_costs(batch, pair_cost).item() == pytest.approx(length + length**2 / (12 * hidden_size), rel=1e-12)


def test_attention_moves_a_long_sample_to_its_own_rank() -> None:
    """30 tokens at once or in ten threes: equal in tokens, far from equal with attention."""
    batch = batch_of([(1, [29]), *[(1, [2])] * 10])
    by_tokens, by_cost = split_over_ranks(batch, 2, 0.0), split_over_ranks(batch, 2, 1.0)
    assert [len(part) for part in by_tokens] == [1, 10]
    assert by_cost[0].tolist() == [0]
    others = batch_of([(1, [29]), (1, [9]), *[(1, [2])] * 10])
    by_tokens, by_cost = split_over_ranks(others, 2, 0.0), split_over_ranks(others, 2, 1.0)
    assert len(by_tokens[0]) > 1  # 30 against 40 tokens: a short one joins the long one
    assert by_cost[0].tolist() == [0]  # 480 against 135


def test_mini_batches_follow_the_seed_and_not_the_ranks() -> None:
    group = torch.tensor([5, 5, 9, 9, 2, 2, 7, 7])
    order = torch.randperm(4, generator=torch.Generator().manual_seed(3)).tolist()
    names = [[5, 9, 2, 7][index] for index in order]
    expected = [names.index(int(value)) // 2 for value in group]
    assert assign_mini_batches(group, 2, 3).tolist() == expected
    assert assign_mini_batches(group, 99, 3).tolist() == [0] * 8
    assert len({tuple(assign_mini_batches(torch.arange(12), 4, seed).tolist()) for seed in range(8)}) == 8
    assert assign_mini_batches(torch.zeros(0, dtype=torch.int64), 2, 0).tolist() == []


def test_an_empty_batch() -> None:
    batch = batch_of([(1, [1])]).select([])
    assert [part.tolist() for part in split_over_ranks(batch, 2, PAIR_COST)] == [[], []]


def test_what_cannot_be_split() -> None:
    batch = batch_of([(1, [1, 1]), (1, [1])])
    with pytest.raises(ConfigError, match="num_ranks=0"):
        split_over_ranks(batch, 0, PAIR_COST)
    with pytest.raises(ConfigError, match="prompts_per_mini_batch=0"):
        assign_mini_batches(batch["group"], 0, 0)
    torn = batch.with_columns(mini_batch=torch.tensor([0, 1, 0]))
    with pytest.raises(DataError, match="group 100 is in mini-batches"):
        split_over_ranks(torn, 2, PAIR_COST)


def test_a_thousand_ranks() -> None:
    """16384 samples in 2048 groups: longest processing time first is within 4/3 of what is possible at all."""
    completions = (torch.rand(2048 * 8, generator=torch.Generator().manual_seed(0)).log() * -1000).long()
    batch = Batch(
        {
            "group": torch.arange(2048).repeat_interleave(8),
            "prompt_length": torch.full_like(completions, 100),
            "completion_length": completions,
        }
    )
    costs = group_costs(batch, PAIR_COST)
    parts = split_over_ranks(batch, 1024, PAIR_COST)
    totals = [float(costs[batch["group"][part].unique()].sum()) for part in parts]
    assert sum(totals) == pytest.approx(float(costs.sum()))
    assert max(totals) <= 4 / 3 * max(float(costs.sum()) / 1024, float(costs.max()))
