"""Properties of the plan: whole groups, a hard cap, every sample once, a function of its arguments."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.batch import FIELDS, Batch, Jagged
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import DataError
from hybrid_rl.models import PackedRow
from hybrid_rl.training.balance import assign_mini_batches
from hybrid_rl.training.batch_plan import (
    Plan,
    PlanSpec,
    align_plans,
    micro_batch,
    num_micro_batches,
    still_micro_batches,
)
from tests.support.plans import make_plan

# group, prompt length and completion length of each sample; prompts per mini-batch, token cap, seed; the plan
RECORDED: dict[str, tuple[str, tuple[int, int, int], Plan]] = {
    "ties": (
        "0/10/5 0/10/9 0/10/0 0/10/20 1/4/0 1/4/3 1/4/1 1/4/9 2/8/5 2/8/14 2/8/1 2/8/5 3/1/5 3/1/14 3/1/5 "
        "3/1/3 4/7/3 4/7/1 4/7/3 4/7/20 5/3/3 5/3/0 5/3/0 5/3/5",
        (2, 70, 0),
        [[[9, 8, 11, 10, 23, 20, 21, 22]], [[13, 12, 14, 15], [3, 1, 0, 2]], [[19, 7, 16, 18, 17, 5, 6, 4]]],
    ),
    "tight cap": (
        "0/4/3 0/4/3 0/4/5 1/6/5 1/6/5 1/6/3 2/12/5 2/12/14 2/12/5 3/1/9 3/1/14 3/1/3 4/3/5 4/3/1 4/3/9",
        (5, 26, 7),
        [[[2, 0, 1], [3, 4, 5], [9, 11], [10], [6, 8], [7], [14, 12, 13]]],
    ),
    "scattered groups": (
        "4/12/3 7/6/0 6/7/14 2/5/9 3/3/20 2/5/20 6/7/0 3/3/20 5/5/0 0/5/9 1/2/9 4/12/0 1/2/5 5/5/9 0/5/0 7/6/14",
        (3, 50, 3),
        [[[2, 6], [4, 7], [5, 3]], [[15, 0, 13, 11, 1, 8]], [[9, 10, 12, 14]]],
    ),
    "one prompt each": (
        "0/10/9 0/10/5 0/10/0 0/10/14 0/10/1 0/10/5 0/10/9 0/10/9 1/3/9 1/3/5 1/3/1 1/3/5 1/3/9 1/3/5 1/3/3 "
        "1/3/1 2/11/3 2/11/5 2/11/20 2/11/3 2/11/0 2/11/1 2/11/14 2/11/0 3/4/9 3/4/5 3/4/20 3/4/14 3/4/3 "
        "3/4/0 3/4/0 3/4/20",
        (1, 41, 11),
        [
            [[8, 12, 9, 11, 13, 14, 10, 15]],
            [[0, 6, 1, 4, 2], [3, 7, 5]],
            [[22, 17, 16, 20, 23], [18, 19, 21]],
            [[31, 24, 25, 29, 30], [26, 27, 28]],
        ],
    ),
}


def batch_of(groups: list[list[tuple[int, int]]], order: list[int]) -> Batch:
    """groups: (prompt, completion) lengths of each sample; order: a permutation of all samples."""
    rows = [(10 + number, *lengths) for number, group in enumerate(groups) for lengths in group]
    rows = [rows[index] for index in order]
    return Batch(
        {
            "group": torch.tensor([row[0] for row in rows]),
            "prompt_ids": Jagged.from_rows([[0] * row[1] for row in rows], torch.int64),
            "completion_ids": Jagged.from_rows([[0] * row[2] for row in rows], torch.int64),
        }
    )


def plan_of(batch: Batch, *, prompts_per_mini_batch: int, tokens_per_micro_batch: int, seed: int) -> Plan:
    """Mini-batches assigned and cut on one rank."""
    minis = assign_mini_batches(batch["group"], prompts_per_mini_batch, seed)
    return make_plan(
        batch.with_columns(mini_batch=minis),
        num_mini_batches=int(minis.max()) + 1,
        tokens_per_micro_batch=tokens_per_micro_batch,
        seed=seed,
    )


def columns(batch: Batch, rows: list[int]) -> tuple[Jagged, Jagged]:
    part = batch.select(rows)
    return part["prompt_ids"], part["completion_ids"]


def by_prompt(batch: Batch, rows: list[int]) -> list[list[int]]:
    lengths = batch["prompt_ids"].lengths.tolist()
    return [[row for row in rows if lengths[row] == length] for length in {lengths[row] for row in rows}]


def num_computed(batch: Batch, rows: list[int]) -> int:
    """Tokens of a micro-batch, every distinct prompt once."""
    prompts, completions = columns(batch, rows)
    return sum(set(prompts.lengths.tolist())) + int(completions.lengths.sum())


LENGTHS = st.tuples(st.integers(1, 30), st.integers(0, 30))


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(LENGTHS, min_size=1, max_size=5), min_size=1, max_size=8),
    per_mini_batch=st.integers(1, 9),
    spare=st.integers(0, 100),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_plan_properties(groups, per_mini_batch, spare, seed, data) -> None:
    num_samples = sum(map(len, groups))
    batch = batch_of(groups, data.draw(st.permutations(range(num_samples))))
    lengths = (batch["prompt_ids"].lengths + batch["completion_ids"].lengths).tolist()
    cap = max(lengths) + spare
    arguments = {"prompts_per_mini_batch": per_mini_batch, "tokens_per_micro_batch": cap, "seed": seed}
    plan = plan_of(batch, **arguments)

    assert sorted(row for mini in plan for micro in mini for row in micro) == list(range(num_samples))
    group_of = batch["group"].tolist()
    groups_of_minis = [{group_of[row] for micro in mini for row in micro} for mini in plan]
    assert sum(map(len, groups_of_minis)) == len(groups)  # no group in two mini-batches
    sizes = [len(found) for found in groups_of_minis]
    assert sizes[:-1] == [per_mini_batch] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= per_mini_batch
    for mini in plan:
        for micro in mini:
            assert 0 < num_computed(batch, micro) <= cap
            assert PackedRow.of(*columns(batch, micro), torch.device("cpu")).layout.num_tokens <= cap
            micro_lengths = [lengths[row] for row in micro]
            assert micro_lengths == sorted(micro_lengths, reverse=True)
        # Prompts of one length are the same prompt here. What fits is together; what is cut is cut into few.
        for rows in by_prompt(batch, [row for micro in mini for row in micro]):
            found = [micro for micro in mini if set(micro) & set(rows)]
            whole = num_computed(batch, rows)
            assert len(found) == 1 or whole > cap
    assert plan_of(batch, **arguments) == plan


@pytest.mark.parametrize(("rows", "arguments", "plan"), RECORDED.values(), ids=RECORDED)
def test_plans_stay_what_they_were(rows, arguments, plan) -> None:
    """Other micro-batches, or another order of them, would change the last bits of a run on one rank."""
    groups, prompts, completions = zip(*(map(int, row.split("/")) for row in rows.split()), strict=True)
    batch = Batch(
        {
            "group": torch.tensor(groups),
            "prompt_ids": Jagged.from_rows(
                [[n] * length for n, length in zip(groups, prompts, strict=True)], torch.int64
            ),
            "completion_ids": Jagged.from_rows([[0] * length for length in completions], torch.int64),
        }
    )
    per_mini_batch, cap, seed = arguments
    assert plan_of(batch, prompts_per_mini_batch=per_mini_batch, tokens_per_micro_batch=cap, seed=seed) == plan


def test_seed_decides_which_groups_share_a_mini_batch() -> None:
    batch = batch_of([[(1, 1)]] * 12, list(range(12)))
    plans = {str(plan_of(batch, prompts_per_mini_batch=4, tokens_per_micro_batch=99, seed=seed)) for seed in range(8)}
    assert len(plans) == 8


@pytest.mark.parametrize(
    ("cap", "sizes"),
    [
        (38, [[3, 3]]),  # 10 + 3 * 3 of each: 19 and 19
        (37, [[3], [3]]),
        (16, [[2], [1], [2], [1]]),  # 10 + 2 * 3, and a copy of the prompt for what is left
        (13, [[1], [1], [1], [1], [1], [1]]),
    ],
)
def test_a_prompt_counts_once_for_what_is_together(cap: int, sizes: list[list[int]]) -> None:
    """Two groups of three samples, 10 tokens of prompt and 3 of completion each."""
    batch = batch_of([[(10, 3)] * 3, [(10, 3)] * 3], list(range(6)))
    other = Jagged(batch["prompt_ids"].values.clone(), batch["prompt_ids"].offsets)
    other.values[30:] = 7  # the second group has another prompt
    batch = batch.without("prompt_ids").with_columns(prompt_ids=other)
    (plan,) = make_plan(batch, tokens_per_micro_batch=cap)
    groups = batch["group"].tolist()
    found = [[sum(groups[row] == group for row in micro) for group in (10, 11)] for micro in plan]
    assert sorted([count for count in counts if count] for counts in found) == sorted(sizes)


@pytest.mark.parametrize("cap", [60, 80, 1000])
def test_samples_beside_each_other_count_with_their_padding(cap: int) -> None:
    """Every sample once, every forward under the cap as it is computed, and never a short one beside a long one."""
    sizes = [(10, length) for length in (0, 3, 5, 9, 20, 41, 42, 50, 50, 7, 30)]
    batch = batch_of([sizes[:5], sizes[5:]], list(range(11)))
    (micros,) = make_plan(batch, tokens_per_micro_batch=cap, is_packed=False)
    assert sorted(row for micro in micros for row in micro) == list(range(11))
    for micro in micros:
        lengths = [sum(sizes[row]) for row in micro]
        assert lengths[0] * len(lengths) <= cap
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] <= 32 or lengths[-1] >= 0.75 * lengths[0]
    with pytest.raises(DataError, match="60 tokens"):
        make_plan(batch, tokens_per_micro_batch=59, is_packed=False)


def test_equal_prompts_of_two_groups_are_one() -> None:
    batch = batch_of([[(10, 3)], [(10, 3)]], [0, 1])
    assert make_plan(batch, tokens_per_micro_batch=16) == [[[0, 1]]]


def test_a_sample_over_the_cap_is_refused_with_its_own_size() -> None:
    batch = batch_of([[(10, 3), (10, 9), (10, 0)]], [0, 1, 2])
    with pytest.raises(DataError, match="has 19 tokens, but max_tokens=18"):
        make_plan(batch, tokens_per_micro_batch=18)


# ------------------------------------------------------------------------------------------------------- many ranks


def test_mini_batches_without_samples_of_this_rank() -> None:
    batch = batch_of([[(2, 3)], [(4, 1)]], [0, 1]).with_columns(mini_batch=torch.tensor([3, 1]))
    plan = make_plan(batch, num_mini_batches=5, tokens_per_micro_batch=9)
    assert plan == [[], [[1]], [], [[0]], []]
    nothing = make_plan(batch.select([]), num_mini_batches=2, tokens_per_micro_batch=9)
    assert nothing == [[], []]


@pytest.mark.parametrize(
    ("minis", "num_mini_batches", "message"),
    [
        ([0, 2], 2, "sample 1 is in mini-batch 2, but there are 2"),
        ([0, -1], 2, "sample 1 is in mini-batch -1"),
        (None, 2, "without the column mini_batch is 1 mini-batch, not 2"),
    ],
)
def test_mini_batches_that_do_not_exist(minis, num_mini_batches: int, message: str) -> None:
    batch = batch_of([[(2, 3)], [(4, 1)]], [0, 1])
    if minis is not None:
        batch = batch.with_columns(mini_batch=torch.tensor(minis))
    with pytest.raises(DataError, match=message):
        make_plan(batch, num_mini_batches=num_mini_batches, tokens_per_micro_batch=9)


def test_plans_of_ranks_get_equally_many_micro_batches() -> None:
    plans: list[Plan] = [[[[0], [1, 2]], []], [[[5]], [[3], [0]]], [[], []]]
    counts = [num_micro_batches(plan) for plan in plans]
    assert counts == [[2, 0], [1, 2], [0, 0]]
    assert [align_plans(plan, counts) for plan in plans] == [
        [[[0], [1, 2]], [[], []]],
        [[[5], []], [[3], [0]]],
        [[[], []], [[], []]],
    ]
    with pytest.raises(DataError, match=r"different numbers of mini-batches \(1, 2\)"):
        align_plans(plans[0], [[2, 0], [1]])


def test_an_empty_micro_batch_is_one_sample_of_nothing() -> None:
    """Every column that a batch may have, and no sample in it to copy from."""
    values: dict[str, object] = {}
    for name, field in FIELDS.items():
        if field.align == "object":
            values[name] = []
        elif field.align == "sample":
            values[name] = torch.zeros(0, dtype=field.dtype)
        else:
            values[name] = Jagged.from_rows([], field.dtype)
    sample = micro_batch(Batch(values), [], idle_token=5)
    assert sample.num_samples == 1
    assert sample["prompt_ids"].values.tolist() == sample["completion_ids"].values.tolist() == [5]
    assert set(sample) == set(FIELDS)
    assert sample["prompt_ids"].lengths.tolist() == sample["completion_ids"].lengths.tolist() == [1]
    assert sample["completion_mask"].values.tolist() == [False]
    assert sample["advantages"].values.tolist() == [0.0]
    assert sample["policy_version"].values.tolist() == [-1]
    assert math.isnan(sample["rewards"])


def test_a_micro_batch_is_its_samples() -> None:
    batch = batch_of([[(2, 3)], [(4, 1)]], [0, 1])
    assert micro_batch(batch, [1])["prompt_ids"].lengths.tolist() == [4]


def test_groups_whose_rewards_are_alike_come_first_and_by_themselves() -> None:
    """Prompts of 2 tokens, groups of three completions: 2 + 3 tokens each. Group 10 is alike, 11 is not, 12 has one
    sample that was scored, 13 none: no difference is known of either. Two mini-batches, of groups 10, 11 and of 12, 13.
    """
    batch = batch_of([[(2, 1)] * 3] * 4, list(range(12))).with_columns(
        rewards=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 0.5, math.nan, *[math.nan] * 3]).double(),
        mini_batch=torch.tensor([0] * 6 + [1] * 6),
    )
    arguments = {"num_mini_batches": 2, "tokens_per_micro_batch": 100, "seed": 0}
    assert make_plan(batch, **arguments) == [[[0, 1, 2, 3, 4, 5]], [[6, 7, 8, 9, 10, 11]]]
    assert make_plan(batch, **arguments, splits_alike=True) == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8, 9, 10, 11]]]


def test_a_micro_batch_is_still_if_no_rank_has_an_advantage_in_it() -> None:
    """Two tokens a sample; the second of sample 2 is masked. The last micro-batch of a mini-batch never is."""
    batch = batch_of([[(1, 2)]] * 4, [0, 1, 2, 3])
    completions, mask = batch["completion_ids"], torch.tensor([1, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    batch = batch.with_columns(
        advantages=completions.with_values(torch.tensor([0.0, 0.0, 0.0, 1e-9, 0.0, 7.0, 0.0, -0.0]))
    )
    plan: Plan = [[[0], [1], [2], [3]], [[], [0, 1], [3]], [[0]], []]
    mine = [[True, False, True, False], [True, False, False], [False], []]
    assert still_micro_batches(batch, plan, mask, RankContext()) == mine

    class Two(RankContext):
        def data_gather(self, value: Any) -> list[Any]:
            return [value, [[True, True, False], [False, True], [], []]]

    assert still_micro_batches(batch, plan, mask, Two()) == [[True, False, False, False], [False] * 3, [False], []]


def test_ranks_teach_in_the_same_places() -> None:
    """A rank without a group that is alike, and one with nothing else: the empty micro-batches stand where the other
    rank has those of the same kind, so that the first place is still on both."""
    spec = PlanSpec(num_mini_batches=1, tokens_per_micro_batch=100, seed=0, splits_alike=True)
    parts = [([1.0, 0.0], [[], [0, 1]]), ([1.0, 1.0], [[0, 1], []]), ([0.0, 0.0, 0.0, 1.0], [[0, 1], [2, 3]])]
    counts = [([0], [1]), ([1], [0]), ([1], [1])]
    for rewards, expected in parts:
        batch = batch_of([[(2, 1)] * 2] * (len(rewards) // 2), list(range(len(rewards))))
        batch = batch.with_columns(
            rewards=torch.tensor(rewards).double(), temperature=torch.ones(len(rewards)).double()
        )

        assert spec.plan(batch, 0, RankContext(gather=lambda mine: counts), torch.device("cpu")) == [expected]
