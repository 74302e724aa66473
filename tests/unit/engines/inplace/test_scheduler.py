"""The scheduler by hand, and against a memory that remembers which tokens were written where."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.engines.base import Counters, RolloutRequest, SamplingParams
from hybrid_rl.engines.inplace.blocks import BlockPool
from hybrid_rl.engines.inplace.scheduler import Chunk, Scheduler, Sequence
from hybrid_rl.engines.inplace.slots import SlotTable
from tests.support.inside.engines import free_blocks, preempt


def sequence(identity, length=4, max_tokens=4, group=None, *, start=None):
    """Prompts of equal `start` begin alike; without one they begin differently."""
    start = 1000 * (identity + 1) if start is None else start
    return Sequence(RolloutRequest(identity, tuple(range(start, start + length)), SamplingParams(max_tokens), group))


def continued(member, identity, num_new, max_tokens=4, **settings):
    """The next turn of a conversation: all of the last one, and new tokens of the environment."""
    new = tuple(-1000 * (identity + 1) - place for place in range(num_new))
    prompt = (*member.request.prompt_ids, *member.tokens, *new)
    return Sequence(RolloutRequest(identity, prompt, SamplingParams(max_tokens), **settings))


def group(number, count, length=4, **settings):
    """`count` samples of one prompt."""
    return [sequence(10 * number + i, length, group=number, start=1000 * number, **settings) for i in range(count)]


def scheduler(
    num_blocks=100,
    block_size=4,
    max_num_seqs=100,
    max_num_batched_tokens=1000,
    remember_prefixes=True,
    shares_decoding=False,
):
    return Scheduler(
        BlockPool(num_blocks, block_size),
        SlotTable(max_num_seqs, num_blocks),
        max_num_batched_tokens=max_num_batched_tokens,
        remember_prefixes=remember_prefixes,
        shares_decoding=shares_decoding,
        counters=Counters(),
    )


class Driver:
    """Runs passes in the engine's place. memory[block][offset] is the text up to and with the token whose keys lie
    there, so a sequence that reads another's place, or a stale one, is seen at once."""

    def __init__(self, made: Scheduler, next_token=None) -> None:
        self.made = made
        self.next_token = next_token or (lambda member: 10**6 * (member.request.id + 1) + len(member.tokens))
        size = made.pool.block_size
        self.memory: list[list[tuple[int, ...] | None]] = [[None] * size for _ in range(made.pool.num_blocks)]
        self.finished: list[int] = []

    def __call__(self) -> list[tuple[list[int], int, int]]:
        """One pass: (ids of a chunk and its followers, start, count) of each chunk."""
        chunks = self.made.schedule()
        self.check_limits(chunks)
        self.run(chunks)
        return [([m.request.id for m in (c.sequence, *c.followers)], c.start, c.count) for c in chunks]

    def run(self, chunks: list[Chunk]) -> None:
        copied = [(chunk, list(self.memory[chunk.copied_block])) for chunk in chunks if chunk.copied_block >= 0]
        for chunk, content in copied:
            self.memory[chunk.sequence.blocks[chunk.start // self.made.pool.block_size]] = content
        for chunk in chunks:
            for place in range(chunk.start, chunk.start + chunk.count):
                self.write(chunk.sequence, place)
        for chunk in chunks:
            self.check_content(chunk.sequence, chunk.start + chunk.count)
        self.made.complete(chunks)
        for member in [member for chunk in chunks for member in chunk.sampled]:
            self.check_content(member, member.num_cached)
            assert member.num_cached == member.num_tokens
            member.tokens.append(self.next_token(member))
            self.made.slots.length[member.slot] += 1
            if len(member.tokens) == member.request.params.max_tokens:
                self.made.remove(member)
                self.finished.append(member.request.id)

    def write(self, member: Sequence, place: int) -> None:
        size = self.made.pool.block_size
        self.memory[member.blocks[place // size]][place % size] = tuple(member.context(0, place + 1))

    def check_content(self, member: Sequence, num_tokens: int) -> None:
        size = self.made.pool.block_size
        table = self.made.slots.blocks[member.slot]
        assert table[: len(member.blocks)].tolist() == member.blocks
        for place in range(num_tokens):
            assert self.memory[table[place // size]][place % size] == tuple(member.context(0, place + 1))

    def check_limits(self, chunks: list[Chunk]) -> None:
        made = self.made
        # The last token of a prompt costs as little as one that decodes.
        computed = sum(chunk.count for chunk in chunks if chunk.count > 1 or not chunk.is_last)
        assert computed <= made.max_num_batched_tokens
        members = [member for chunk in chunks for member in (chunk.sequence, *chunk.followers)]
        assert len(members) == len({id(member) for member in members})
        assert all(member in made.running for member in members)
        assert all(chunk.count >= 1 for chunk in chunks)
        self.check_ownership()

    def check_ownership(self) -> None:
        made = self.made
        slots = [member.slot for member in made.running]
        assert len(set(slots)) == len(slots) == made.slots.num_slots - made.slots.num_free
        holders = Counter(block for member in made.running for block in member.blocks)
        assert made.pool.num_free == made.pool.num_blocks - len(holders)
        for member in made.running:
            assert len(set(member.blocks)) == len(member.blocks) >= made.blocks_for(member.num_cached)
            # What is written from now on lies in a block of its own, or of those that have the same tokens.
            stem = [other for other in made.running if other.stem == member.stem >= 0] or [member]
            for block in member.blocks[member.num_cached // made.pool.block_size :]:
                assert holders[block] == sum(block in other.blocks for other in stem)
            for other in stem:
                assert (other.blocks, other.num_cached) == (member.blocks, member.num_cached)
                assert other.context(0, other.num_cached) == member.context(0, member.num_cached)
        for member in made.waiting:
            assert (member.slot, member.blocks, member.num_cached) == (-1, [], 0)


# ------------------------------------------------------------------------------------------------------ admission


def test_a_group_is_one_chunk_and_shares_its_full_blocks():
    made = scheduler()
    made.add(group(0, 3, length=10))
    drive = Driver(made)
    assert drive() == [([0, 1, 2], 0, 10)]
    first, second, third = made.running
    assert first.blocks == second.blocks == third.blocks  # 10 tokens: two full blocks of 4, and a part of one
    assert made.pool.num_free == 100 - 3
    assert drive() == [([0], 10, 1), ([1], 10, 1), ([2], 10, 1)]
    assert first.blocks[:2] == second.blocks[:2] == third.blocks[:2]
    assert len({first.blocks[2], second.blocks[2], third.blocks[2]}) == 3
    assert made.pool.num_free == 100 - 2 - 3
    for member in (first, third, second):
        made.remove(member)
    assert (made.pool.num_free, made.slots.num_free) == (100, 100)


def test_a_prompt_that_fills_its_blocks_is_shared_whole():
    made = scheduler()
    made.add(group(0, 2, length=8))
    drive = Driver(made)
    drive()
    first, second = made.running
    assert first.blocks == second.blocks
    drive()
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]


def test_samples_with_the_same_tokens_decode_as_one_until_they_part():
    made = scheduler(shares_decoding=True)
    made.add(group(0, 4, length=6, max_tokens=9))
    parted_at = {0: 9, 1: 9, 2: 2, 3: 1}  # 3 parts from the others with its second token, 2 with its third

    def next_token(member):
        place = len(member.tokens)
        return place if place < parted_at[member.request.id] else 100 * member.request.id + place

    drive = Driver(made, next_token)
    assert drive() == [([0, 1, 2, 3], 0, 6)]
    assert drive() == [([0, 1, 2, 3], 6, 1)]
    first, second, third, fourth = made.running
    assert first.blocks == fourth.blocks and made.pool.num_free == 100 - 2
    assert drive() == [([0, 1, 2], 7, 1), ([3], 7, 1)]
    assert first.blocks == third.blocks and first.blocks[0] == fourth.blocks[0]
    assert first.blocks[1] != fourth.blocks[1] and made.pool.num_free == 100 - 3
    # The next block of all begins where 2 parts, so nothing is copied.
    chunks = made.schedule()
    assert [chunk.copied_block for chunk in chunks] == [-1, -1, -1]
    assert [[member.request.id for member in chunk.sampled] for chunk in chunks] == [[0, 1], [2], [3]]
    drive.run(chunks)
    while made.running:
        drive()
    assert made.pool.num_free == 100 and first.tokens == second.tokens != third.tokens
    assert made.counters.num_shared_prompt_tokens == 3 * 6


def test_who_leaves_or_has_to_go_leaves_those_of_the_same_tokens_alone():
    made = scheduler(num_blocks=5, shares_decoding=True)
    made.add(group(0, 3, length=5, max_tokens=9))
    drive = Driver(made, lambda member: len(member.tokens))
    assert drive() == [([0, 1, 2], 0, 5)]
    made.remove(made.running[0])
    assert drive() == [([1, 2], 5, 1)]
    preempt(made, made.running[-1])
    assert drive() == [([1], 6, 1), ([2], 6, 1)]
    while made.running or made.waiting:
        drive()
    assert sorted(drive.finished) == [1, 2] and made.pool.num_free == 5


def test_those_that_part_without_a_free_block_wait():
    made = scheduler(num_blocks=4, shares_decoding=True)
    made.add(group(0, 3, length=5, max_tokens=3))
    drive = Driver(made)
    assert drive() == [([0, 1], 0, 5)]  # two blocks, and one for each that may part
    assert drive() == [([0], 5, 1), ([1], 5, 1)]
    while made.running or made.waiting:
        drive()
    assert sorted(drive.finished) == [0, 1, 2]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, [([0, 1, 2], 0, 4), ([10, 11], 0, 4), ([5], 0, 4)]),
        ({"max_num_seqs": 2}, [([0, 1], 0, 4)]),
        ({"max_num_batched_tokens": 9}, [([0, 1, 2], 0, 4), ([10, 11], 0, 4), ([5], 0, 1)]),
        ({"max_num_batched_tokens": 4}, [([0, 1, 2], 0, 4)]),  # a prompt counts once for its group
        ({"max_num_batched_tokens": 3}, [([0], 0, 3)]),  # the others of its group wait for its end
        ({"num_blocks": 4}, [([0, 1, 2], 0, 4)]),  # whoever runs may need a block soon: three of them, and one is left
        ({"num_blocks": 5}, [([0, 1, 2], 0, 4), ([10], 0, 4)]),
    ],
    ids=str,
)
def test_limits_of_one_pass(limits, expected):
    made = scheduler(**limits)
    made.add([*group(0, 3), *group(1, 2), sequence(5)])
    assert Driver(made)() == expected


def test_nobody_overtakes_a_large_request():
    made = scheduler(num_blocks=4)
    made.add([sequence(1), sequence(2, length=14, max_tokens=2), sequence(3)])
    drive = Driver(made)
    assert drive() == [([1], 0, 4)]
    while 1 not in drive.finished:
        assert [ids for ids, _, _ in drive()] == [[1]]
    assert drive() == [([2], 0, 14)]


# ------------------------------------------------------------------------------------------------- chunked prefill


def test_a_long_prompt_comes_in_chunks_beside_those_that_decode():
    made = scheduler(max_num_batched_tokens=5)
    made.add([sequence(1, length=3), *group(2, 2, length=9), sequence(4, length=4)])
    drive = Driver(made)
    assert drive() == [([1], 0, 3), ([20], 0, 2)]
    assert drive() == [([1], 3, 1), ([20], 2, 5)]  # the decoding one costs no budget
    # The prompt ends: its group joins, and the next prompt uses the rest of the budget.
    assert drive() == [([1], 4, 1), ([20, 21], 7, 2), ([4], 0, 3)]
    assert drive() == [([1], 5, 1), ([20], 9, 1), ([21], 9, 1), ([4], 3, 1)]
    assert drive.finished == [1]


def test_a_group_whose_leader_left_in_the_middle_starts_from_what_it_left():
    made = scheduler(max_num_batched_tokens=6)
    made.add(group(0, 3, length=10))
    drive = Driver(made)
    assert drive() == [([0], 0, 6)]
    made.remove(made.running[0])
    assert drive() == [([1, 2], 6, 4)]
    assert made.counters.num_prefix_tokens == 6


# ------------------------------------------------------------------------------------------------------- prefixes


def test_prompts_that_begin_alike_share_full_blocks_also_within_a_pass():
    made = scheduler()
    made.add([sequence(1, 10, start=0), sequence(2, 14, start=0), sequence(3, 10, start=1)])
    drive = Driver(made)
    assert drive() == [([1], 0, 10), ([2], 8, 6), ([3], 0, 10)]
    assert made.counters.num_prefix_tokens == 8
    first, second, third = made.running
    assert second.blocks[:2] == first.blocks[:2] and not set(third.blocks) & set(first.blocks)


@pytest.mark.parametrize(("length", "start"), [(8, 4), (9, 8), (11, 8), (12, 8), (13, 12)])
def test_the_last_token_is_always_computed(length, start):
    made = scheduler()
    made.add([sequence(1, 16, start=0, max_tokens=9)])
    drive = Driver(made)
    drive()
    made.add([sequence(2, length, start=0)])
    assert drive()[1] == ([2], start, length - start)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_turn_computes_what_is_new_and_the_last_token_of_the_turn_before(block_size):
    made = scheduler(num_blocks=400, block_size=block_size)
    drive = Driver(made)
    member = sequence(0, 5, max_tokens=3)
    for turn in range(12):
        made.add([member])
        known = made.counters.num_prefix_tokens
        ((ids, start, count),) = drive()
        assert (ids, start + count) == ([turn], len(member.request.prompt_ids))
        assert count == (5 if turn == 0 else 1 + (7 * turn) % 10)
        assert made.counters.num_prefix_tokens - known == start
        while made.running:
            drive()
        member = continued(member, turn + 1, (7 * turn + 7) % 10, max_tokens=1 + (5 * turn) % 9)
    assert made.pool.num_free == made.pool.num_blocks


def test_of_two_continuations_one_takes_the_last_block_and_the_other_a_copy():
    made = scheduler()
    first = sequence(1, 9, max_tokens=2)  # nine tokens and one of two generated: two blocks, and two places of a third
    made.add([first])
    drive = Driver(made)
    drive()
    block = made.running[0].blocks[2]
    drive()
    made.add([continued(first, number, 3) for number in (2, 3)])
    assert drive() == [([2], 10, 4), ([3], 10, 4)]
    second, third = made.running
    assert second.blocks[2] == block != third.blocks[2]
    assert second.blocks[:2] == third.blocks[:2]
    while made.running:
        drive()
    # The block holds the second's tokens by now, and can be found by them: it is copied once more.
    made.add([continued(first, 4, 5), continued(second, 5, 1), continued(third, 6, 1)])
    assert drive() == [([4], 10, 6), ([5], 17, 2), ([6], 17, 2)]
    assert made.running[0].blocks[2] != block == made.running[1].blocks[2]


@pytest.mark.parametrize("num_new", [1, 3])
def test_a_copy_is_made_of_a_block_that_the_same_pass_gives_away(num_new):
    """No block is free that holds nothing. The third of them, which the second conversation filled, becomes its own
    copy, or the fourth block of who copies it."""
    made = scheduler(num_blocks=3 if num_new == 1 else 4)
    first = sequence(1, 9, max_tokens=2)
    drive = Driver(made)
    made.add([first])
    while made.running or made.waiting:
        drive()
    made.add([continued(first, 2, 1, max_tokens=num_new)])
    (chunk,) = made.schedule()
    source = chunk.sequence.blocks[2]
    assert (chunk.start, chunk.count, chunk.copied_block) == (10, 2, -1)
    drive.run([chunk])
    while made.running:
        drive()
    assert not free_blocks(made.pool)
    made.add([continued(first, 3, num_new, max_tokens=2)])
    (chunk,) = made.schedule()
    assert (chunk.start, chunk.count, chunk.copied_block) == (11, num_new, source)
    assert source in chunk.sequence.blocks[2:]
    drive.run([chunk])


def test_who_had_to_go_computes_its_newest_token_only_if_its_blocks_are_still_there():
    made = scheduler(num_blocks=7)
    made.add([sequence(1, 4, max_tokens=6), sequence(2, 4, max_tokens=8)])
    drive = Driver(made)
    for _ in range(4):
        drive()
    preempt(made, made.running[-1])
    assert drive() == [([1], 7, 1), ([2], 7, 1)]
    assert (made.counters.num_preemptions, made.counters.num_prefix_tokens, made.counters.num_prompt_tokens) == (
        1,
        7,
        8,
    )


def test_priorities_decide_who_starts_and_nobody_passes_who_had_to_make_room():
    made = scheduler(num_blocks=5, max_num_seqs=2)
    prompts = {number: sequence(number, 4, max_tokens=8) for number in range(1, 7)}
    for number, priority in ((1, 5), (2, 5), (3, 9), (4, 7), (5, 7), (6, 8)):
        request = replace(prompts[number].request, priority=priority)
        made.add([Sequence(request)])
    assert [member.request.id for member in made.waiting] == [1, 2, 4, 5, 6, 3]
    drive = Driver(made)
    while not made.counters.num_preemptions:
        drive()
    made.add([Sequence(replace(sequence(7).request, priority=0))])
    assert [member.request.id for member in made.waiting] == [2, 7, 4, 5, 6, 3]
    while made.waiting or made.running:
        drive()
    assert drive.finished == [1, 2, 7, 4, 5, 6, 3]


def test_prefixes_are_not_looked_for_where_that_is_switched_off():
    made = scheduler(remember_prefixes=False)
    made.add([sequence(1, 10, start=0), sequence(2, 10, start=0), *group(3, 2, length=9)])
    assert Driver(made)() == [([1], 0, 10), ([2], 0, 10), ([30, 31], 0, 9)]
    assert made.counters.num_prefix_tokens == 0


def test_memory_of_prefixes_makes_room_and_comes_back_empty():
    made = scheduler(num_blocks=4)
    drive = Driver(made)
    for number in range(6):
        made.add([sequence(number, 9, max_tokens=2)])
        assert drive() == [([number], 0, 9)]
        drive()
    assert made.pool.num_free == 4
    made.add([sequence(6, 9, start=6000)])
    assert drive() == [([6], 8, 1)]


# --------------------------------------------------------------------------------------------- too large for memory


def test_a_pass_that_does_not_fit_is_made_smaller_by_what_it_is_made_of():
    made = scheduler(max_num_batched_tokens=64, max_num_seqs=8)
    made.add([sequence(1, length=40), *(sequence(number) for number in range(2, 7))])
    chunks = made.schedule()
    assert made.halve(chunks) and (made.max_num_batched_tokens, made.max_running) == (30, 8)  # 40 and 5 times 4 tokens
    Driver(made).run(chunks)
    chunks = made.schedule()
    assert made.halve(chunks) and (made.max_num_batched_tokens, made.max_running) == (30, 3)  # six that decode
    made.requeue_running()
    assert len(made.schedule()) <= 3
    made = scheduler()
    made.add([sequence(1)])
    assert not made.halve(made.schedule())


# ------------------------------------------------------------------------------------------------------ preemption


def test_the_newest_makes_room_waits_first_and_is_computed_again():
    made = scheduler(num_blocks=4)
    made.add([sequence(1, 4, max_tokens=8), sequence(2, 4, max_tokens=8), sequence(3, 4)])
    drive = Driver(made)
    assert drive() == [([1], 0, 4), ([2], 0, 4)]  # 2 blocks are left, but 1 and 2 need them
    for _ in range(4):
        assert [ids for ids, _, _ in drive()] == [[1], [2]]
    assert (made.counters.num_preemptions, made.pool.num_free) == (0, 0)
    assert drive() == [([1], 8, 1)]
    assert made.counters.num_preemptions == 1
    assert [member.request.id for member in made.waiting] == [2, 3]
    while not drive.finished:
        assert [ids for ids, _, _ in drive()] == [[1]]
    assert drive() == [([2], 4, 5)]  # 4 + 5 tokens; the first block was not needed by anybody and is still known
    assert (made.counters.num_preemptions, made.counters.num_prefix_tokens) == (1, 4)


def test_nobody_is_admitted_in_a_pass_in_which_somebody_had_to_go():
    """2 gives its two blocks back for want of a third; a chunk of it would fit into them at once, only to go again."""
    made = scheduler(num_blocks=5, block_size=2, max_num_batched_tokens=2, remember_prefixes=False)
    made.add([sequence(1, 2, max_tokens=8), sequence(2, 2, max_tokens=8)])
    drive = Driver(made)
    assert drive() == [([1], 0, 2)]
    assert drive() == [([1], 2, 1), ([2], 0, 2)]
    drive()
    assert drive() == [([1], 4, 1), ([2], 3, 1)]
    assert drive() == [([1], 5, 1)]
    assert (made.counters.num_preemptions, made.pool.num_free) == (1, 2)


def test_without_prefixes_a_sequence_that_had_to_go_is_computed_from_its_start():
    made = scheduler(num_blocks=5, remember_prefixes=False)
    made.add([sequence(1, 4, max_tokens=8), sequence(2, 4, max_tokens=8)])
    drive = Driver(made)
    while not drive.finished:
        drive()
    assert drive() == [([2], 0, 9)]
    while made.running:
        drive()
    assert drive.finished == [1, 2]


# ------------------------------------------------------------------------------------------------------- new weights


def test_what_ran_waits_first_and_in_order_and_shares_no_more():
    made = scheduler(max_num_seqs=2)
    made.add(group(0, 3))
    drive = Driver(made)
    drive()
    made.requeue_running()
    assert made.pool.num_free == 100
    assert [(member.request.id, member.blocks) for member in made.waiting] == [(0, []), (1, []), (2, [])]
    assert drive() == [([0], 0, 5), ([1], 4, 1)]  # the first four tokens are the same prompt, newly computed


# ------------------------------------------------------------------------------------------------------- everything

# (length, most tokens, group or None, where the prompt starts)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 8), st.sampled_from([None, 0, 1]), st.integers(0, 1)),
    min_size=1,
    max_size=10,
)
EVENTS = st.lists(
    st.sampled_from(["pass", "pass", "pass", "pass", "abort", "continue", "continue", "requeue", "forget"]),
    max_size=40,
)


@settings(deadline=None, max_examples=250)
@given(
    REQUESTS,
    EVENTS,
    st.integers(1, 5),
    st.integers(0, 8),
    st.integers(1, 5),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
    st.integers(1, 9),
)
def test_everybody_finishes_and_reads_only_its_own_text(
    shapes, events, block_size, spare, max_num_seqs, max_tokens, remember, shares, parts_at
):
    members = [
        sequence(i, length, most, group, start=100 * start) for i, (length, most, group, start) in enumerate(shapes)
    ]
    # Conversations go on once or twice, by a prompt of one to three new tokens and a completion as long.
    longest = max(len(m.request.prompt_ids) + m.request.params.max_tokens for m in members) + 12
    made = scheduler(-(-longest // block_size) + spare, block_size, max_num_seqs, max_tokens, remember, shares)
    made.add(members)

    def next_token(member):
        """Samples have the same tokens up to a place, and then one of two."""
        place = len(member.tokens)
        return 10**6 + place if place < parts_at else 10**7 * (1 + member.request.id % 2) + place

    drive = Driver(made, next_token)
    aborted = set()
    for number, event in enumerate(events):
        ended = [m for m in members if m.slot < 0 and m.tokens and m not in made.waiting]
        ended = [m for m in ended if len(m.request.prompt_ids) + len(m.tokens) <= longest - 6]
        if event == "abort" and made.running:
            leaving = made.running[number % len(made.running)]
            made.remove(leaving)
            aborted.add(leaving.request.id)
        elif event == "continue" and ended:
            new = 1 + number % 3
            member = continued(ended[number % len(ended)], len(members), new, max_tokens=new, priority=number % 4)
            members.append(member)
            made.add([member])
        elif event == "requeue":
            made.requeue_running()
        elif event == "forget" and not made.running:
            made.pool.forget()
        else:
            drive()
        drive.check_ownership()
    for _ in range(2000):
        if not made.waiting and not made.running:
            break
        assert drive(), "something waits, and nothing runs"
    assert sorted(drive.finished) == sorted({m.request.id for m in members} - aborted)
    assert (made.pool.num_free, made.slots.num_free) == (made.pool.num_blocks, max_num_seqs)
    drive.check_ownership()
