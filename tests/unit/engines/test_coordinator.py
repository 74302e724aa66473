"""Ranks that share an engine, each a thread with an engine of its own: what every one of them sees."""

import functools
import threading
import time

import pytest

from hybrid_rl.engines.coordinator import Coordinator
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import DataError, EngineStateError, PeerFailedError
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.support.inside.engines import num_unfinished_of_all
from tests.unit.engines.engines import inplace, request, same_samples

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
    """`function(client, rank)` on every rank; what each returned, or the error it raised."""
    meeting = Meeting(num_ranks)
    results = [None] * num_ranks
    # Not in the threads: they share a generator.
    rigs = [inplace(num_layers=1, **settings).ready() for _ in range(num_ranks)]

    def main(rank):
        rig = rigs[rank]
        seen = fingerprints[rank] if fingerprints else 0
        gather = meeting.of(rank)
        own = {"gather": gather, "gather_numbers": gather, "fingerprint": lambda: seen}
        client = EngineClient(rig.engine, coordinator=Coordinator(rank=rank, num_ranks=num_ranks, **own))
        client.module, client.exchanged = rig.module, meeting.exchanged
        try:
            results[rank] = function(client, rank)
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


def stream(client, requests):
    return sorted((e for events in client.stream(requests, 1) for e in events), key=lambda e: e.id)


@functools.cache
def lone():
    return inplace(num_layers=1).ready()


def alone(requests):
    return lone().run(requests)


MINE = {
    0: [request(0, 4, 6), request(1, 5, 3), request(2, 4, 9)],
    1: [request(3, 7, 4), request(4, 4, 5)],
    2: [],
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_gets_its_own_samples_and_only_those(num_ranks):
    """Also the rank that has no request of its own: it steps with the others, and ends with them."""
    for rank, samples in enumerate(on_ranks(num_ranks, lambda client, rank: stream(client, MINE[rank]))):
        same_samples(samples, alone(MINE[rank]))


def test_equal_ids_on_two_ranks_are_two_requests():
    def both(client, rank):
        return client.generate([request(-1, 4 + rank, 3 + rank)], 1)

    for rank, samples in enumerate(on_ranks(2, both)):
        same_samples(samples, alone([request(-1, 4 + rank, 3 + rank)]))


def test_a_step_without_requests_exchanges_numbers_only():
    """Requests travel at the first boundary; from then on every rank says five numbers a step, and once at the end."""

    def exchanged(client, rank):
        stream(client, MINE[rank])
        return client.stats().num_steps, list(client.exchanged)

    num_steps, said = on_ranks(2, exchanged)[0]
    assert num_steps == 9
    objects = [number for number, value in enumerate(said) if not isinstance(value, list)]
    assert objects == [1]
    assert len(said) == 9 + 1 + 1
    assert all(len(value) == 5 for number, value in enumerate(said) if number != 1)


def test_requests_are_fed_in_waves_and_a_rank_that_is_done_waits_for_the_rest():
    requests = {0: [request(i, 4, 2) for i in range(7)], 1: [request(9, 4, 1)]}
    results = on_ranks(2, lambda client, rank: stream(client, requests[rank]), max_num_seqs=1, max_num_waiting=2)
    for rank, samples in enumerate(results):
        same_samples(samples, alone(requests[rank]))


def test_a_rank_fills_its_share_of_the_queue_only():
    """Of four requests that may wait, each of two ranks has two at a time; the others wait in its client."""

    def fill(client, rank):
        with client.session():
            handle = client.submit([request(i, 4, 2) for i in range(5)], 1)
            client.poll(handle)
            seen = client.engine.num_waiting, client.stats().num_waiting
            return seen, sorted(event.id for event in client.wait(handle))

    assert on_ranks(2, fill, max_num_seqs=1, max_num_waiting=4) == [((3, 3 + 3), [0, 1, 2, 3, 4])] * 2


def test_one_bad_request_and_nothing_is_queued():
    def bad(client, rank):
        with client.session():
            handle = client.submit([request(1, 4, 2)], 1)
            if rank == 0:
                with pytest.raises(DataError, match="request id 1 is in use"):
                    client.submit([request(2), request(1)], 1)
                with pytest.raises(DataError, match=r"request 3: .* exceed 64 tokens \(the model has 64 positions\)"):
                    client.submit([request(2), request(3, 4, 61)], 1)
            return [event.id for event in client.wait(handle)]

    assert on_ranks(2, bad) == [[1], [1]]


def test_a_cancel_ends_the_request_of_this_rank_only():
    def cancel(client, rank):
        with client.session():
            handle = client.submit([request(1, 4, 6)], 1)
            events = [*client.poll(handle), *client.poll(handle)]
            if rank == 0:
                client.cancel(handle)
            events += client.wait(handle)
        return [(event.id, event.finish_reason, len(event.completion_ids)) for event in events]

    assert on_ranks(2, cancel) == [[(1, "abort", 2)], [(1, "length", 6)]]


def test_a_cancel_of_the_past_does_not_end_a_later_request_of_that_id():
    def cancel(client, rank):
        with client.session():
            handle = client.submit([request(1)], 1)
            client.wait(handle)
            client.cancel(handle)
            return client.wait(client.submit([request(1)], 1))[0].finish_reason

    assert on_ranks(2, cancel) == ["length", "length"]


@pytest.mark.parametrize("breaker", [0, 1, 2])
def test_a_rank_that_ends_early_ends_the_requests_of_all_and_the_others_say_so(breaker):
    def end_early(client, rank):
        requests = [request(rank, 4, 9), *([request(7, 4, 2)] if rank == breaker else [])]
        try:
            for _ in client.stream(requests, 1):
                assert rank == breaker
                raise ValueError("the reward failed")
        except (ValueError, EngineStateError) as error:
            caught = error
        left = client.engine.num_unfinished, client.stats().num_running
        return caught, left, stream(client, [request(rank, 4, 3)])  # and the engine is as good as new

    for rank, (error, left, samples) in enumerate(on_ranks(3, end_early)):
        if rank == breaker:
            assert str(error) == "the reward failed"
        else:
            assert isinstance(error, EngineStateError) and isinstance(error, PeerFailedError)
            assert f"rank {breaker} of those that share this engine ended its rollout early" in str(error)
        assert left == (0, 0)
        same_samples(samples, alone([request(rank, 4, 3)]))


def test_a_rank_that_fails_between_two_rounds_frees_the_others():
    def fail(client, rank):
        with client.session():
            stream(client, [request(0, 4, 3)])
            if rank == 0:
                raise ValueError("the reward failed")
            return stream(client, [request(1, 4, 3)])

    first, second = on_ranks(2, fail)
    assert str(first) == "the reward failed"
    assert "rank 0 of those that share this engine ended its rollout early" in str(second)


def test_a_rank_that_refuses_its_own_requests_frees_the_others():
    def refuse(client, rank):
        return stream(client, [request(0, 4, 61 if rank == 1 else 3)])

    first, second = on_ranks(2, refuse)
    assert isinstance(second, DataError)
    assert isinstance(first, EngineStateError)


def test_ranks_that_sampled_differently_stop():
    errors = on_ranks(2, lambda client, rank: stream(client, MINE[rank]), fingerprints=[5, 6])
    for error in errors:
        assert "the ranks that share this engine sampled different tokens: [5, 6]" in str(error)


def test_ranks_with_other_weights_stop():
    def update(client, rank):
        if rank == 0:
            client.engine.update_weights(TensorSource.of(client.module), 2)
        return client.generate([request(0)], client.engine.policy_version)

    for error in on_ranks(2, update):
        assert "hold policy versions [2, 1]" in str(error)


def test_ranks_of_which_one_lost_its_weights_may_be_given_new_ones():
    """Only a step needs ranks to agree: a rank whose handoff failed must be able to take the next one."""

    def update(client, rank):
        if rank == 0:
            client.engine.invalidate()
        client.at_rest().update_weights(TensorSource.of(client.module), 2)
        return client.generate([request(0)], 2)

    for samples in on_ranks(2, update):
        assert samples[0].versions == [2] * 6


@pytest.mark.parametrize("numbers", [(1, 40), (0, 40), (40, 0, 1)])
def test_ranks_with_very_unequal_numbers_of_requests_end_together(numbers):
    """In a session of two rounds, of which the ranks with few requests skip the second."""

    def unequal(client, rank):
        samples = []
        with client.session():
            for number in range(2 if numbers[rank] == 40 else 1):
                some = [request(40 * number + i, 3 + i % 3, 1 + i % 5) for i in range(numbers[rank])]
                samples += stream(client, some)
                if number == 0:  # a round ends for nobody before it has ended for all
                    assert client.stats().num_finished == sum(numbers)
        return [sample.id for sample in samples], client.stats().num_steps, client.engine.num_unfinished

    results = on_ranks(len(numbers), unequal, max_num_seqs=8, max_num_waiting=16)
    for number, (ids, _, left) in zip(numbers, results, strict=True):
        assert ids == list(range(80 if number == 40 else number))
        assert left == 0
    assert len({num_steps for _, num_steps, _ in results}) == 1


def test_a_request_is_awaited_while_others_stream():
    """Rank 0 asks one by one, as an agent would; rank 1 steps with it until nothing is left."""

    def ask(client, rank):
        with client.session():
            if rank == 1:
                return [stream(client, MINE[1])]
            return [client.wait(client.submit([one], 1)) for one in MINE[0]]

    mine, theirs = on_ranks(2, ask)
    for one, samples in zip(MINE[0], mine, strict=True):
        same_samples(samples, alone([one]))
    same_samples(theirs[0], alone(MINE[1]))


def test_ranks_whose_engine_has_nothing_to_do_meet_now_and_then_until_one_asks():
    """Rank 0 asks for turn after turn, with a pause of 0.3 seconds between; rank 1 has nothing of its own at all."""

    def ask(client, rank):
        answers = []
        with client.session():
            for one in MINE[0] if rank == 0 else ():
                until = time.monotonic() + 0.3
                while time.monotonic() < until:
                    client.advance()
                handle = client.submit([one], 1)
                while not handle.is_done:
                    client.advance()
                    answers += handle.take()
        return answers, len(client.exchanged)

    (answers, num_boundaries), (nothing, _) = on_ranks(2, ask)
    same_samples(answers, alone(MINE[0]))
    assert nothing == []
    # 45 for 0.9 seconds of 0.02 each, and those of 18 steps: without waiting there would be thousands.
    assert 18 <= num_boundaries < 100


def test_after_a_failed_step_nobody_waits_for_the_others():
    def fail(client, rank):
        def broken():
            raise RuntimeError("no memory")

        with pytest.raises(RuntimeError, match="no memory"), client.session():
            handle = client.submit([request(rank, 4, 6)], 1)
            client.poll(handle)
            client.engine.step = broken
            client.poll(handle)
        return client.wait(handle), num_unfinished_of_all(client)

    assert on_ranks(2, fail) == [([], 0)] * 2
