"""Properties of the plan: whole groups, a hard cap, every sample once, a function of its arguments."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.batch import Batch, Jagged
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
            micro_lengths = [lengths[row] for row in micro]
            assert 0 < sum(micro_lengths) <= cap
            assert micro_lengths == sorted(micro_lengths, reverse=True)
    assert make_plan(batch, **arguments) == plan


def test_seed_decides_which_groups_share_a_mini_batch() -> None:
    batch = batch_of([[(1, 1)]] * 12, list(range(12)))
    plans = {str(make_plan(batch, prompts_per_mini_batch=4, tokens_per_micro_batch=99, seed=seed)) for seed in range(8)}
    assert len(plans) == 8
