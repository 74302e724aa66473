"""Properties of the plan: whole groups, a hard cap, every sample once, a function of its arguments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.errors import DataError
from hybrid_rl.models import PackedRow
from hybrid_rl.workers.plan import make_plan


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
    plan = make_plan(batch, **arguments)

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
    assert make_plan(batch, **arguments) == plan


def test_seed_decides_which_groups_share_a_mini_batch() -> None:
    batch = batch_of([[(1, 1)]] * 12, list(range(12)))
    plans = {str(make_plan(batch, prompts_per_mini_batch=4, tokens_per_micro_batch=99, seed=seed)) for seed in range(8)}
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
    (plan,) = make_plan(batch, prompts_per_mini_batch=2, tokens_per_micro_batch=cap, seed=0)
    groups = batch["group"].tolist()
    found = [[sum(groups[row] == group for row in micro) for group in (10, 11)] for micro in plan]
    assert sorted([count for count in counts if count] for counts in found) == sorted(sizes)


def test_equal_prompts_of_two_groups_are_one() -> None:
    batch = batch_of([[(10, 3)], [(10, 3)]], [0, 1])
    assert make_plan(batch, prompts_per_mini_batch=2, tokens_per_micro_batch=16, seed=0) == [[[0, 1]]]


def test_a_sample_over_the_cap_is_refused_with_its_own_size() -> None:
    batch = batch_of([[(10, 3), (10, 9), (10, 0)]], [0, 1, 2])
    with pytest.raises(DataError, match="has 19 tokens, but max_tokens=18"):
        make_plan(batch, prompts_per_mini_batch=1, tokens_per_micro_batch=18, seed=0)
