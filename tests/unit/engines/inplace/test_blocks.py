"""The pool of blocks: references as a multiset counts them, prefixes that hold what they claim, the oldest go first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.engines.inplace.blocks import ROOT, BlockPool
from tests.support.inside.engines import block_references, findable_blocks, free_blocks, unheld_blocks

SIZE = 3
NUM_BLOCKS = 8
# Few tokens, so that prompts often begin alike.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class Holders:
    """A pool beside a model of it: who holds which blocks, and what each block holds, the tokens before it included."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.held: list[tuple[list[int], list[int]]] = []  # blocks and tokens
        self.content: dict[int, tuple[int, ...]] = dict.fromkeys(range(NUM_BLOCKS), ())
        self.known: set[tuple[int, ...]] = set()  # prefixes that can be found, as long as nothing was evicted
        self.evicted = False

    def cache(self, tokens: list[int]) -> None:
        """What the scheduler does with a prompt: use what is there, continue or copy a block that is filled in part,
        take the rest, and let what is full now be found."""
        full, rest = divmod(len(tokens), SIZE)
        shared, nodes = self.pool.find(tokens, full)
        place = len(shared) * SIZE
        tail, num_tail = self.pool.find_tail(nodes[-1], tokens[place:][: SIZE - 1])
        for index, block in enumerate(shared):
            assert self.content[block] == tuple(tokens[: (index + 1) * SIZE])
        if num_tail:
            assert self.content[tail][: place + num_tail] == tuple(tokens[: place + num_tail])
        if not self.evicted:  # nothing was lost, so the longest prefix must be found
            starts = [end for end in range(1, len(tokens) + 1) if tuple(tokens[:end]) in self.known]
            whole = max((end for end in starts if end % SIZE == 0), default=0)
            assert len(shared) * SIZE == whole
            assert num_tail == max((end - whole for end in starts if whole < end < whole + SIZE), default=0)
        copied = self.content[tail][: place + num_tail] if num_tail else ()
        if num_tail and self.pool.may_continue(tail, num_tail):
            assert all(tail not in blocks for blocks, _ in self.held)
            shared.append(tail)
        self.pool.share(shared)
        needed = full + bool(rest) - len(shared)
        if needed > self.pool.num_free:
            self.pool.release(shared)
            return
        self.pool.touch(tail)
        fresh = self.pool.take(needed)
        self.evicted |= any(self.content[block] for block in fresh)
        blocks = [*shared, *fresh]
        self.held.append((blocks, tokens))
        assert copied == tuple(tokens[: len(copied)])
        for index in range(len(nodes) - 1, len(blocks)):
            self.content[blocks[index]] = tuple(tokens[: (index + 1) * SIZE])
        for index in range(len(nodes) - 1, full):
            end = (index + 1) * SIZE
            nodes.append(self.pool.remember(nodes[-1], tuple(tokens[end - SIZE : end]), blocks[index]))
            self.known.add(tuple(tokens[:end]))
        if rest:
            self.pool.remember_tail(nodes[full], tuple(tokens[full * SIZE :]), blocks[full])
            self.known.add(tuple(tokens))

    def release(self, number: int) -> None:
        self.pool.release(self.held.pop(number)[0])

    def forget(self) -> None:
        """Who holds blocks has forgotten them too."""
        for blocks, _ in self.held:
            self.pool.release(blocks)
        self.held = []
        self.pool.forget()
        self.content = dict.fromkeys(range(NUM_BLOCKS), ())
        self.known = set()

    def check(self) -> None:
        references = Counter(block for blocks, _ in self.held for block in blocks)
        assert self.pool.num_free == NUM_BLOCKS - len(references)
        assert list(block_references(self.pool)) == [references[block] for block in range(NUM_BLOCKS)]
        free = unheld_blocks(self.pool)
        assert sorted([*free, *references]) == list(range(NUM_BLOCKS))
        for blocks, tokens in self.held:
            for index, block in enumerate(blocks):
                assert self.content[block] == tuple(tokens[: (index + 1) * SIZE])
        for (_, tokens), block in findable_blocks(self.pool).items():
            content = self.content[block]
            own = content[(len(content) - 1) // SIZE * SIZE :]
            assert own[: len(tokens)] == tokens


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("cache"), PROMPTS),
            st.tuples(st.sampled_from(["share", "release"]), st.integers(0, 9)),
            st.tuples(st.just("forget"), st.none()),
        ),
        max_size=50,
    )
)
def test_the_pool_counts_as_a_multiset_does_and_finds_what_it_holds(actions):
    holders = Holders()
    for action, argument in actions:
        if action == "cache":
            holders.cache(argument)
        elif action == "forget":
            holders.forget()
        elif holders.held and action == "share":
            blocks, tokens = holders.held[argument % len(holders.held)]
            holders.pool.share(blocks)
            holders.held.append((list(blocks), tokens))
        elif holders.held:
            holders.release(argument % len(holders.held))
        holders.check()
    while holders.held:
        holders.release(0)
    assert sorted(holders.pool.take(NUM_BLOCKS)) == list(range(NUM_BLOCKS))


def test_more_blocks_than_there_are_is_an_error():
    pool = BlockPool(NUM_BLOCKS, SIZE)
    with pytest.raises(ValueError, match="9 blocks asked for, 8 free"):
        pool.take(9)
    assert pool.num_free == 8


def filled(pool: BlockPool, *tokens: int, parent: int = ROOT) -> tuple[list[int], int]:
    """Blocks for these tokens, findable, with one reference."""
    blocks, node = pool.take(len(tokens) // pool.block_size), parent
    for index, block in enumerate(blocks):
        node = pool.remember(node, tuple(tokens[index * pool.block_size : (index + 1) * pool.block_size]), block)
    return blocks, node


def test_what_nobody_holds_is_found_until_its_memory_is_needed_and_the_oldest_goes_first():
    pool = BlockPool(3, 1)
    (first, second, third) = (filled(pool, token)[0] for token in (10, 20, 30))
    pool.release(second)
    pool.release(first)
    pool.release(third)
    pool.share(pool.find([20], 1)[0])  # used again: now the newest
    pool.release(second)
    order = []
    for _ in range(3):
        order += pool.take(1)
        remaining = [token for token in (10, 20, 30) if pool.find([token], 1)[0]]
        assert remaining == [[20, 30], [20], []][len(order) - 1]
    assert order == [*first, *third, *second]


def test_the_end_of_a_prefix_goes_before_its_start():
    pool = BlockPool(3, 1)
    blocks, _ = filled(pool, 1, 2, 3)
    pool.release(blocks)
    pool.take(1)
    assert pool.find([1, 2, 3], 3)[0] == blocks[:2]


def test_blocks_that_hold_nothing_findable_are_taken_before_any_prefix_is_lost():
    pool = BlockPool(4, 1)
    known, _ = filled(pool, 1, 2)
    plain = pool.take(2)
    pool.release(known)
    pool.release(plain)
    assert sorted(pool.take(2)) == sorted(plain)
    assert pool.find([1, 2], 2)[0] == known


def test_equal_tokens_behind_other_prefixes_are_other_blocks():
    pool = BlockPool(6, 1)
    filled(pool, 1, 9)
    other, _ = filled(pool, 2, 9)
    assert pool.find([2, 9], 2)[0] == other
    assert pool.find([9], 1)[0] == []
    assert pool.find([2, 9], 1)[0] == other[:1]


def test_of_two_blocks_with_the_same_tokens_the_first_is_found():
    pool = BlockPool(4, 1)
    first, node = filled(pool, 5)
    second, same = filled(pool, 5)
    assert node == same
    assert pool.find([5], 1)[0] == first
    longer, _ = filled(pool, 6, parent=same)
    assert pool.find([5, 6], 2)[0] == [*first, *longer]
    pool.release(second)
    assert second[0] in free_blocks(pool)  # it holds nothing that could be found


def test_a_block_filled_in_part_is_found_by_the_most_that_is_known_and_continued_by_one_only():
    pool = BlockPool(3, 4)
    (block,) = pool.take(1)
    pool.remember_tail(ROOT, (7,), block)
    pool.remember_tail(ROOT, (7, 8), block)
    assert pool.find_tail(ROOT, (7, 8, 9)) == (block, 2)
    assert pool.find_tail(ROOT, (7, 9, 9)) == (block, 1)
    assert pool.find_tail(ROOT, (8, 7)) == pool.find_tail(5, (7, 8)) == (-1, 0)
    assert not pool.may_continue(block, 2)  # somebody holds it
    pool.release([block])
    assert pool.may_continue(block, 2)
    assert not pool.may_continue(block, 1)  # who writes its second place destroys what others may find
    full, _ = filled(pool, 7, 8, 1, 2)
    pool.release(full)
    pool.touch(block)  # a copy was made of it: it goes last
    pool.take(1)
    assert pool.take(1) == full
    assert pool.find_tail(ROOT, (7, 8, 9)) == (block, 2)
    pool.take(1)
    assert pool.find_tail(ROOT, (7, 8, 9)) == (-1, 0)


def test_forgotten_prefixes_are_not_found_and_cannot_be_continued():
    pool = BlockPool(4, 1)
    blocks, node = filled(pool, 1, 2)
    pool.release(blocks)
    held, _ = filled(pool, 7)
    pool.forget()
    assert pool.find([1, 2], 2)[0] == pool.find([7], 1)[0] == []
    assert pool.num_free == 3
    pool.release(held)
    assert pool.num_free == 4
    again, new = filled(pool, 1)
    assert new != node
    assert pool.find([1, 2], 2)[0] == again
