"""Admission: no block leaked, none shared by accident, no one starved, whatever the order of events."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.rollout import RolloutRequest, SamplingParams
from hybrid_rl.rollout.inplace.kv_cache import BlockPool
from hybrid_rl.rollout.inplace.scheduler import Scheduler, Sequence


def sequence(identity, length=4, max_tokens=4, group=None):
    return Sequence(RolloutRequest(identity, tuple(range(length)), SamplingParams(max_tokens), group))


def scheduler(num_blocks=100, block_size=4, max_num_seqs=100, max_num_batched_tokens=1000):
    return Scheduler(
        BlockPool(num_blocks),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def forks(prefill):
    return [[member.request.id for member in fork] for fork in prefill.forks]


def test_a_group_is_one_fork_that_shares_its_full_prompt_blocks():
    made = scheduler()
    made.add(sequence(i, length=10, group=1) for i in range(3))
    first, second, third = made.admit().sequences
    assert first.blocks[:2] == second.blocks[:2] == third.blocks[:2]  # 10 tokens: two full blocks of 4
    assert len({*first.blocks[2:], *second.blocks[2:], *third.blocks[2:]}) == 3 * 2
    assert made.pool.num_free == 100 - 2 - 3 * 2
    for member in (first, third, second):
        made.remove(member)
    assert made.pool.num_free == 100


def test_a_prompt_that_fills_its_blocks_is_shared_whole():
    made = scheduler()
    made.add(sequence(i, length=8, group=1) for i in range(2))
    first, second = made.admit().sequences
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, [[0, 1, 2], [3, 4], [5]]),
        ({"max_num_seqs": 2}, [[0, 1]]),
        ({"max_num_batched_tokens": 9}, [[0, 1, 2], [3, 4]]),  # a prompt counts once for its group
        ({"max_num_batched_tokens": 1}, [[0, 1, 2]]),  # the first is always taken, else it would wait for ever
        ({"num_blocks": 5}, [[0, 1, 2]]),  # 4 + 4 tokens are two blocks, one of them shared: 2 + 1 + 1, then 2
        ({"num_blocks": 1}, None),
    ],
)
def test_limits_of_one_admission(limits, expected):
    made = scheduler(**limits)
    made.add([*(sequence(i, group=i // 3) for i in range(5)), sequence(5)])
    prefill = made.admit()
    assert (prefill and forks(prefill)) == expected
    assert [member.request.id for member in made.running] == [i for fork in expected or [] for i in fork]


def test_no_one_overtakes_a_large_request():
    made = scheduler(num_blocks=4)
    made.add([sequence(0), sequence(1, length=12), sequence(2)])
    assert forks(made.admit()) == [[0]]
    assert made.admit() is None
    made.remove(made.running[0])
    assert forks(made.admit()) == [[1]]


def test_what_ran_waits_first_and_in_order_and_is_no_longer_a_group():
    made = scheduler(max_num_seqs=2)
    made.add(sequence(i, group=1) for i in range(3))
    for member in made.admit().sequences:
        member.append(7, -1.0, 1)
    made.requeue_running()
    assert made.pool.num_free == 100
    assert [(member.request.id, member.blocks) for member in made.waiting] == [(0, []), (1, []), (2, [])]
    assert forks(made.admit()) == [[0], [1]]


def test_a_member_with_tokens_of_its_own_shares_with_nobody():
    made = scheduler()
    made.add(sequence(i, group=1) for i in range(3))
    made.admit().sequences[1].append(7, -1.0, 1)
    made.requeue_running()
    assert forks(made.admit()) == [[0], [1], [2]]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 8), st.sampled_from([None, 0, 1])), min_size=1, max_size=12
)
EVENTS = st.lists(st.tuples(st.sampled_from(["admit", "remove", "grow", "requeue"]), st.integers(0, 20)), max_size=40)


def check_ownership(made):
    """A block held by several is a full block of a prompt that they have in common."""
    holders: dict[int, list] = {}
    for member in made.running:
        assert len(member.blocks) == len(set(member.blocks)) == made.blocks_for(member.max_length)
        for place, block in enumerate(member.blocks):
            holders.setdefault(block, []).append((member, place))
    assert made.pool.num_free == made.pool.num_blocks - len(holders)
    for shared in holders.values():
        assert len({place for _, place in shared}) == 1
        if len(shared) > 1:
            assert len({(member.request.group, member.request.prompt_ids) for member, _ in shared}) == 1
            assert (shared[0][1] + 1) * made.block_size <= len(shared[0][0].request.prompt_ids)


@settings(deadline=None)
@given(REQUESTS, EVENTS, st.integers(1, 5), st.integers(20, 30), st.integers(1, 6), st.integers(1, 30))
def test_blocks_are_neither_leaked_nor_shared_by_accident(shapes, events, block_size, room, max_num_seqs, max_tokens):
    made = scheduler(room, block_size, max_num_seqs, max_tokens)
    made.add(sequence(i, *shape) for i, shape in enumerate(shapes))
    for event, number in events:
        if event == "admit":
            made.admit()
        elif event == "requeue":
            made.requeue_running()
        elif made.running:
            member = made.running[number % len(made.running)]
            if event == "remove":
                made.remove(member)
            elif len(member.tokens) < member.request.params.max_tokens:
                member.append(7, -1.0, 1)
        check_ownership(made)
        assert len(made.running) <= max_num_seqs
    seen: Counter[int] = Counter()
    while made.waiting or made.running:
        # Nothing runs: the head of the queue fits, so every request has its turn.
        assert made.running or made.admit() is not None
        seen.update(member.request.id for member in made.running)
        for member in list(made.running):
            made.remove(member)
    assert all(times == 1 for times in seen.values())
    assert made.pool.num_free == room
