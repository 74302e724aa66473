"""The client of an engine, over a real one: requests at any time, and an engine that is left empty whatever happens."""

import functools
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest

from hybrid_rl.engines import engine_client as client_module
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.errors import DataError, EngineStateError
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

    def abort_all(self):
        self.num_aborts += 1
        RolloutEngine.abort_all(self)

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


@functools.cache
def undisturbed():
    return flat(EngineClient(Engine(max_num_seqs=2)).stream(REQUESTS, 1))


def test_events_come_as_they_finish_and_nothing_is_aborted(engine):
    batches = list(EngineClient(engine).stream(REQUESTS, 1))
    # Two at a time: 0 ends at the second step, 2 takes its place at the third and ends at the fifth, 1 at the sixth.
    assert [[event.id for event in events] for events in batches] == [[0], [2], [1]]
    assert (engine.num_unfinished, engine.num_aborts, engine.num_steps) == (0, 0, 6)
    assert EngineClient(engine).stats().num_finished == 3


def test_the_error_that_an_engine_failed_with_is_told_though_it_refuses_to_abort(engine):
    def fails(number):
        if number == 2:
            raise ValueError("mat1 and mat2 shapes cannot be multiplied")
        if number > 2:
            raise EngineStateError("the engine failed; make a new one")

    engine.before_step = fails
    client = EngineClient(engine)
    with pytest.raises(ValueError, match="mat1 and mat2"):
        flat(client.stream(REQUESTS, 1))
    with pytest.raises(EngineStateError, match="make a new one"):
        flat(client.stream([request(3)], 1))
    assert engine.num_steps >= 3


def test_no_requests_no_events(engine):
    assert list(EngineClient(engine).stream([], 1)) == []
    assert (engine.num_aborts, engine.num_steps) == (0, 0)


def test_every_engine_step_marks_progress(engine, monkeypatch):
    """A watchdog takes a rank that says nothing for hung: before the first step already, and while nothing finishes."""
    marks = []
    monkeypatch.setattr(client_module, "mark_progress", lambda: marks.append(engine.num_steps))
    list(EngineClient(engine).stream(REQUESTS, 1))
    assert marks == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_consumer_that_stops_early_leaves_the_engine_empty_and_usable(engine, error):
    client = EngineClient(engine)
    with pytest.raises(error) if error else nullcontext():
        for _ in client.stream(REQUESTS, 1):
            if error:
                raise error
            break
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


# ----------------------------------------------------------------------------------------- requests at any time


@pytest.fixture
def client(engine):
    return EngineClient(engine)


def test_requests_are_awaited_one_by_one_while_others_run(engine, client):
    with client.session():
        handles = [client.submit([one], 1) for one in REQUESTS]
        (last,) = client.wait(handles[2])
        # Ids 0 and 1 run first; 2 takes the place of 0 after two steps and needs three.
        assert (last.id, engine.num_steps) == (2, 5)
        assert [handle.is_done for handle in handles] == [False, False, True]
        (first,) = client.poll(handles[0])
        assert (first.id, engine.num_steps) == (0, 5)  # it had arrived: no step is taken
        assert client.poll(handles[1]) and engine.num_steps == 6
        (second,) = undisturbed()[1:2]
    assert [first.completion_ids, last.completion_ids] == [s.completion_ids for s in undisturbed()[::2]]
    assert len(second.completion_ids) == 6


def test_a_request_joins_those_that_run(engine, client):
    with client.session():
        early = client.submit(REQUESTS[:2], 1)
        assert client.poll(early) == []
        late = client.submit([REQUESTS[2]], 1)
        samples = [*client.wait(late), *client.wait(early)]
    same_samples(sorted(samples, key=lambda sample: sample.id), undisturbed())
    # Begun at the third step in the place of 0, not after the others: six steps instead of nine.
    assert engine.num_steps == 6


def test_cancelling_ends_what_runs_what_waits_and_nothing_else():
    engine = Engine(max_num_seqs=1, max_num_waiting=1)
    client = EngineClient(engine)
    with client.session():
        running, waiting, queued, kept = (client.submit([request(i, max_tokens=4)], 1) for i in range(4))
        client.poll(running)
        for handle in (running, waiting, queued):
            client.cancel(handle)
        ended = [sample for handle in (running, waiting, queued) for sample in client.wait(handle)]
        client.cancel(running)
        (sample,) = client.wait(kept)
    assert [(s.id, s.finish_reason, len(s.completion_ids)) for s in ended] == [
        (0, "abort", 1),
        (1, "abort", 0),
        (2, "abort", 0),
    ]
    assert (sample.finish_reason, len(sample.completion_ids), engine.num_aborts) == ("length", 4, 0)


def test_one_bad_request_and_nothing_is_queued(engine, client):
    with client.session():
        client.submit([request(1)], 1)
        with pytest.raises(DataError, match="request id 1 is in use"):
            client.submit([request(2), request(1)], 1)
        with pytest.raises(DataError, match="empty prompt"):
            client.submit([request(2), request(3, 0)], 1)
        assert client.stats().num_waiting == 1


def test_what_nobody_waited_for_is_cancelled_at_the_end_of_a_session(engine, client):
    with client.session():
        client.poll(client.submit(REQUESTS, 1))
    assert (engine.num_unfinished, engine.num_aborts, engine.num_steps) == (0, 0, 2)
    same_samples(flat(client.stream(REQUESTS, 1)), undisturbed())


def test_a_second_round_finds_the_prefixes_of_the_first_and_the_next_session_none():
    """A prompt of 9 tokens fills two blocks of 4, which the same prompt finds in a later round."""
    client = EngineClient(inplace(block_size=4).ready().engine)
    found = []
    for _ in range(2):
        with client.session():
            first = client.generate([request(0, 9, seed=5)], 1)
            found.append(client.stats().num_prefix_tokens)
            second = client.generate([request(1, 9, seed=5)], 1)
            found.append(client.stats().num_prefix_tokens)
        assert first[0].completion_ids == second[0].completion_ids
    assert found == [0, 8, 8, 16]


def test_a_loop_advances_the_engine_and_is_woken_by_what_another_thread_asks(engine, client):
    """Nothing to do for 30 seconds, had nobody asked: an agent of another thread does, and later cancels."""
    handles, seen = [], []

    def ask(number):
        handles.append(client.submit([request(number, max_tokens=2 if number else 40)], 1))

    def later(function, *arguments):
        timer = threading.Timer(0.05, function, arguments)
        timer.daemon = True
        timer.start()

    with client.session():
        start = time.monotonic()
        for number in (1, 2):
            later(ask, number)
            while len(handles) < number or not handles[-1].is_done:
                client.advance(idle_seconds=30)
                seen += handles[-1].take()
        assert (engine.num_steps, [sample.id for sample in seen]) == (2 * 2, [1, 2])
        ask(0)
        client.advance()
        client.cancel(handles[-1])
        client.advance(idle_seconds=30)
        assert [sample.finish_reason for sample in handles[-1].take()] == ["abort"]
        client.advance(idle_seconds=0.01)  # nobody asks: it comes back, and no step was taken
        assert (engine.num_steps, time.monotonic() - start < 20) == (6, True)
        request_interrupt()
        with pytest.raises(KeyboardInterrupt):
            client.advance(idle_seconds=30)


def test_older_conversations_are_answered_first_and_nobody_starves():
    """One at a time: of ten conversations of four turns, the youngest of which asks first, the oldest goes first, and
    goes on before the next has begun."""
    client = EngineClient(Engine(max_num_seqs=1))
    order, handles = [], {}

    def ask(conversation, turn):
        one = request(10 * conversation + turn, max_tokens=3)
        handles[conversation] = client.submit([replace(one, priority=conversation)], 1)

    with client.session():
        for conversation in reversed(range(10)):
            ask(conversation, 0)
        while handles:
            client.advance()
            for conversation, handle in list(handles.items()):
                for sample in handle.take():
                    order.append(sample.id)
                    del handles[conversation]
                    if sample.id % 10 < 3:
                        ask(conversation, sample.id % 10 + 1)
    assert order == [10 * conversation + turn for conversation in range(10) for turn in range(4)]


def test_what_does_not_fit_into_the_engine_waits_by_priority_too():
    """One runs and one may wait in the engine: whoever asks meanwhile is next after those two."""
    client = EngineClient(Engine(max_num_seqs=1, max_num_waiting=1))
    with client.session():
        early = client.submit([replace(request(i, max_tokens=2), priority=5) for i in range(4)], 1)
        client.advance()
        client.advance()
        late = client.submit([replace(request(i, max_tokens=2), priority=i) for i in (8, 4)], 1)
        order = []
        while not (early.is_done and late.is_done):
            client.advance()
            order += [sample.id for handle in (early, late) for sample in handle.take()]
    assert order == [0, 1, 4, 2, 3, 8]
