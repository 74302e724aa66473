"""Blocks and their references; slots of the paged cache; one-token attention against the whole sequence."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.models import AttentionOptions, PackedAttention
from hybrid_rl.rollout.inplace.kv_cache import BlockPool, DecodeAttention, LayerShape, PagedCache, PrefillAttention

SHAPE = LayerShape(num_heads=2, key_dim=8, value_dim=6, dtype=torch.float64)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_the_pool_counts_as_a_multiset_does(actions):
    """Model: every holder's blocks in a list; a block is free while no list names it."""
    pool, holders = BlockPool(8), []
    for action, number in actions:
        if action == "take" and number <= pool.num_free:
            holders.append(pool.take(number))
        elif action == "share" and holders:
            shared = list(holders[number % len(holders)])
            pool.share(shared)
            holders.append(shared)
        elif action == "release" and holders:
            pool.release(holders.pop(number % len(holders)))
        held = Counter(block for blocks in holders for block in blocks)
        assert pool.num_free == 8 - len(held)
    fresh = pool.take(pool.num_free)
    assert len(set(fresh)) == len(fresh)
    assert not set(fresh) & set(held if actions else ())
    for blocks in [fresh, *holders]:
        pool.release(blocks)
    assert sorted(pool.take(8)) == list(range(8))


def test_more_blocks_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="9 blocks asked for, 8 free"):
        BlockPool(8).take(9)


def cache(num_blocks=6, block_size=4):
    made = PagedCache({0: SHAPE, 3: SHAPE}, num_blocks, block_size, torch.device("cpu"))
    made.allocate()
    return made


def test_bytes_by_hand():
    made = cache()
    assert made.num_bytes == 6 * 4 * 2 * (2 * (8 + 6) * 8)
    assert made.num_bytes == sum(t.nbytes for t in (*made._keys.values(), *made._values.values()))
    made.free()
    assert not made.is_allocated


def test_tokens_are_read_from_where_they_were_written_or_copied():
    made, slots = cache(), torch.tensor([5, 2, 19])
    key, value = torch.randn(3, 2, 8).double(), torch.randn(3, 2, 6).double()
    made.write(3, slots, key, value)
    made.copy_slots(torch.tensor([2, 19]), torch.tensor([11, 0]))
    keys, values = made.read(3, torch.tensor([[5, 11], [0, 2]]))
    rows = torch.tensor([[0, 1], [2, 1]])
    torch.testing.assert_close(keys, key[rows].transpose(1, 2), rtol=0, atol=0)
    torch.testing.assert_close(values, value[rows].transpose(1, 2), rtol=0, atol=0)
    assert not made.read(0, torch.tensor([[5]]))[0].any()


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(scale=0.7, window=3),
        AttentionOptions(softcap=1.2),
        AttentionOptions(window=1),
    ],
    ids=["plain", "window", "softcap", "window 1"],
)
def test_prefill_and_then_one_token_at_a_time_equal_the_whole_at_once(options):
    """Two sequences of 9 and 6 tokens; 5 and 2 of them prefilled, the rest decoded together; blocks out of order."""
    lengths, prefilled = [9, 6], [5, 2]
    q, k, v = (torch.randn(15, heads, dim).double() for heads, dim in ((4, 8), (2, 8), (2, 6)))
    starts = [0, 9]
    whole = PackedAttention(lengths).attend(0, q, k, v, options)
    made = cache()
    places = [torch.tensor(blocks)[:, None] * 4 + torch.arange(4) for blocks in ([4, 0, 2], [3, 5, 1])]
    slots = torch.stack([place.reshape(-1) for place in places])

    def rows(begin, end):
        return torch.cat([torch.arange(s + b, s + e) for s, b, e in zip(starts, begin, end, strict=True)])

    first = rows([0, 0], prefilled)
    prefill = PrefillAttention(made, prefilled, torch.cat([slots[0, :5], slots[1, :2]]))
    torch.testing.assert_close(prefill.attend(0, q[first], k[first], v[first], options), whole[first])
    for step in range(4):
        at = torch.tensor(prefilled) + step
        now = rows(at.tolist(), (at + 1).tolist())
        decode = DecodeAttention(made, slots[:, : int(at.max()) + 1], at)
        torch.testing.assert_close(decode.attend(0, q[now], k[now], v[now], options), whole[now])
