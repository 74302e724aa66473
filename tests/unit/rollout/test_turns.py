"""Turns on a rank's engine: who is answered when, what idling costs, and ranks that share an engine."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.completion import Completion
from hybrid_rl.engines.base import SamplingParams, derive_seed
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import DataError, EngineStateError, PeerFailedError
from hybrid_rl.process.interrupts import clear_interrupt
from hybrid_rl.rollout import turns as turns_module
from hybrid_rl.rollout.call import RolloutCall
from hybrid_rl.rollout.turns import EngineTurns, TrajectoryTokens
from tests.support.inside.rollouts import is_idle
from tests.unit.engines.engines import inplace, prompt, request
from tests.unit.engines.test_coordinator import alone, on_ranks


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(threading.enumerate())
    yield
    clear_interrupt()
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


class Counted(EngineClient):
    """A client that counts its steps."""

    num_advances = 0

    def advance(self, **options):
        self.num_advances += 1
        super().advance(**options)


def played(client, main):
    """Run `main(turns)` on the engine of a client."""
    turns = EngineTurns(client)
    try:
        with client.session():
            return turns.run(lambda: main(turns), 1)
    finally:
        turns.release()


def turns_on(main, **settings):
    """Run `main(turns)` on a real engine; its result and the client."""
    client = Counted(inplace(**settings).ready().engine)
    result = played(client, main)
    assert is_idle(client)
    return result, client


def test_answers_are_those_of_the_engine():
    requests = [request(number, 4 + number, 6) for number in range(5)]

    async def main(turns):
        return await asyncio.gather(*map(turns.complete, requests))

    answers, _ = turns_on(main, max_num_seqs=2)
    for sample, answer in zip(inplace().ready().run(requests), answers, strict=True):
        assert (answer.token_ids, answer.versions) == (sample.completion_ids, sample.versions)
        assert answer.logprobs == pytest.approx(sample.logprobs, abs=1e-5)
        assert answer.finish_reason == sample.finish_reason


def test_a_turn_begins_as_soon_as_it_is_asked_for(monkeypatch):
    """Fifty turns, one after another, while nobody else asks: did each wait until the rank looks, they took 100 s."""
    monkeypatch.setattr(turns_module, "IDLE_SECONDS", 2.0)

    async def main(turns):
        for _ in range(50):
            await turns.complete(request(0, 4, 1))
            await asyncio.sleep(0.001)

    begun = time.monotonic()
    turns_on(main)
    assert time.monotonic() - begun < 20


def test_a_rollout_ends_as_soon_as_its_agents_have(monkeypatch):
    """Ten of them; did each wait until the rank looks, they took 20 s."""
    monkeypatch.setattr(turns_module, "IDLE_SECONDS", 2.0)
    client = EngineClient(inplace().ready().engine)
    turns = EngineTurns(client)
    begun = time.monotonic()
    for _ in range(10):
        with client.session():
            turns.run(lambda: asyncio.sleep(0.002), 1)
    seconds = time.monotonic() - begun
    turns.release()
    assert seconds < 10


def test_a_rank_whose_agents_all_wait_is_idle():
    async def main(turns):
        await turns.complete(request(0, 4, 2))
        await asyncio.sleep(0.4)
        await turns.complete(request(0, 4, 2))

    begun = time.monotonic()
    _, client = turns_on(main)
    assert client.num_advances < 20 + 1.5 * (time.monotonic() - begun) / turns_module.IDLE_SECONDS
    assert client.stats().num_steps == 4


def test_the_order_of_the_trajectories_decides_who_waits():
    """One place in the engine: the oldest trajectory that asks goes first, whenever it asked."""
    order = []

    async def main(turns):
        call = RolloutCall(1, SamplingParams(1), 1, None, "test", 0)

        async def ask(priority):
            tokens = TrajectoryTokens(turns, call, seed=1, group=priority, priority=priority)
            await tokens.complete(prompt(4), max_tokens=3, stop=(), seed_parts=(priority,))
            order.append(priority)

        await asyncio.gather(*map(ask, (3, 2, 0, 1)))

    turns_on(main, max_num_seqs=1)
    assert sorted(order[1:]) == order[1:] and sorted(order) == [0, 1, 2, 3]


def test_requests_carry_what_the_noise_depends_on():
    asked = []

    class Turns:
        version = 1

        async def complete(self, request, asker):
            asked.append(request)
            return Completion([3], [0.0], [1], "stop")

    params = SamplingParams(9, temperature=0.5, stop_token_ids=(7,), stop_strings=("a",), seed=2)
    call = RolloutCall(1, params, 1, None, "train/3", 0)
    tokens = TrajectoryTokens(Turns(), call, seed=11, group=5, priority=4)
    asyncio.run(tokens.complete([1, 2], max_tokens=3, stop=("b",), seed_parts=(0, 1, "digest", 0)))
    (found,) = asked
    assert found.params.seed == derive_seed(11, 2, "train/3", 0, 1, "digest", 0)
    assert (found.prompt_ids, found.group, found.priority) == ((1, 2), 5, 4)
    assert (found.params.max_tokens, found.params.stop_strings, found.params.temperature) == (3, ("a", "b"), 0.5)


def test_a_request_that_cannot_run_is_the_error_of_its_caller():
    async def main(turns):
        with pytest.raises(DataError, match="vocabulary"):
            await turns.complete(replace(request(0, 4, 3), prompt_ids=(10**6,)))
        return await turns.complete(request(0, 4, 3))

    answer, _ = turns_on(main)
    assert len(answer.token_ids) == 3


def test_what_a_cancelled_caller_asked_for_is_dropped():
    async def main(turns):
        asking = asyncio.ensure_future(turns.complete(request(0, 4, 30)))
        await turns.complete(request(1, 4, 2))
        asking.cancel()
        await turns.complete(request(2, 4, 20))
        with pytest.raises(asyncio.CancelledError):
            await asking

    _, client = turns_on(main)
    assert client.stats().num_generated_tokens < 2 + 20 + 10


def test_a_closed_trajectory_gets_no_answer():
    async def main(turns):
        call = RolloutCall(1, SamplingParams(1), 1, None, "test", 0)
        tokens = TrajectoryTokens(turns, call, seed=1, group=0, priority=0)

        async def ask():
            await tokens.complete(prompt(4), max_tokens=40, stop=(), seed_parts=())

        asking = asyncio.ensure_future(ask())
        await asyncio.sleep(0.005)
        tokens.close("time")
        for waiting in (asking, ask()):
            with pytest.raises(TrajectoryEndedError, match="time"):
                await waiting

    turns_on(main)


def test_outside_of_a_rollout_there_is_no_answer():
    turns = EngineTurns(EngineClient(inplace().ready().engine))
    assert not turns.is_open
    with pytest.raises(TrajectoryEndedError, match="abort"):
        asyncio.run(turns.complete(request(0, 4, 2)))


def test_who_still_asks_from_another_loop_is_told_that_the_rollout_is_over():
    told = []

    def ask(turns):
        with pytest.raises(TrajectoryEndedError, match="abort"):
            asyncio.run(turns.complete(request(7, 4, 40)))
        told.append(True)

    async def main(turns):
        thread = threading.Thread(target=ask, args=(turns,))
        thread.start()
        await turns.complete(request(0, 4, 5))
        return thread

    thread, _ = turns_on(main)
    thread.join(10)
    assert told == [True]


def test_an_error_of_the_engine_ends_the_rollout():
    rig = inplace().ready()
    client, ended = EngineClient(rig.engine), []

    def fail():
        del rig.engine.step  # once
        raise RuntimeError("out of memory")

    async def main(turns):
        try:
            await turns.complete(request(0, 4, 3))
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    rig.engine.step = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        played(client, main)
    assert ended == ["cancelled"] and not rig.engine.num_unfinished


def test_a_blocked_event_loop_is_reported(monkeypatch, caplog):
    monkeypatch.setattr("hybrid_rl.process.threads.BLOCKED_SECONDS", 0.1)

    async def main(turns):
        time.sleep(0.3)  # noqa: ASYNC251

    turns_on(main)
    assert "blocks their event loop" in caplog.text and "time.sleep(0.3)" in caplog.text


# ------------------------------------------------------------------------------------ ranks that share an engine


def test_ranks_that_share_an_engine_go_on_until_the_last_has_ended():
    """One asks at once, one after a long tool, one never; all leave together, and idling is no spinning."""
    delays = {0: (0.0, 0.0), 1: (0.15, 0.1), 2: None}

    def play(client, rank):
        async def main(turns):
            answers = []
            for number, delay in enumerate(delays[rank] or ()):
                await asyncio.sleep(delay)
                answers.append(await turns.complete(request(0, 4 + rank, 3 + number)))
            return answers

        return played(client, main)

    results = on_ranks(3, play)
    for rank, answers in enumerate(results):
        for number, answer in enumerate(answers):
            (sample,) = alone([request(0, 4 + rank, 3 + number)])
            assert answer.token_ids == sample.completion_ids
    assert [len(answers) for answers in results] == [2, 2, 0]


def test_a_rank_may_ask_its_judges_while_another_still_plays():
    """After its own agents it streams requests in the same session; the other rank's agents go on meanwhile."""

    def play(client, rank):
        turns = EngineTurns(client)

        async def main():
            answers = []
            for _ in range(1 + 4 * rank):
                answers.append(await turns.complete(request(0, 4 + rank, 3)))
                await asyncio.sleep(0.02 * rank)
            return answers

        try:
            with client.session():
                answers = turns.run(main, 1)
                judged = [event for events in client.stream([request(-2, 5, 4)], 1) for event in events]
            return answers, judged
        finally:
            turns.release()

    for rank, (answers, judged) in enumerate(on_ranks(2, play)):
        (sample,) = alone([request(0, 4 + rank, 3)])
        assert [answer.token_ids for answer in answers] == [sample.completion_ids] * (1 + 4 * rank)
        (sample,) = alone([request(-2, 5, 4)])
        assert [event.completion_ids for event in judged] == [sample.completion_ids]


def test_idle_ranks_meet_seldom():
    def play(client, rank):
        played(client, lambda turns: asyncio.sleep(0.3 if rank else 0.0))
        return len(client.exchanged)

    begun = time.monotonic()
    met = on_ranks(2, play)[0]
    assert met < 20 + 1.5 * (time.monotonic() - begun) / turns_module.SHARED_IDLE_SECONDS


def test_the_failure_of_one_rank_ends_the_rollout_of_the_others():
    def play(client, rank):
        async def main(turns):
            await turns.complete(request(0, 4, 3))
            if rank:
                raise ValueError("only here")
            await asyncio.sleep(30)

        return played(client, main)

    first, second = on_ranks(2, play)
    assert isinstance(second, ValueError)
    assert isinstance(first, EngineStateError) and isinstance(first, PeerFailedError)
