"""Adapters merged into engines: the same bits for every number of ranks, after any number of handoffs, and proved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff.merged import Merge, carry_out, check_changes, full_merged, merge
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.resharding.handoff.verify import Verifier
from hybrid_rl.weights.low_rank import LowRank
from tests.unit.resharding.boxes import FLOATS, LAYOUTS, boxes_of, contents
from tests.unit.resharding.handoff.parts import (
    Rig,
    Row,
    empty_engine,
    engine_trace,
    expected,
    globals_of,
    is_equal,
    plan_of,
    run_threads,
    trace_of,
)

ADAPTED = ("embedding", "k", "out", "q")
RANK = 3


def changes_of(tensors, dtype=torch.float32, seed=5):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(dtype).float()

    found = {}
    for name in ADAPTED:
        out, into = tensors[name].shape
        factor = drawn(out) if name == "q" else None
        found[name] = LowRank(drawn(RANK, into), drawn(out, RANK), 0.3, row_factor=factor, dtype=dtype)
    found["out"] = LowRank(drawn(RANK, 6), drawn(8, RANK), 0.3, is_transposed=True, dtype=dtype)
    return found


def one_by_one(change, base):
    """A changed tensor, element by element as its definition says it: every product and every sum is rounded."""
    merged = torch.empty(base.shape)
    for row in range(change.b.shape[0]):
        for column in range(change.a.shape[1]):
            total = torch.zeros(())
            for k in range(change.rank):
                total = total + (change.b[row, k] * change.scale) * change.a[k, column]
            place = (column, row) if change.is_transposed else (row, column)
            total = total + base[place].to(change.dtype).float()
            merged[place] = total if change.row_factor is None else total * change.row_factor[row]
    return merged


def merged_globals(tensors, changes):
    return {name: one_by_one(changes[name], t) if name in changes else t for name, t in tensors.items()}


def rig_of(rank, gather, *, dtype, **shape):
    """With adapters."""
    return Rig(rank, gather, dtype=dtype, changes=changes_of(globals_of(), dtype), **shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_ranks", "num_parts"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_every_part_of_every_engine_has_the_bits_of_the_whole(num_ranks, num_parts, dtype):
    """fp32 shards, and engines in the dtype that the trainer computes in."""

    def work(rank, gather, leave):
        rig = rig_of(rank, gather, num_ranks=num_ranks, num_parts=num_parts, dtype=dtype)
        rig.hand_over(1)
        rig.verify(1)
        return rig.engine

    merged = merged_globals(globals_of(), changes_of(globals_of(), dtype))
    for rank, engine in enumerate(run_threads(work, num_ranks)):
        assert not isinstance(engine, Exception), engine
        assert is_equal(engine, expected(merged, rank % num_parts, num_parts, dtype))


def test_a_change_is_scale_b_a_to_the_last_digits():
    tensors = globals_of()
    for name, change in changes_of(tensors).items():
        delta = change.scale * (change.b.double() @ change.a.double())
        wanted = (delta.T if change.is_transposed else delta) + tensors[name].double()
        if change.row_factor is not None:
            wanted = wanted * change.row_factor.double()[:, None]
        torch.testing.assert_close(one_by_one(change, tensors[name]).double(), wanted, rtol=1e-5, atol=1e-6)


def test_after_a_thousand_handoffs_nothing_has_drifted():
    tensors = globals_of(torch.bfloat16)
    source, trace = TensorSource(tensors), engine_trace(tensors, 0, 1, torch.bfloat16)
    engine, plan = empty_engine(trace), plan_of(trace, source.layout(), 0)
    for version in range(1000):
        source.changes = changes_of(tensors, torch.bfloat16, seed=version)
        with source.opened(version):
            source.deliver(plan, engine)
            merge(trace, engine, source.changes)
    wanted = merged_globals(tensors, changes_of(tensors, torch.bfloat16, seed=999))
    assert is_equal(engine, expected(wanted, 0, 1, torch.bfloat16))
    source.changes = {}
    source.deliver(plan, engine)
    assert is_equal(engine, expected(tensors, 0, 1, torch.bfloat16))


def test_experts_are_changed_where_the_loader_puts_them():
    """A fused tensor of three experts, of which the engine takes two, cut into gate and up."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"experts": torch.randn(3, 4, 5, generator=generator)}
    a, b = torch.randn(3, 2, 5, generator=generator), torch.randn(3, 4, 2, generator=generator)
    change = LowRank(a, b, 0.5)
    rows = [
        Row("experts", (1, 2, 0), (3, 4, 5), "up", (0, 0, 0)),
        Row("experts", (1, 0, 0), (3, 2, 5), "gate", (0, 0, 0)),
    ]
    trace = trace_of(tensors, {"up": (2, 2, 5), "gate": (2, 2, 5)}, rows, torch.float32)
    source, engine = TensorSource(tensors), empty_engine(trace)
    source.changes = {"experts": change}
    source.deliver(plan_of(trace, source.layout(), 0), engine)
    assert merge(trace, engine, source.changes) == 2 * 2 * 2 * 5 * 4
    singles = [one_by_one(LowRank(a[e], b[e], 0.5), tensors["experts"][e]) for e in range(3)]
    whole = torch.stack(singles)
    assert is_equal(engine, [whole[1:, 2:], whole[1:, :2]])
    Verifier(trace, source.layout()).verify(source, engine, version=1)
    assert torch.equal(full_merged(source, "experts"), whole)
    turned = replace(change, a=b.transpose(1, 2).contiguous(), b=a.transpose(1, 2).contiguous(), is_transposed=True)
    source.changes = {"experts": turned}
    torch.testing.assert_close(full_merged(source, "experts"), whole)


SLIPS = {
    "nothing was published": (lambda rig: None, "embedding, k, out, q"),
    "the base was published, the adapters not": (
        lambda rig: rig.source.deliver(rig.plan, rig.engine),
        "embedding, k, out, q",
    ),
    "one bit of a merged weight": (lambda rig: rig.engine[1].view(torch.int32)[0, 0].bitwise_xor_(1), "out"),
    "merged twice": (lambda rig: merge(rig.trace, rig.engine, {"k": rig.source.changes["k"]}), "k"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_what_is_wrong_with_merged_weights_is_found(slip):
    edit, names = SLIPS[slip]

    def work(rank, gather, leave):
        rig = rig_of(rank, gather, num_ranks=2, num_parts=2, dtype=torch.float32)
        rig.hand_over(1)
        if names != "k" and names != "out":  # the next step's adapters, which differ by as little as a step can
            rig.source.changes = {
                name: replace(change, b=change.b * (1 + 1e-6)) for name, change in rig.source.changes.items()
            }
        edit(rig)
        rig.verify(2)

    for error in run_threads(work, 2):
        assert isinstance(error, HandoffError)
        assert f"of participant 0 in {names}" in str(error) and f"of participant 1 in {names}" in str(error)


def test_what_cannot_be_merged_is_refused_before_anything_is_written():
    tensors = globals_of()
    changes = changes_of(tensors)
    layout = TensorSource(tensors).layout()
    check_changes(changes, layout)
    with pytest.raises(HandoffError, match=r"changes head \[8, 6\], but the trainer hands over no such tensor"):
        check_changes({"head": changes["q"]}, layout)
    with pytest.raises(HandoffError, match=r"changes k \[8, 6\], but the trainer has \[4, 6\]"):
        check_changes({"k": changes["q"]}, layout)
    trace = engine_trace(tensors, 0, 1, torch.bfloat16)
    engine = empty_engine(trace)
    with pytest.raises(HandoffError, match="holds qk in torch.bfloat16, but the trainer computes .* in torch.float32"):
        merge(trace, engine, {"q": changes["q"]})
    assert is_equal(engine, empty_engine(trace))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_compiled_operator_has_the_bits_of_its_oracle(dtype, layout, monkeypatch):
    if native.operator("low_rank_merge") is None:
        pytest.skip("the extension was not built")
    boxes, wanted = boxes_of(dtype, layout), boxes_of(dtype, layout)
    assert all(box.is_compiled for box in boxes)
    carry_out(boxes)
    monkeypatch.setattr(native, "operator", lambda name, device_type="cpu": None)
    carry_out(wanted)
    assert is_equal([contents(boxes)], [contents(wanted)])


def test_a_base_that_is_kept_in_a_wider_dtype_is_rounded_first():
    """The trainer computes with the rounded one."""
    base = torch.tensor([[1.0 + 2**-10]])
    change = LowRank(torch.ones(1, 1), torch.full((1, 1), 2.0**-9), 1.0, dtype=torch.bfloat16)
    merge_of = Merge.of(change, base, torch.empty(1, 1), (slice(0, 1), slice(0, 1)))
    assert not merge_of.is_compiled
    carry_out([merge_of])
    assert merge_of.target.item() == 1.0 + 2**-9
