"""A worker's share of a rollout, over a scripted client and a real reward runner: what it sends, scores and stores."""

import math
import signal
import threading

import pytest
import torch

from hybrid_rl.batch import FIELDS
from hybrid_rl.controller import LocalBackend, dispatch
from hybrid_rl.engines.base import SamplingParams, derive_seed
from hybrid_rl.errors import RewardError
from hybrid_rl.process.interrupts import clear_interrupt
from hybrid_rl.rewards import RewardRunner
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.completion_stream import CompletionStream
from tests.support.groups import OpenGroup
from tests.unit.rollout.scripted import ROWS, SCRIPT, STATE, ScriptedClient, decode

TASKS = [RolloutTask(place, row) for place, row in enumerate(ROWS)]
LIMIT = 30.0  # seconds until a test that hangs fails


PARAMS = SamplingParams(3)


def call(first_id=0, purpose="test", params=PARAMS, **options):
    return RolloutCall(2, params, 9, STATE, purpose, first_id, **options)


def run(functions, script=SCRIPT, batches=None, between=lambda number: None, tasks=TASKS, **options):
    with RewardRunner(functions, **options) as rewards:
        return CompletionStream(ScriptedClient(script, batches, between), rewards, decode, seed=11).run(tasks, call())


def length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


@pytest.fixture(autouse=True)
def no_interrupt():
    yield
    clear_interrupt()


# -------------------------------------------------------------------------------------------------------- requests


def test_requests_carry_prompts_groups_and_a_seed_of_their_own():
    client = ScriptedClient()
    scored = CompletionStream(client, None, decode, seed=11)
    params = SamplingParams(3, temperature=0.5, stop_token_ids=(7,), seed=2)
    for first_id in (0, 4):
        scored.run(TASKS, call(first_id, "eval/3", params))
    (first, version), (second, _) = client.calls
    assert version == 9
    assert [(r.id, r.group, r.prompt_ids) for r in first] == [
        (0, 0, (4, 5)),
        (1, 0, (4, 5)),
        (2, 1, (6,)),
        (3, 1, (6,)),
    ]
    seeds = [r.params.seed for r in first]
    assert seeds == [derive_seed(11, 2, "eval/3", group, generation) for group in (0, 1) for generation in (0, 1)]
    assert len(set(seeds)) == 4
    assert {(r.params.max_tokens, r.params.temperature, r.params.stop_token_ids) for r in first} == {(3, 0.5, (7,))}
    # A second call: new ids and groups, the same noise for the same purpose.
    assert not {r.id for r in first} & {r.id for r in second}
    assert not {r.group for r in first} & {r.group for r in second}
    assert [r.params.seed for r in second] == seeds


def test_a_prompt_makes_the_same_requests_wherever_it_is_made():
    """Alone, or beside others: ids, groups and noise come from its place in the whole rollout."""
    client = ScriptedClient()
    scored = CompletionStream(client, None, decode, seed=11)
    for tasks in (TASKS, TASKS[1:], TASKS[:1]):
        scored.run(tasks, call(first_id=40))
    whole, second, first = (requests for requests, _ in client.calls)
    assert whole == [*first, *second]
    assert [request.id for request in whole] == [40, 41, 42, 43]


# ----------------------------------------------------------------------------------------------------------- batch


@pytest.mark.parametrize("batches", [[[0, 1, 2, 3]], [[3], [1, 0], [2]]], ids=["at once", "out of order"])
def test_columns_are_those_of_their_samples_in_the_order_of_the_requests(batches):
    batch, _ = run([length, lambda completions, **_: [0.5] * len(completions)], batches=batches, weights=[1, 2])
    assert batch.num_samples == 4
    assert [row.tolist() for row in batch["prompt_ids"]] == [[4, 5], [4, 5], [6], [6]]
    assert [row.tolist() for row in batch["completion_ids"]] == [[1, 2], [3], [1, 1, 1], [2, 3]]
    assert [row.tolist() for row in batch["rollout_logprobs"]] == [[-0.5, -1], [-1.5], [-0.5] * 3, [-1, -1.5]]
    assert batch["policy_version"].values.tolist() == [9] * 8
    assert batch["oldest_version"].tolist() == [9] * 4
    assert batch["completion_mask"].values.tolist() == [True] * 8
    assert batch["prompt_length"].tolist() == [2, 2, 1, 1]
    assert batch["completion_length"].tolist() == [2, 1, 3, 2]
    assert batch["finish_reason"] == ["stop", "stop", "length", "stop"]
    assert batch["completion"] == ["ab", "c", "aaa", "bc"]
    assert batch["prompt"] == [ROWS[0].prompt] * 2 + [ROWS[1].prompt] * 2
    assert batch["row"] == [{"answer": "a"}] * 2 + [{"answer": "b"}] * 2
    assert batch["group"].tolist() == [0, 0, 1, 1]
    assert batch["trajectory"].tolist() == [0, 1, 2, 3]
    assert batch["turn"].tolist() == [0] * 4
    assert batch["rewards"].tolist() == [3.0, 2.0, 4.0, 3.0]
    assert batch["rewards"].dtype == torch.float64
    assert batch["function_rewards"] == [[2.0, 0.5], [1.0, 0.5], [3.0, 0.5], [2.0, 0.5]]
    assert batch["extra"] == [{}] * 4
    absent = {"token_rewards", "baseline_rewards", "policy_length", "conversation", "routed_experts"}
    assert set(batch) == {name for name, field in FIELDS.items() if field.writer == "collector"} - absent


def test_the_oldest_version_behind_a_sample():
    class Mixed(ScriptedClient):
        def answer(self, requests, index):
            sample = super().answer(requests, index)
            sample.versions[:] = [7 - index if place == 1 else 9 for place in range(len(sample.versions))]
            return sample

    script = [([], "abort"), *SCRIPT[1:]]
    batch, _ = CompletionStream(Mixed(script), None, decode, seed=11).run(TASKS, call())
    # No token, one token (of version 9), and 9, 7 - index, 9 ...
    assert batch["oldest_version"].tolist() == [-1, 9, 5, 4]
    assert batch["policy_version"].values.tolist() == [9, 9, 5, 9, 9, 4]


def test_an_aborted_sample_without_tokens_has_a_row_of_its_own():
    batch, _ = run(length, [([], "abort"), *SCRIPT[1:]])
    assert batch["completion_ids"].lengths.tolist() == batch["completion_length"].tolist() == [0, 1, 3, 2]
    assert batch["rewards"].tolist() == [0.0, 1.0, 3.0, 2.0]


def test_without_rewards_there_are_only_samples():
    closed = RewardRunner(length)
    closed.close()  # it refuses what it is asked
    for rewards, is_scored in ((None, True), (None, False), (closed, False)):
        batch, _ = CompletionStream(ScriptedClient(), rewards, decode, seed=0).run(TASKS, call(is_scored=is_scored))
        assert not {"rewards", "function_rewards", "extra"} & set(batch)
        assert batch["completion"] == ["ab", "c", "aaa", "bc"]


# --------------------------------------------------------------------------------------------------------- rewards


def test_samples_are_scored_while_others_are_still_generated():
    order, scored = [], [threading.Event() for _ in range(3)]

    def reward(completion_ids, **_):
        order.append(("scored", len(completion_ids)))
        scored[len([kind for kind, _ in order if kind == "scored"]) - 1].set()
        return [1.0] * len(completion_ids)

    def between(number):
        if number:  # the next samples finish only when the ones before have been scored
            assert scored[number - 1].wait(LIMIT), "nothing is scored before generation ends"
        order.append(("generated", number))

    run(reward, batches=[[2], [0, 3], [1]], between=between)
    assert order == [
        ("generated", 0),
        ("scored", 1),
        ("generated", 1),
        ("scored", 2),
        ("generated", 2),
        ("scored", 1),
    ]


def test_reward_functions_see_their_samples_prompt_columns_and_state():
    seen = {}

    def reward(prompts, completions, completion_ids, answer, trainer_state):
        seen.update(zip(map(tuple, completion_ids), zip(prompts, completions, answer, strict=True), strict=True))
        assert trainer_state is STATE
        return [0.0] * len(prompts)

    run(reward, batches=[[3, 0], [2, 1]])
    assert seen == {
        (1, 2): ("first", "ab", "a"),
        (3,): ("first", "c", "a"),
        (1, 1, 1): (ROWS[1].prompt, [{"role": "assistant", "content": "aaa"}], "b"),
        (2, 3): (ROWS[1].prompt, [{"role": "assistant", "content": "bc"}], "b"),
    }


def test_failed_samples_have_no_reward_and_the_first_of_each_kind_says_why():
    def fails(completion_ids, **_):
        if any(len(ids) > 2 for ids in completion_ids):
            raise ValueError("too long")
        return [math.nan if ids[0] == 1 else 1.0 for ids in completion_ids]

    batch, report = run([fails, length], batches=[[0, 1], [2], [3]])
    assert [math.isnan(reward) for reward in batch["rewards"].tolist()] == [True, False, True, False]
    assert [math.isnan(first) for first, _ in batch["function_rewards"]] == [True, False, True, False]
    assert [second for _, second in batch["function_rewards"]] == [2.0, 1.0, 3.0, 2.0]
    assert sorted((failure.function, failure.key.trajectory, failure.reason) for failure in report.failures) == [
        ("fails", 0, "nan"),
        ("fails", 2, "raised"),
    ]
    assert all(failure.detail for failure in report.failures)
    assert any('raise ValueError("too long")' in failure.detail for failure in report.failures)


def test_failures_of_one_kind_bring_their_details_once():
    """Hundreds of tracebacks would travel to the driver, which shows one."""
    _, report = run(lambda completion_ids, **_: [math.nan] * len(completion_ids), batches=[[0], [1, 2], [3]])
    assert [failure.key.trajectory for failure in report.failures] == [0, 1, 2, 3]
    assert [bool(failure.detail) for failure in report.failures] == [True, False, False, False]


def test_what_functions_log_is_joined_over_their_calls():
    def reward(completion_ids, log_extra, log_metric, **_):
        log_extra("first", [ids[0] for ids in completion_ids])
        log_metric("longest", max(len(ids) for ids in completion_ids))
        return [0.0] * len(completion_ids)

    batch, report = run(reward, batches=[[2], [0, 3], [1]])
    assert batch["extra"] == [{"first": 1}, {"first": 3}, {"first": 1}, {"first": 2}]
    # Each call weighs as many samples as it had.
    assert report.logged.result() == {"longest": pytest.approx((1 * 3 + 2 * 2 + 1 * 1) / 4)}


def test_a_reward_that_cannot_be_had_at_all_is_an_error():
    rewards = RewardRunner(length)
    rewards.close()
    with pytest.raises(RewardError, match="closed"):
        CompletionStream(ScriptedClient(), rewards, decode, seed=0).run(TASKS, call())


# ------------------------------------------------------------------------------------------------------- interrupts


class Blocking:
    """A reward that waits until it is released, and says when it began."""

    def __init__(self):
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, completion_ids, **_):
        self.begun.set()
        self.released.wait(LIMIT)
        return [1.0] * len(completion_ids)


@pytest.fixture
def blocking():
    reward = Blocking()
    yield reward
    reward.released.set()


def test_ctrl_c_really_sent_while_a_reward_takes_long(blocking):
    """Through the local backend, which holds the signal back: the rollout sees that one waits."""

    class Worker:
        def __init__(self, context):
            self.rewards = RewardRunner(blocking)
            self.scored = CompletionStream(ScriptedClient(), self.rewards, decode, seed=0)

        @dispatch()
        def run(self):
            return self.scored.run(TASKS, call())

        def close(self):
            self.rewards.close()

    def interrupt():
        blocking.begun.wait(LIMIT)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    group = OpenGroup(Worker, LocalBackend("policy", Worker))
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            group.run()
        assert not blocking.released.is_set()
        blocking.released.set()
        # Nothing is left of the request, and what is left behind disturbs nobody.
        assert group.run()[0]["rewards"].tolist() == [1.0] * 4
    finally:
        group.close()
        signal.signal(signal.SIGINT, before)
