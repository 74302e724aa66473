"""The client of an engine, over a real one: whatever the consumer does, the engine is left empty."""

import pytest

from hybrid_rl.engines import RolloutEngine
from hybrid_rl.engines import client as client_module
from hybrid_rl.engines.client import EngineClient
from hybrid_rl.errors import EngineStateError
from hybrid_rl.process.interrupts import clear_interrupt, request_interrupt
from tests.unit.engines.engines import inplace, request, same_samples


class Engine:
    """A real engine that counts how often everything in it was aborted, and runs `before_step` before each step."""

    def __init__(self, **settings):
        self.engine = inplace(**settings).ready().engine
        self.num_aborts = self.num_steps = 0
        self.before_step = lambda number: None

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def pause(self, mode):
        self.num_aborts += mode == "abort"
        self.engine.pause(mode)

    break_off = RolloutEngine.break_off

    def step(self):
        self.num_steps += 1
        self.before_step(self.num_steps)
        return self.engine.step()


@pytest.fixture
def engine():
    return Engine(max_num_seqs=2)


@pytest.fixture(autouse=True)
def no_interrupt():
    yield
    clear_interrupt()


REQUESTS = [request(0, max_tokens=2), request(1, max_tokens=6), request(2, max_tokens=3)]


def flat(stream):
    return sorted((event for events in stream for event in events), key=lambda event: event.id)


def undisturbed():
    return flat(EngineClient(Engine(max_num_seqs=2)).stream(REQUESTS, 1))


def test_events_come_as_they_finish_and_nothing_is_aborted(engine):
    batches = list(EngineClient(engine).stream(REQUESTS, 1))
    # Two at a time: 0 ends at the second step, 2 takes its place at the third and ends at the fifth, 1 at the sixth.
    assert [[event.id for event in events] for events in batches] == [[0], [2], [1]]
    assert (engine.num_unfinished, engine.num_aborts, engine.num_steps) == (0, 0, 6)
    assert EngineClient(engine).stats().num_finished == 3


def test_more_requests_than_may_wait_are_fed_as_there_is_room():
    engine = Engine(max_num_seqs=1, max_num_waiting=1)
    events = flat(EngineClient(engine).stream(REQUESTS, 1))
    same_samples(events, flat(EngineClient(Engine()).stream(REQUESTS, 1)))
    assert (engine.num_unfinished, engine.num_aborts) == (0, 0)


def test_no_requests_no_events(engine):
    assert list(EngineClient(engine).stream([], 1)) == []
    assert (engine.num_aborts, engine.num_steps) == (0, 0)


def test_every_engine_step_says_that_the_work_gets_on(engine, monkeypatch):
    """A watchdog takes a rank that says nothing for hung: before the first step already, and while nothing finishes."""
    marks = []
    monkeypatch.setattr(client_module, "mark_progress", lambda: marks.append(engine.num_steps))
    list(EngineClient(engine).stream(REQUESTS, 1))
    assert marks == [0, 1, 2, 3, 4, 5]


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
def test_a_consumer_that_stops_early_leaves_the_engine_empty_and_usable(engine, consume, error):
    client = EngineClient(engine)
    if error is None:
        consume(client.stream(REQUESTS, 1))
    else:
        with pytest.raises(error):
            consume(client.stream(REQUESTS, 1))
    assert (engine.num_unfinished, engine.num_aborts) == (0, 1)
    assert engine.stats().kv_cache_used_share == 0
    same_samples(flat(client.stream(REQUESTS, 1)), undisturbed())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_inside_a_step_leaves_the_engine_empty_and_usable(engine, error):
    def fails(number):
        if number == 2:
            raise error

    engine.before_step = fails
    client = EngineClient(engine)
    with pytest.raises(error):
        list(client.stream(REQUESTS, 1))
    assert (engine.num_unfinished, engine.num_aborts) == (0, 1)
    same_samples(flat(client.stream(REQUESTS, 1)), undisturbed())


@pytest.mark.parametrize("step", [1, 3, 5])
def test_an_interrupt_is_seen_between_two_steps(engine, step):
    """The step under way is finished, the next is not begun."""
    engine.before_step = lambda number: request_interrupt() if number == step else None
    client = EngineClient(engine)
    with pytest.raises(KeyboardInterrupt):
        list(client.stream(REQUESTS, 1))
    # One more step clears what was aborted.
    assert (engine.num_steps, engine.num_unfinished, engine.num_aborts) == (step + 1, 0, 1)
    clear_interrupt()
    same_samples(flat(client.stream(REQUESTS, 1)), undisturbed())


def test_an_interrupt_before_the_first_step_starts_nothing(engine):
    request_interrupt()
    with pytest.raises(KeyboardInterrupt):
        list(EngineClient(engine).stream(REQUESTS, 1))
    assert (engine.num_steps, engine.num_unfinished, engine.num_aborts) == (0, 0, 0)


def test_an_interrupt_in_the_last_step_loses_no_sample(engine):
    """Everything is there: whoever consumes it sees the interrupt at its own next safe point."""
    engine.before_step = lambda number: request_interrupt() if number == 6 else None
    events = flat(EngineClient(engine).stream(REQUESTS, 1))
    clear_interrupt()
    same_samples(events, undisturbed())


def test_a_refused_submission_aborts_nobody_elses_requests(engine):
    engine.submit([request(7)], 1)
    client = EngineClient(engine)
    with pytest.raises(EngineStateError):
        list(client.stream(REQUESTS, 2))
    assert (engine.num_unfinished, engine.num_aborts) == (1, 0)


def test_one_rollout_at_a_time(engine):
    """A second one would take the first one's events; the first goes on as if nobody had asked."""
    client = EngineClient(engine)
    first = client.stream(REQUESTS, 1)
    events = [next(first)]
    with pytest.raises(EngineStateError, match="busy with another rollout; do not generate from a reward function"):
        next(client.stream([request(8)], 1))
    events += first
    same_samples(flat(events), undisturbed())
    assert [event.id for event in flat(client.stream([request(8)], 1))] == [8]


def test_a_stream_that_nobody_reads_occupies_nothing(engine):
    client = EngineClient(engine)
    unread = client.stream([request(8)], 1)
    same_samples(flat(client.stream(REQUESTS, 1)), undisturbed())
    unread.close()
    assert engine.num_aborts == 0
