"""An engine that steps in a thread keeps the contract (see engines.py), and answers while a step runs."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from hybrid_rl.engines import threaded
from hybrid_rl.engines.threaded import ThreadedEngine
from hybrid_rl.errors import EngineStateError
from tests.unit.engines.engines import contract, finish, request, same_samples

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
def rig():
    rig = contract().ready()
    rig.engine = ThreadedEngine(rig.engine)
    yield rig
    rig.engine.close()


@pytest.fixture
def gate(rig):
    return Gate(rig.engine._inner)


def aside(call):
    """Another thread that makes a call."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_samples_are_those_of_the_engine_itself(rig):
    requests = [request(i, 4, 6) for i in range(3)]
    same_samples(rig.run(requests), contract().ready().run(requests))


def test_an_abort_and_the_counters_are_answered_while_a_step_runs(rig, gate):
    rig.engine.submit([request(0, 4, 6), request(1, 4, 3)], 1)
    events = []
    stepping = aside(lambda: events.extend(rig.engine.step()))
    assert gate.entered.wait(DEADLINE_SECONDS)
    rig.engine.abort([0])
    assert rig.engine.stats().num_waiting == 2
    gate.open.set()
    stepping.join(DEADLINE_SECONDS)
    events += finish(rig.engine)
    assert [(e.id, e.finish_reason, len(e.completion_ids)) for e in events] == [(0, "abort", 1), (1, "length", 3)]
    assert set(gate.threads) == {"rollout-engine"}


def test_a_step_that_its_caller_left_is_finished_and_its_events_come_with_the_next(rig, gate, monkeypatch):
    rig.engine.submit([request(0, 4, 1), request(1, 4, 2)], 1)

    class Left(Future):
        def result(self, timeout=None):
            assert gate.entered.wait(DEADLINE_SECONDS)
            monkeypatch.setattr(threaded, "Future", Future)
            Left.result = Future.result
            raise KeyboardInterrupt

    monkeypatch.setattr(threaded, "Future", Left)
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    gate.open.set()
    rig.engine.pause("keep")  # waits for the step
    assert [event.id for event in rig.engine.step()] == [0]
    assert rig.engine.step() == []
    rig.engine.resume()
    assert [event.id for event in rig.engine.step()] == [1]


def test_what_the_thread_raises_is_raised_by_step(rig):
    rig.engine.submit([request(0)], 1)
    step = rig.engine._inner.step

    def fails():
        raise KeyError("in the thread")

    rig.engine._inner.step = fails
    with pytest.raises(KeyError, match="in the thread"):
        rig.engine.step()
    rig.engine._inner.step = step
    assert [event.id for event in finish(rig.engine)] == [0]


def test_breaking_off_leaves_the_engine_empty(rig):
    rig.engine.submit([request(0, 4, 6), request(1, 4, 3)], 1)
    rig.engine.step()
    rig.engine.break_off()
    assert (rig.engine.num_unfinished, rig.engine.stats().num_running) == (0, 0)
    assert rig.run([request(0)])[0].finish_reason == "length"


def test_closing_ends_the_thread_and_a_second_time_does_nothing(rig):
    rig.engine.close()
    rig.engine.close()
    assert not rig.engine._thread.is_alive()
    with pytest.raises(EngineStateError, match="the engine is closed"):
        rig.engine.step()


def test_the_thread_computes_with_as_many_threads_as_its_maker(rig):
    seen = []
    step = rig.engine._inner.step
    rig.engine._inner.step = lambda: (seen.append(torch.get_num_threads()), step())[1]
    rig.engine.step()
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
    rig = contract().ready()
    with monkeypatch.context() as patch:
        streams = Streams(patch)
        streams.set(streams.stream("of the engine"))
        engine = ThreadedEngine(rig.engine)
        streams.set(streams.stream("of the trainer"))
        seen = []
        step = rig.engine.step
        rig.engine.step = lambda: (seen.append(torch.cuda.current_stream().name), step())[1]
        engine.step()
        engine.step()
        assert seen == ["of the engine"] * 2
        assert streams.devices == [torch.device("cuda", 3)]
        assert streams.current().name == "of the trainer"
        engine.close()
