"""A client whose engine steps in a thread: it answers, and takes requests, while a step runs."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from hybrid_rl.engines import step_thread
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import EngineStateError
from tests.support.inside.engines import thread_of
from tests.unit.engines.engines import inplace, request, same_samples

DEADLINE_SECONDS = 30.0


class Gate:
    """An engine's step that waits to be let through."""

    def __init__(self, engine):
        self.step, self.threads = engine.step, []
        self.entered, self.open = threading.Event(), threading.Event()
        engine.step = self

    def __call__(self):
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.open.wait(DEADLINE_SECONDS)
        return self.step()


@pytest.fixture
def client():
    made = EngineClient(inplace().ready().engine, in_thread=True)
    yield made
    made.close()


@pytest.fixture
def gate(client):
    return Gate(client.engine)


def aside(call):
    """Another thread that makes a call."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_requests_cancels_and_counters_are_answered_while_a_step_runs(client, gate):
    first, second = client.submit([request(0, 4, 6)], 1), client.submit([request(1, 4, 3)], 1)
    events = []
    stepping = aside(lambda: events.extend(client.poll(first)))
    assert gate.entered.wait(DEADLINE_SECONDS)
    client.cancel(first)
    third = client.submit([request(2, 4, 2)], 1)
    assert client.stats().num_waiting == 3
    gate.open.set()
    stepping.join(DEADLINE_SECONDS)
    events += [event for handle in (first, second, third) for event in client.wait(handle)]
    assert [(e.id, e.finish_reason, len(e.completion_ids)) for e in events] == [
        (0, "abort", 1),
        (1, "length", 3),
        (2, "length", 2),
    ]
    assert set(gate.threads) == {"rollout-engine"}


def test_threads_that_wait_at_the_same_time_share_the_steps(client):
    samples = {}

    def ask(identity):
        samples[identity] = client.wait(client.submit([request(identity, 4, 6)], 1))

    threads = [aside(lambda number=number: ask(number)) for number in range(4)]
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    same_samples(
        [samples[number][0] for number in range(4)], inplace().ready().run([request(i, 4, 6) for i in range(4)])
    )


def leave_first(gate, monkeypatch):
    """Have the caller of the next step break out of it, as by a Ctrl-C."""

    class Left(Future):
        def result(self, timeout=None):
            assert gate.entered.wait(DEADLINE_SECONDS)
            monkeypatch.setattr(step_thread, "Future", Future)
            Left.result = Future.result
            raise KeyboardInterrupt

    monkeypatch.setattr(step_thread, "Future", Left)


def test_a_step_that_its_caller_left_is_finished_and_its_events_come_later(client, gate, monkeypatch):
    handle = client.submit([request(0, 4, 1), request(1, 4, 2)], 1)
    leave_first(gate, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        client.poll(handle)
    gate.open.set()
    assert client.at_rest().stats().num_generated_tokens == 2  # it waits for the step
    assert [event.id for event in client.poll(handle)] == [0]
    assert [event.id for event in client.wait(handle)] == [1]


def test_the_error_of_a_step_that_its_caller_left_is_raised_later(client, gate, monkeypatch):
    handle = client.submit([request(0)], 1)
    leave_first(gate, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        client.poll(handle)

    def fails():
        raise KeyError("in the thread")

    step, gate.step = gate.step, fails
    gate.open.set()
    client.at_rest()
    gate.step = step
    with pytest.raises(KeyError, match="in the thread"):
        client.poll(handle)


def test_what_the_thread_raises_is_raised_by_poll(client):
    handle = client.submit([request(0)], 1)
    step = client.engine.step

    def fails():
        raise KeyError("in the thread")

    client.engine.step = fails
    with pytest.raises(KeyError, match="in the thread"):
        client.poll(handle)
    client.engine.step = step
    assert [event.id for event in client.wait(handle)] == [0]


def test_aborting_all_leaves_the_engine_empty(client):
    handle = client.submit([request(0, 4, 6), request(1, 4, 3)], 1)
    client.poll(handle)
    client.abort_all()
    assert (client.engine.num_unfinished, client.stats().num_running, client.wait(handle)) == (0, 0, [])
    assert client.generate([request(0)], 1)[0].finish_reason == "length"


def test_closing_ends_the_thread_and_a_second_time_does_nothing(client):
    handle = client.submit([request(0)], 1)
    client.close()
    client.close()
    assert not thread_of(client).is_alive()
    with pytest.raises(EngineStateError, match="the engine is closed"):
        client.poll(handle)


def test_the_thread_computes_with_as_many_threads_as_its_maker(client):
    seen = []
    step = client.engine.step
    client.engine.step = lambda: (seen.append(torch.get_num_threads()), step())[1]
    client.generate([request(0, 4, 1)], 1)
    assert seen == [torch.get_num_threads()]


class Streams:
    """torch.cuda as far as streams go: which one is current is a matter of each thread, and at first the default."""

    def __init__(self, monkeypatch):
        self.here = threading.local()
        self.devices = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current())
        monkeypatch.setattr(torch.cuda, "set_stream", self.set)
        monkeypatch.setattr(torch.cuda, "set_device", self.devices.append)

    def current(self):
        return getattr(self.here, "stream", self.stream("default"))

    def set(self, stream):
        self.here.stream = stream

    @staticmethod
    def stream(name):
        return SimpleNamespace(name=name, device=torch.device("cuda", 3))


def test_steps_run_on_the_stream_on_which_the_engine_was_made(monkeypatch):
    """Its kernels meet there: what a step starts on another stream may be read before it is done."""
    rig = inplace().ready()
    with monkeypatch.context() as patch:
        streams = Streams(patch)
        streams.set(streams.stream("of the engine"))
        client = EngineClient(rig.engine, in_thread=True)
        streams.set(streams.stream("of the trainer"))
        seen = []
        step = rig.engine.step
        rig.engine.step = lambda: (seen.append(torch.cuda.current_stream().name), step())[1]
        client.generate([request(0, 4, 2)], 1)
        assert seen == ["of the engine"] * 2
        assert streams.devices == [torch.device("cuda", 3)]
        assert streams.current().name == "of the trainer"
        client.close()
