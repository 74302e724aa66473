"""The driver's side of an engine, over a real one: whatever the consumer does, the engine is left empty."""

import pytest

from hybrid_rl.errors import EngineStateError
from hybrid_rl.rollout.client import GroupRolloutClient
from tests.unit.rollout.engines import inplace, request, same_samples


class Workers:
    """The dispatched methods that a client calls, on an engine of this process."""

    def __init__(self, engine):
        self.engine = engine
        self.step, self.submit, self.engine_stats = engine.step, engine.submit, engine.stats
        self.num_aborts = 0

    def abort_all(self):
        self.num_aborts += 1
        self.engine.pause("abort")
        aborted = self.engine.step()
        self.engine.resume()
        return aborted


@pytest.fixture
def workers():
    return Workers(inplace(max_num_seqs=2).ready().engine)


REQUESTS = [request(0, max_tokens=2), request(1, max_tokens=6), request(2, max_tokens=3)]


def flat(stream):
    return sorted((event for events in stream for event in events), key=lambda event: event.id)


def test_events_come_as_they_finish_and_nothing_is_aborted(workers):
    batches = list(GroupRolloutClient(workers).stream(REQUESTS, 1))
    # Two at a time: 0 ends at the second step, 2 takes its place at the third and ends at the fifth, 1 at the sixth.
    assert [[event.id for event in events] for events in batches] == [[0], [2], [1]]
    assert (workers.engine.num_unfinished, workers.num_aborts) == (0, 0)
    assert GroupRolloutClient(workers).stats().num_finished == 3


def test_more_requests_than_may_wait_are_fed_as_there_is_room():
    workers = Workers(inplace(max_num_seqs=1, max_num_waiting=1).ready().engine)
    events = flat(GroupRolloutClient(workers).stream(REQUESTS, 1))
    same_samples(events, flat(GroupRolloutClient(Workers(inplace().ready().engine)).stream(REQUESTS, 1)))
    assert (workers.engine.num_unfinished, workers.num_aborts) == (0, 0)


def test_no_requests_no_events(workers):
    assert list(GroupRolloutClient(workers).stream([], 1)) == []
    assert workers.num_aborts == 0


def by_break(stream):
    for _ in stream:
        break


def by_error(stream):
    for _ in stream:
        raise RuntimeError("the consumer failed")


def by_interrupt(stream):
    for _ in stream:
        raise KeyboardInterrupt


def by_close(stream):
    next(stream)
    stream.close()


@pytest.mark.parametrize(
    ("consume", "error"),
    [(by_break, None), (by_error, RuntimeError), (by_interrupt, KeyboardInterrupt), (by_close, None)],
)
def test_a_consumer_that_stops_early_leaves_the_engine_empty_and_usable(workers, consume, error):
    client = GroupRolloutClient(workers)
    if error is None:
        consume(client.stream(REQUESTS, 1))
    else:
        with pytest.raises(error):
            consume(client.stream(REQUESTS, 1))
    assert (workers.engine.num_unfinished, workers.num_aborts) == (0, 1)
    assert workers.engine.stats().kv_cache_used_share == 0
    undisturbed = GroupRolloutClient(Workers(inplace(max_num_seqs=2).ready().engine)).stream(REQUESTS, 1)
    same_samples(flat(client.stream(REQUESTS, 1)), flat(undisturbed))


def test_an_interrupt_inside_a_step_leaves_the_engine_empty(workers):
    step, calls = workers.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step()

    workers.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(GroupRolloutClient(workers).stream(REQUESTS, 1))
    assert (workers.engine.num_unfinished, workers.num_aborts) == (0, 1)


def test_a_refused_submission_aborts_nobody_elses_requests(workers):
    workers.submit([request(7)], 1)
    with pytest.raises(EngineStateError):
        list(GroupRolloutClient(workers).stream(REQUESTS, 2))
    assert (workers.engine.num_unfinished, workers.num_aborts) == (1, 0)
