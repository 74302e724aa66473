"""Participants of a handoff begin and end together, and none of them continues if another cannot."""

from __future__ import annotations

import pytest
import torch

from hybrid_rl.controller.failures import failure_of, root_cause
from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff.base import PeerError
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from tests.unit.resharding.handoff.parts import globals_of, layout_of, run_threads, shards_of


def source_of(rank, gather, dtypes=(torch.float32, torch.float32)):
    tensors = globals_of(dtypes[rank])
    layout = layout_of(tensors, 2)
    return IpcSource.connect(layout, IpcExport(layout, rank, shards_of(layout, tensors, rank)), gather)


def test_an_error_of_one_participant_reaches_all_and_the_version_can_be_tried_again():
    def work(rank, gather, leave):
        source = source_of(rank, gather)
        errors = []
        for attempt in range(2):
            try:
                with source.opened(3):
                    if attempt == 0 and rank == 1:
                        raise ValueError("the disk of rank 1 is full")
            except Exception as error:
                errors.append(error)
        return errors

    (theirs,), (own,) = run_threads(work, 2)
    assert isinstance(own, ValueError)
    assert isinstance(theirs, PeerError)
    assert str(theirs) == (
        "participant 1 of the handoff of policy version 3 failed: ValueError: the disk of rank 1 is full"
    )
    assert root_cause({0: failure_of(theirs), 1: failure_of(own)}) == 1
    assert not failure_of(theirs).is_disconnected


def test_a_participant_that_cannot_begin_stops_all():
    def work(rank, gather, leave):
        source = source_of(rank, gather)
        if rank == 1:
            with source.opened(3):
                pass
            source.prepare = lambda version: (_ for _ in ()).throw(HandoffError("not ready"))
        else:
            with source.opened(3):
                pass
        with source.opened(4):
            pytest.fail("somebody was not ready")

    first, second = run_threads(work, 2)
    assert isinstance(first, PeerError) and "participant 1 of the handoff of policy version 4 failed" in str(first)
    assert type(second) is HandoffError and str(second) == "not ready"


def test_participants_that_mean_different_versions_are_stopped():
    def work(rank, gather, leave):
        source = source_of(rank, gather)
        with source.opened(3 + rank):
            pytest.fail("versions differ")

    for error in run_threads(work, 2):
        assert isinstance(error, PeerError) and "begin of policy version 4" in str(error)


def test_participants_whose_layouts_differ_are_stopped():
    def work(rank, gather, leave):
        source = source_of(rank, gather, (torch.float32, torch.bfloat16))
        with source.opened(1):
            pytest.fail("layouts differ")

    for error in run_threads(work, 2):
        assert isinstance(error, PeerError) and "participants are in different handoffs" in str(error)


def test_a_version_that_does_not_rise_is_refused():
    def work(rank, gather, leave):
        source = source_of(rank, gather)
        with source.opened(5):
            pass
        with source.opened(5):
            pytest.fail("version 5 twice")

    for error in run_threads(work, 2):
        assert "policy version 5 was requested, but version 5 has already been handed over" in str(error)


def test_a_participant_that_is_gone_is_an_error_of_the_others():
    def work(rank, gather, leave):
        source = source_of(rank, gather)
        if rank == 1:
            leave()
            return
        with source.opened(1):
            pytest.fail("rank 1 is gone")

    error, _ = run_threads(work, 2)
    assert isinstance(error, PeerError) and failure_of(error).is_disconnected
    assert "is gone, or took too long, over the handoff of policy version 1 (begin)" in str(error)


def test_one_that_leaves_early_is_not_taken_for_one_that_is_through():
    """A participant that fails while others agree on something else: both find out, and neither waits."""

    def work(rank, gather, leave):
        source = source_of(rank, gather)
        with source.opened(2):
            if rank == 1:
                raise ValueError("no plan")
            source.tell(("plan", 2, "digest", None))

    first, second = run_threads(work, 2)
    assert isinstance(second, ValueError)
    assert isinstance(first, PeerError)
    assert "participant 1 is at 'end' of the handoff of policy version 2, this one at 'plan' of 2" in str(first)
    assert "no plan" in str(first)
