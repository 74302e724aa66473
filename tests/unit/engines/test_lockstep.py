"""Ranks that share an engine, each a thread with a contract engine of its own: what every one of them sees."""

import threading
import time

import pytest

from hybrid_rl.engines import generate
from hybrid_rl.engines.base import KV_CACHE
from hybrid_rl.engines.client import EngineClient
from hybrid_rl.engines.lockstep import SharedEngine
from hybrid_rl.errors import DataError, EngineStateError, PeerFailedError, QueueFullError
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.unit.engines.engines import contract, finish, request, same_samples

DEADLINE_SECONDS = 30.0


class Meeting:
    """`gather` between threads: waits for all, then gives everybody everything. exchanged: what rank 0 has said."""

    def __init__(self, num_ranks):
        self.said, self.exchanged = [None] * num_ranks, []
        self.barrier = threading.Barrier(num_ranks)

    def of(self, rank):
        def gather(value):
            self.said[rank] = value
            self.barrier.wait(DEADLINE_SECONDS)
            everybody = list(self.said)
            if rank == 0:
                self.exchanged.append(value)
            self.barrier.wait(DEADLINE_SECONDS)
            return everybody

        return gather


def on_ranks(num_ranks, function, *, fingerprints=None, **settings):
    """`function(engine, rank)` on every rank; what each returned, or the error it raised."""
    meeting = Meeting(num_ranks)
    results = [None] * num_ranks
    rigs = [contract(**settings).ready() for _ in range(num_ranks)]  # not in the threads: they share a generator

    def main(rank):
        rig = rigs[rank]
        seen = fingerprints[rank] if fingerprints else 0
        gather = meeting.of(rank)
        own = {"gather": gather, "gather_numbers": gather, "fingerprint": lambda: seen}
        engine = SharedEngine(rig.engine, rank=rank, num_ranks=num_ranks, **own)
        engine.module, engine.exchanged = rig.module, meeting.exchanged
        try:
            results[rank] = function(engine, rank)
        except Exception as error:
            results[rank] = error
            if isinstance(error, AssertionError):
                meeting.barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for result in results:
        if isinstance(result, AssertionError):
            raise result
    return results


def stream(engine, requests):
    return sorted((e for events in EngineClient(engine).stream(requests, 1) for e in events), key=lambda e: e.id)


def alone(requests):
    return contract().ready().run(requests)


MINE = {
    0: [request(0, 4, 6), request(1, 5, 3), request(2, 4, 9)],
    1: [request(3, 7, 4), request(4, 4, 5)],
    2: [],
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_gets_its_own_samples_and_only_those(num_ranks):
    """Also the rank that has no request of its own: it steps with the others, and ends with them."""
    for rank, samples in enumerate(on_ranks(num_ranks, lambda engine, rank: stream(engine, MINE[rank]))):
        same_samples(samples, alone(MINE[rank]))


def test_equal_ids_on_two_ranks_are_two_requests():
    def both(engine, rank):
        return generate(engine, [request(-1, 4 + rank, 3 + rank)], 1)

    for rank, samples in enumerate(on_ranks(2, both)):
        same_samples(samples, alone([request(-1, 4 + rank, 3 + rank)]))


def test_all_ranks_take_the_same_number_of_steps():
    def count(engine, rank):
        stream(engine, MINE[rank])
        return engine.stats().num_steps, engine.stats().num_generated_tokens

    assert len(set(on_ranks(3, count))) == 1


def test_a_step_without_wishes_exchanges_numbers_only():
    """Requests travel at the first boundary; from then on every rank says four numbers a step."""

    def exchanged(engine, rank):
        stream(engine, MINE[rank])
        return engine.stats().num_steps, list(engine.exchanged)

    num_steps, said = on_ranks(2, exchanged)[0]
    assert num_steps == 9
    objects = [number for number, value in enumerate(said) if not isinstance(value, list)]
    assert objects == [1]
    assert all(len(value) == 4 for number, value in enumerate(said) if number != 1)


def test_requests_are_fed_in_waves_and_a_rank_that_is_done_waits_for_the_rest():
    requests = {0: [request(i, 4, 2) for i in range(7)], 1: [request(9, 4, 1)]}
    results = on_ranks(2, lambda engine, rank: stream(engine, requests[rank]), max_num_seqs=1, max_num_waiting=2)
    for rank, samples in enumerate(results):
        same_samples(samples, alone(requests[rank]))


def test_a_rank_may_queue_its_share_only():
    def refused(engine, rank):
        room = engine.stats().num_queueable
        with pytest.raises(QueueFullError):
            engine.submit([request(i) for i in range(5)], 1)
        engine.submit([request(0), request(1)], 1)
        return room, engine.stats().num_queueable, engine.num_unfinished

    assert on_ranks(2, refused, max_num_waiting=4) == [(2, 0, 2), (2, 0, 2)]


def test_one_bad_request_and_nothing_is_queued():
    def bad(engine, rank):
        engine.submit([request(1, 4, 2)], 1)
        if rank == 0:
            with pytest.raises(DataError, match="request id 1 is in use"):
                engine.submit([request(2), request(1)], 1)
            with pytest.raises(DataError, match=r"exceed 64 tokens \(the model has 64 positions\)"):
                engine.submit([request(2), request(3, 4, 61)], 1)
        return [event.id for event in finish(engine)]

    assert on_ranks(2, bad) == [[1], [1]]


def test_an_abort_ends_the_request_of_this_rank_only():
    def abort(engine, rank):
        engine.submit([request(1, 4, 6)], 1)
        events = [*engine.step(), *engine.step()]
        engine.abort([1] if rank == 0 else [])
        events += finish(engine)
        return [(event.id, event.finish_reason, len(event.completion_ids)) for event in events]

    assert on_ranks(2, abort) == [[(1, "abort", 2)], [(1, "length", 6)]]


def test_an_abort_of_the_past_does_not_end_a_later_request_of_that_id():
    def abort(engine, rank):
        engine.abort([1])
        return generate(engine, [request(1)], 1)[0].finish_reason

    assert on_ranks(2, abort) == ["length", "length"]


def test_a_pause_of_one_rank_holds_everybody_from_the_next_boundary():
    def pause(engine, rank):
        engine.submit([request(1, 4, 6)], 1)
        engine.step()
        if rank == 1:
            engine.pause("keep")
        held = [engine.step() for _ in range(3)]
        generated = engine.stats().num_generated_tokens
        if rank == 1:
            engine.resume()
        return held, generated, [len(event.completion_ids) for event in finish(engine)]

    assert on_ranks(2, pause) == [([[], [], []], 2, [6])] * 2


def test_weights_and_memory_see_a_pause_that_no_step_has_carried():
    undisturbed = alone([request(1, 4, 6)])

    def update(engine, rank):
        engine.submit([request(1, 4, 6)], 1)
        engine.step()
        if rank == 0:
            engine.pause("keep")
        engine.update_weights(TensorSource.of(engine.module), 2)
        engine.sleep({KV_CACHE})
        engine.wake({KV_CACHE})
        if rank == 0:
            engine.resume()
        return finish(engine)

    for samples in on_ranks(2, update):
        same_samples(samples, undisturbed)
        assert samples[0].versions == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("breaker", [0, 1, 2])
def test_a_rank_that_breaks_off_ends_the_requests_of_all_and_the_others_say_so(breaker):
    def break_off(engine, rank):
        requests = [request(rank, 4, 9), *([request(7, 4, 2)] if rank == breaker else [])]
        try:
            for _ in EngineClient(engine).stream(requests, 1):
                assert rank == breaker
                raise ValueError("the reward failed")
        except (ValueError, EngineStateError) as error:
            caught = error
        left = engine.num_unfinished, engine.stats().num_running
        return caught, left, stream(engine, [request(rank, 4, 3)])  # and the engine is as good as new

    for rank, (error, left, samples) in enumerate(on_ranks(3, break_off)):
        if rank == breaker:
            assert str(error) == "the reward failed"
        else:
            assert isinstance(error, EngineStateError) and isinstance(error, PeerFailedError)
            assert f"rank {breaker} of those that share this engine broke off" in str(error)
        assert left == (0, 0)
        same_samples(samples, alone([request(rank, 4, 3)]))


def test_a_rank_that_refuses_its_own_requests_frees_the_others():
    def refuse(engine, rank):
        return stream(engine, [request(0, 4, 61 if rank == 1 else 3)])

    first, second = on_ranks(2, refuse)
    assert isinstance(second, DataError)
    assert isinstance(first, EngineStateError)


def test_ranks_that_sampled_differently_stop():
    errors = on_ranks(2, lambda engine, rank: stream(engine, MINE[rank]), fingerprints=[5, 6])
    for error in errors:
        assert "the ranks that share this engine sampled different tokens: [5, 6]" in str(error)


def test_ranks_with_other_weights_stop():
    def update(engine, rank):
        if rank == 0:
            engine._inner.update_weights(TensorSource.of(engine.module), 2)
        return generate(engine, [request(0)], engine.policy_version)

    for error in on_ranks(2, update):
        assert "hold policy versions [2, 1]" in str(error)


def test_after_a_failed_step_nobody_waits_for_the_others():
    def fail(engine, rank):
        engine.submit([request(rank, 4, 6)], 1)
        engine.step()

        def broken():
            raise RuntimeError("no memory")

        engine._inner.step = broken
        with pytest.raises(RuntimeError, match="no memory"):
            engine.step()
        return engine.num_unfinished

    assert on_ranks(2, fail) == [0, 0]
