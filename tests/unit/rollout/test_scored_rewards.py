"""Rollouts whose rewards are of single tokens, of whole groups, or come late: what is submitted, and what joins."""

import math
import threading

import pytest
import torch

from hybrid_rl.batch import Batch, SampleKey
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import FinishedSample, SamplingParams
from hybrid_rl.rewards import RewardFailure, RewardRunner, dense_reward, format_reward, group_reward
from hybrid_rl.rewards.results import THE_AGENT
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.completion_stream import CompletionStream
from hybrid_rl.rollout.deferred_scores import LateScores, merge_late
from tests.unit.rollout.scripted import ROWS, STATE, ScriptedClient, decode

TASKS = [RolloutTask(place, row) for place, row in enumerate(ROWS)]
FIRST_ID = 100
CALL = RolloutCall(2, SamplingParams(3), 9, STATE, "test", FIRST_ID)
NAN = math.nan


def run(functions, batches=None, between=lambda number: None, tasks=TASKS, **options):
    with RewardRunner(functions, **options) as rewards:
        scored = CompletionStream(ScriptedClient(batches=batches, between=between), rewards, decode, seed=11)
        return (*scored.run(tasks, CALL), rewards)


def length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


@dense_reward
def per_token(completion_ids, **_):
    return [[float(token) for token in ids] if ids[0] != 3 else 7.0 for ids in completion_ids]


def test_samples_that_finish_one_by_one_share_few_calls():
    """A call for each eighth of 20 samples, rounded up to 3, and one for the 2 that are left."""
    sizes = []

    def reward(completion_ids, **_):
        sizes.append(len(completion_ids))
        return [float(ids[0]) for ids in completion_ids]

    script = [([token], "stop") for token in range(1, 8)] * 3
    with RewardRunner(reward) as rewards:
        client = ScriptedClient(script, batches=[[index] for index in range(20)])
        scored = CompletionStream(client, rewards, decode, seed=11)
        batch, _ = scored.run(TASKS[:1], RolloutCall(20, SamplingParams(3), 9, STATE, "test", FIRST_ID))
    assert sizes == [3] * 6 + [2]
    assert batch["rewards"].tolist() == [float(ids[0]) for ids, _ in script[:20]]


# ------------------------------------------------------------------------------------------------------ single tokens


@pytest.mark.parametrize("batches", [[[0, 1, 2, 3]], [[3], [1, 0], [2]]], ids=["at once", "out of order"])
def test_token_rewards_lie_beside_the_tokens(batches):
    batch, report, _ = run([length, per_token], batches, weights=[1.0, 0.5])
    assert batch["function_rewards"] == [[2.0, 3.0], [1.0, 7.0], [3.0, 3.0], [2.0, 5.0]]
    assert batch["rewards"].tolist() == [3.5, 4.5, 4.5, 4.5]
    tokens = batch["token_rewards"]
    assert [row.tolist() for row in tokens] == [[0.5, 1.0], [0.0], [0.5, 0.5, 0.5], [1.0, 1.5]]
    assert tokens.values.dtype == torch.float32 and torch.equal(tokens.offsets, batch["completion_ids"].offsets)
    assert not report.failures


def test_the_column_is_there_on_every_rank_or_on_none():
    empty, _, _ = run(per_token, tasks=[])
    full, _, _ = run(per_token)
    assert set(empty) == set(full) and "token_rewards" in empty
    assert Batch.concat([empty, full]).num_samples == 4
    none, _, _ = run(dense_reward(lambda completion_ids, **_: [1.0] * len(completion_ids)))
    assert none["token_rewards"].values.tolist() == [0.0] * 8  # declared, but all are numbers of whole samples
    assert "token_rewards" not in run(length)[0]


def test_token_rewards_of_samples_that_failed_are_zero():
    batch, _, _ = run(
        [per_token, lambda completion_ids, **_: [NAN if len(ids) == 3 else 0.0 for ids in completion_ids]]
    )
    assert batch["rewards"].isnan().tolist() == [False, False, True, False]
    assert [row.tolist() for row in batch["token_rewards"]] == [[1.0, 2.0], [0.0], [0.0] * 3, [2.0, 3.0]]


# ------------------------------------------------------------------------------------------------------ whole groups


def test_groups_are_scored_once_when_the_last_of_their_samples_is_there():
    calls, scored = [], threading.Event()

    @group_reward
    def reward(completions, prompts, **_):
        calls.append(list(completions))
        scored.set()
        return [float(place) for place in range(len(completions))]

    def between(number):
        if number == 2:  # the second group is whole, the first is not
            assert scored.wait(30.0), "a whole group waits for the others"

    batch, _, _ = run(reward, [[3, 0], [2], [1]], between, score_by="group")
    texts = [[{"role": "assistant", "content": text}] for text in ("aaa", "bc")]
    assert calls == [texts, ["ab", "c"]]  # each in order of generation
    assert batch["rewards"].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_a_group_that_fails_is_masked_whole():
    def reward(completion_ids, **_):
        if any(len(ids) == 1 for ids in completion_ids):
            raise ValueError("one token")
        return [1.0] * len(completion_ids)

    batch, report, _ = run([reward, length], score_by="group")
    assert batch["rewards"].isnan().tolist() == [True, True, False, False]
    assert [failure.key.trajectory for failure in report.failures] == [FIRST_ID, FIRST_ID + 1]


# ------------------------------------------------------------------------------------------------------ late scores


def late_run():
    """A function that fails on one sample and gives None for another; a reward model in the middle."""

    def first(completion_ids, **_):
        return [{2: 1.0, 1: None, 3: NAN}[len(ids)] for ids in completion_ids]

    return run([first, "org/reward-model", per_token], weights=[1.0, 10.0, 0.5])


def test_rewards_wait_for_reward_models():
    batch, report, rewards = late_run()
    assert rewards.names == ["first", "reward-model", "per_token"] and rewards.entries.late == [1]
    assert batch["rewards"].isnan().all()
    values = batch["function_rewards"]
    assert [[None if v != v else v for v in row] for row in values] == [
        [1.0, None, 3.0], [None, None, 7.0], [None, None, 3.0], [1.0, None, 5.0]
    ]  # fmt: skip
    assert [failure.reason for failure in report.failures] == ["nan"]


def test_late_scores_join_in_their_place_and_with_their_weight():
    batch, report, rewards = late_run()
    lost = RewardFailure("reward-model", SampleKey(FIRST_ID + 3), "long", "too long")
    merged, failures = merge_late(batch, report.failures, rewards, LateScores({1: [0.25, -1.0, 2.0, None]}, [lost]))
    assert merged["rewards"].tolist()[:2] == [1.0 + 2.5 + 1.5, -10.0 + 3.5]
    assert merged["rewards"].isnan().tolist() == [False, False, True, True]
    assert [row[1] for row in merged["function_rewards"]][:3] == [0.25, -1.0, 2.0]
    assert failures == [*report.failures, lost]
    # Samples without a reward have none of their tokens either.
    assert [row.tolist() for row in merged["token_rewards"]] == [[0.5, 1.0], [0.0], [0.0] * 3, [0.0] * 2]
    assert set(merged) == set(batch) and batch["rewards"].isnan().all()  # the old one is as it was


def test_a_sample_that_nothing_applies_to_is_counted_when_the_last_score_is_there():
    batch, report, rewards = run([lambda completions, **_: [None] * len(completions), "org/reward-model"])
    assert not report.failures
    merged, failures = merge_late(batch, report.failures, rewards, LateScores({1: [None, 1.0, None, 0.0]}))
    assert merged["rewards"].isnan().tolist() == [True, False, True, False]
    assert [(failure.function, failure.key.trajectory, failure.reason) for failure in failures] == [
        ("all functions", FIRST_ID, "none"), ("all functions", FIRST_ID + 2, "none")
    ]  # fmt: skip


def test_functions_get_what_the_prompt_has_opened():
    """The template ends the prompt within a thought: what is sampled is half of the form."""
    seen = []

    def look(completions, completion_openings, **_):
        seen.extend(zip(completions, completion_openings, strict=True))
        return format_reward()(completions, completion_openings)

    def decode(ids):
        return "".join({7: "assistant\n", 8: "<think>\n", 1: "a</think>", 2: "<answer>b</answer>"}[id] for id in ids)

    class Client(ScriptedClient):
        def stream(self, requests, version):
            yield [FinishedSample(request.id, [1, 2], [0.0] * 2, [version] * 2, "stop") for request in requests]

    rows = [PromptRow(0, "p", (7, 8), {}), PromptRow(1, "p", (8, 7), {})]
    with RewardRunner(look) as rewards:
        tasks = [RolloutTask(place, row) for place, row in enumerate(rows)]
        batch, _ = CompletionStream(Client(), rewards, decode, seed=11).run(tasks, CALL)
    said = "a</think><answer>b</answer>"
    assert sorted(seen) == [(said, "")] * 2 + [(said, "<think>\n")] * 2
    assert batch["rewards"].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_trajectory_without_a_completion_has_no_late_score():
    """Its agent failed: what a reward model makes of its place is neither its reward nor part of a mean."""
    batch, report, rewards = run([length, "org/reward-model"])
    first = batch["trajectory"][0].item()
    unmade = RewardFailure(THE_AGENT, SampleKey(first), "agent", "gone")
    merged, failures = merge_late(batch, [*report.failures, unmade], rewards, LateScores({1: [9.0, 1.0, 2.0, 3.0]}))
    assert [row[1] for row in merged["function_rewards"]][1:] == [1.0, 2.0, 3.0]
    assert math.isnan(merged["function_rewards"][0][1]) and math.isnan(float(merged["rewards"][0]))
    assert failures == [unmade]


def test_late_scores_are_of_trajectories():
    """Of 7 with two turns and 8 with one. A failure on one turn masks both."""
    rewards = RewardRunner(["org/reward-model", length], weights=[2.0, 1.0])
    batch = Batch(
        {
            "trajectory": torch.tensor([8, 7, 7]),
            "turn": torch.tensor([0, 1, 0]),
            "rewards": torch.full((3,), NAN, dtype=torch.float64),
            "function_rewards": [[NAN, 5.0], [NAN, 3.0], [NAN, 3.0]],
        }
    )
    merged, failures = merge_late(batch, [], rewards, LateScores({0: [1.0, 0.5]}))
    assert merged["function_rewards"] == [[1.0, 5.0], [0.5, 3.0], [0.5, 3.0]] and not failures
    assert merged["rewards"].tolist() == [7.0, 4.0, 4.0]
    lost = RewardFailure("reward-model", SampleKey(7, 1), "long", "too long")
    merged, failures = merge_late(batch, [], rewards, LateScores({0: [1.0, None]}, [lost]))
    assert merged["rewards"].isnan().tolist() == [False, True, True] and failures == [lost]


def test_a_reward_model_alone_needs_no_function():
    batch, report, rewards = run("org/reward-model")
    merged, failures = merge_late(batch, report.failures, rewards, LateScores({0: [1.0, 2.0, 3.0, 4.0]}))
    assert merged["rewards"].tolist() == [1.0, 2.0, 3.0, 4.0] and not failures
    empty, report, rewards = run("org/reward-model", tasks=[])
    assert merge_late(empty, report.failures, rewards, LateScores({0: []}))[0].num_samples == 0
