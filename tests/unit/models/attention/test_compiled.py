"""The compiled attention of a packed row, beyond the contract that all backends share."""

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.models.attention import compiled
from hybrid_rl.models.attention.attention_function import AttentionOptions
from hybrid_rl.models.attention.compiled import CompiledAttention
from hybrid_rl.models.row import Layout
from tests.support.engines.attention_contract import check_context, eager, inputs

LAYOUT = Layout((35, 6, 20, 4), (3, 8, 1, 40), (0, 0, 1, 1))
pytestmark = pytest.mark.skipif(not compiled.is_available(), reason="the compiled extension was not built")


@pytest.mark.parametrize("head_dim", [1, 8, 24, 32, 64, 80, 128, 512])
@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (7, 1), (6, 3), (8, 1)])
@pytest.mark.parametrize("options", [AttentionOptions(), AttentionOptions(0.3, 9, 1.3)], ids=["plain", "all"])
def test_head_sizes_and_groups(head_dim, num_heads, num_key_value_heads, options):
    shape = {"head_dim": head_dim, "num_heads": num_heads, "num_key_value_heads": num_key_value_heads}
    check_context(CompiledAttention(LAYOUT), LAYOUT, options, "cpu", torch.float32, **shape)


@pytest.mark.parametrize("layout", [Layout((300,)), Layout((257, 1), (130, 33, 17), (0, 0, 1))], ids=["root", "family"])
def test_long_rows(layout):
    check_context(CompiledAttention(layout), layout, AttentionOptions(), "cpu", torch.float32)


def test_values_of_another_size_than_keys():
    query, key, _ = inputs(LAYOUT, torch.float32)
    value = torch.randn(LAYOUT.num_tokens, 2, 40, generator=torch.Generator().manual_seed(3))
    mine = [t.clone().requires_grad_() for t in (query, key, value)]
    exact = [t.double().requires_grad_() for t in (query, key, value)]
    out = CompiledAttention(LAYOUT).attend(0, *mine, AttentionOptions())
    expected = eager(*exact, LAYOUT, AttentionOptions())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    got = torch.autograd.grad(out, mine, direction)
    wanted = torch.autograd.grad(expected, exact, direction.double())
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=3e-5)


def run(threads: int) -> list[torch.Tensor]:
    layout = Layout((64,) * 8, (30, 40, 50, 60) * 4, tuple(i // 2 for i in range(16)))
    rows = [t.requires_grad_() for t in inputs(layout, torch.float32, num_heads=8, num_key_value_heads=4, head_dim=32)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = CompiledAttention(layout).attend(0, *rows, AttentionOptions())
        return [out, *torch.autograd.grad(out.square().sum(), rows)]
    finally:
        torch.set_num_threads(before)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    for left, right in zip(run(1), run(2), strict=True):
        assert torch.equal(left, right)


def test_scores_of_any_size():
    """Softmax of scores around +-1e4: one-hot; nothing overflows and nothing becomes NaN."""
    query, key, value = inputs(LAYOUT, torch.float32)
    rows = [(100 * query).requires_grad_(), (100 * key).requires_grad_(), value.clone().requires_grad_()]
    out = CompiledAttention(LAYOUT).attend(0, *rows, AttentionOptions())
    expected = eager(*(row.detach().double() for row in rows), LAYOUT, AttentionOptions())
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), rows))


def test_what_diverged_in_one_family_stays_there():
    layout = Layout((5, 9), (4, 6), (0, 1))
    rows = inputs(layout, torch.float32)
    rows[1][2] = torch.nan  # a key of the first root
    out = CompiledAttention(layout).attend(0, *rows, AttentionOptions())
    assert out[2:5].isnan().all() and out[14:18].isnan().all()
    assert not out[:2].isnan().any() and not out[5:14].isnan().any() and not out[18:].isnan().any()


BAD = [
    ({"key": torch.zeros(10, 3, 16)}, "a multiple of the key's"),
    ({"query": torch.zeros(9, 4, 16)}, "key must be contiguous float32 [9, 2, 16]"),
    ({"value": torch.zeros(10, 2, 16, dtype=torch.float64)}, "value must be contiguous float32"),
    ({"starts": torch.tensor([0, 6])}, "segment 1 of 5 tokens at 6 lies outside"),
    ({"starts": torch.tensor([0, 4])}, "token 4 is in two segments"),
    ({"tokens": torch.tensor([5, 4])}, "1 tokens are in no segment"),
    ({"starts": torch.tensor([-1, 5])}, "segment 0 of 5 tokens at -1"),
    ({"families": torch.tensor([0, 1])}, "families must run from 0 to the number of segments, 2"),
    ({"families": torch.tensor([0, 0, 2])}, "family 0 has no root"),
    ({"starts": torch.tensor([0, 5], dtype=torch.int32)}, "must be contiguous int64"),
    ({"num_prefix": 4}, "a prefix of 4 tokens must be the first family, alone"),
    ({"num_prefix": 5, "families": torch.tensor([0, 2])}, "a prefix of 5 tokens must be the first family, alone"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=[message for _, message in BAD])
def test_arguments_that_do_not_go_together_are_refused(changed, message):
    arguments = {
        "query": torch.zeros(10, 4, 16),
        "key": torch.zeros(10, 2, 16),
        "value": torch.zeros(10, 2, 16),
        "starts": torch.tensor([0, 5]),
        "tokens": torch.tensor([5, 5]),
        "families": torch.tensor([0, 1, 2]),
        "num_prefix": 0,
    } | changed
    operator = native.operator("packed_attention")
    with pytest.raises(RuntimeError) as caught:
        operator(*arguments.values(), 1.0, 0, 0.0)
    assert message in str(caught.value)
