"""Whatever is wrong with an engine's weights is found, and named, on every participant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff.base import PeerError
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.resharding.handoff.verify import Verifier
from hybrid_rl.resharding.trace import Fills
from tests.support.inside.workers import reading_of
from tests.unit.resharding.handoff.parts import (
    Rig,
    Row,
    empty_engine,
    engine_trace,
    globals_of,
    plan_of,
    run_threads,
    trace_of,
)

DTYPES = [torch.float32, torch.bfloat16]


def outcomes(work, num_ranks=2):
    """The messages of all ranks' errors; all must fail."""
    found = run_threads(work, num_ranks)
    assert all(isinstance(error, HandoffError) for error in found), found
    return [str(error) for error in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "num_parts", "replicas"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 2), (3, 1, 1)]
)
def test_engines_that_hold_the_weights_pass(num_ranks, num_parts, replicas, dtype):
    def work(rank, gather, leave):
        rig = Rig(rank, gather, num_ranks=num_ranks, num_parts=num_parts, dtype=dtype, replicas=replicas)
        for version in range(3):
            for shard in rig.shards.values():
                shard.mul_(1.5)
            rig.hand_over(version)
            rig.verify(version)
        reading = reading_of(rig.verifier)
        num_read = int(reading.shape.prod(axis=1).sum())
        return len(set(reading.parameter.tolist())), num_read, sum(tensor.numel() for tensor in rig.engine)

    for result in run_threads(work, num_ranks):
        assert not isinstance(result, Exception), result
        num_tensors, num_read, num_elements = result
        assert (num_tensors, num_read) == (6, num_elements)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_found_on_every_rank(dtype, num_parts):
    def work(rank, gather, leave):
        rig = Rig(rank, gather, num_ranks=2, num_parts=num_parts, dtype=dtype)
        rig.hand_over(1)
        rig.verify()
        if rank == 1:
            rig.engine[0].view(torch.uint8)[-1, 0] ^= 1  # the last row of q and k is one of k
        rig.verify()

    for message in outcomes(work):
        assert message.startswith(
            "engines do not hold the trainer's weights of policy version 1: that of participant 1 in k. Nothing may"
        )


def test_a_parameter_that_was_not_written_is_named():
    def work(rank, gather, leave):
        rig = Rig(rank, gather, num_ranks=2, num_parts=2)
        names = [sharded.spec.name for sharded in rig.source.layout().tensors]
        buckets = [
            replace(bucket, pieces=bucket.pieces.select(bucket.pieces.source != names.index("out")))
            for bucket in rig.plan.buckets
        ]
        rig.hand_over(1, replace(rig.plan, buckets=tuple(buckets)))
        rig.verify()

    for message in outcomes(work):
        assert "that of participant 0 in out; that of participant 1 in out. " in message


def test_two_parameters_that_a_plan_swaps_are_named():
    """Every element is written once, as the plan says: only the sources' own layout shows that it is wrong."""
    tensors = {"a": torch.randn(4, 3), "b": torch.randn(4, 3)}
    trace = trace_of(
        tensors,
        {"ab": (8, 3)},
        [Row("a", (0, 0), (4, 3), "ab", (0, 0)), Row("b", (0, 0), (4, 3), "ab", (4, 0))],
        torch.float32,
    )
    source = TensorSource(tensors)
    plan, engine = plan_of(trace, source.layout(), 0), empty_engine(trace)
    verifier = Verifier(trace, source.layout())
    source.deliver(plan, engine)
    verifier.verify(source, engine, version=1)
    swapped = [replace(b, pieces=replace(b.pieces, source=1 - b.pieces.source)) for b in plan.buckets]
    source.deliver(replace(plan, buckets=tuple(swapped)), engine)
    assert torch.equal(engine[0], torch.cat([tensors["b"], tensors["a"]]))
    with pytest.raises(HandoffError, match=r"that of participant 0 in a, b\."):
        verifier.verify(source, engine, version=2)


def test_elements_that_are_shifted_or_transposed_are_found():
    tensors = {"square": torch.randn(6, 6)}
    trace = trace_of(tensors, {"square": (6, 6)}, [Row("square", (0, 0), (6, 6), "square", (0, 0))], torch.float32)
    source = TensorSource(tensors)
    verifier = Verifier(trace, source.layout())
    for wrong in (tensors["square"].roll(1), tensors["square"].T.contiguous(), tensors["square"].flip(0)):
        verifier.verify(source, [tensors["square"].clone()], version=1)
        with pytest.raises(HandoffError, match="in square"):
            verifier.verify(source, [wrong], version=1)


def test_a_publication_that_was_skipped_is_found_at_a_tiny_learning_rate():
    def work(rank, gather, leave):
        rig = Rig(rank, gather, num_ranks=2, num_parts=2)
        rig.hand_over(1)
        for name, shard in rig.shards.items():
            if name in ("q", "norm"):
                shard.mul_(1 + 1e-6)
        with rig.source.opened(2):
            pass
        rig.verify(2)

    for message in outcomes(work):
        assert "that of participant 0 in norm, q; that of participant 1 in norm, q. " in message


def test_a_padded_constant_that_was_lost_is_found():
    tensors = {"embedding": torch.randn(3, 2)}
    trace = trace_of(tensors, {"padded": (5, 2)}, [Row("embedding", (0, 0), (3, 2), "padded", (0, 0))], torch.float32)
    one = np.array([0])
    fills = Fills(one, one + 6, np.array([[4, 1, 1, 1]]), np.array([[1, 0, 0, 0]]), np.zeros(1))
    trace = replace(trace, fills=fills)
    source = TensorSource(tensors)
    verifier = Verifier(trace, source.layout())
    engine = [torch.cat([tensors["embedding"], torch.zeros(2, 2)])]
    verifier.verify(source, engine, version=1)
    engine[0][4, 1] = 1e-30
    with pytest.raises(HandoffError, match="that of participant 0 in padded"):
        verifier.verify(source, engine, version=1)


def test_what_is_left_out_of_the_trace_is_not_compared():
    tensors = globals_of()
    source = TensorSource(tensors)
    trace = engine_trace(tensors, 0, 1, torch.float32).without({"out": "vLLM packs it"})
    engine = empty_engine(trace)
    source.deliver(plan_of(trace, source.layout(), 0), engine)
    Verifier(trace, source.layout()).verify(source, engine, version=1)
    assert bool((engine[1] == 77).all())


def test_a_trace_that_is_not_complete_or_of_another_model_is_refused():
    tensors = {"a": torch.randn(4, 3)}
    trace = trace_of(tensors, {"a": (4, 3)}, [Row("a", (0, 0), (3, 3), "a", (0, 0))], torch.float32)
    with pytest.raises(HandoffError, match=r"a \[4, 3\]"):
        Verifier(trace, TensorSource(tensors).layout())
    tensors = globals_of()
    trace = engine_trace(tensors, 0, 1, torch.float32)
    del tensors["out"]
    with pytest.raises(HandoffError, match=r"the engine takes out \[6, 8\], the trainer does not have it"):
        Verifier(trace, TensorSource(tensors).layout())


def test_participants_that_verify_different_versions_are_stopped():
    def work(rank, gather, leave):
        rig = Rig(rank, gather, num_ranks=2, num_parts=1)
        rig.hand_over(1)
        rig.verify(1 + rank)

    assert outcomes(work) == [
        "participant 1 verifies policy version 2, this one verifies 1",
        "participant 0 verifies policy version 1, this one verifies 2",
    ]


def test_a_participant_that_cannot_verify_stops_all():
    def work(rank, gather, leave):
        rig = Rig(rank, gather, num_ranks=2, num_parts=1)
        rig.hand_over(1)
        if rank == 0:
            rig.source.held = lambda: (_ for _ in ()).throw(HandoffError("nothing is held"))
        rig.verify()

    found = run_threads(work, 2)
    assert str(found[0]) == "nothing is held"
    assert isinstance(found[1], PeerError)
    assert str(found[1]) == (
        "another participant failed over the content of policy version 1: rank 0: HandoffError: nothing is held"
    )


def test_replicas_of_an_engine_cost_the_sources_one_reading():
    def work(rank, gather, leave):
        rig = Rig(rank, gather, num_ranks=4, num_parts=2)
        return len(rig.verifier.images)

    assert run_threads(work, 4) == [2] * 4
