"""The collector over a scripted client and a real reward runner: what it sends, scores, counts and stores."""

import logging
import math
import threading

import pytest
import torch

from hybrid_rl.batch import FIELDS
from hybrid_rl.data import PromptRow
from hybrid_rl.errors import RewardError
from hybrid_rl.rewards import RewardRunner, TrainerState
from hybrid_rl.rollout import FinishedSample, SamplingParams, derive_seed
from hybrid_rl.rollout.collector import Collector, generations_of

NAN = math.nan
STATE = TrainerState(global_step=3, max_steps=10, epoch=0.5)
ROWS = [
    PromptRow(0, "first", (4, 5), {"answer": "a"}),
    PromptRow(1, [{"role": "user", "content": "2"}], (6,), {"answer": "b"}),
]
WORDS = "?abcdefgh"


class ScriptedClient:
    """Answers the i-th request of a call with `script[i]` = (ids, finish reason), in `batches` of indices."""

    def __init__(self, script, batches=None, between=None):
        self.script = script
        self.batches = batches or [range(len(script))]
        self.between = between or (lambda number: None)
        self.calls = []

    def stream(self, requests, version):
        self.calls.append((requests, version))
        for number, indices in enumerate(self.batches):
            self.between(number)
            yield [self.answer(requests[index], *self.script[index]) for index in indices]

    @staticmethod
    def answer(request, ids, reason):
        return FinishedSample(request.id, list(ids), [-0.5 * token for token in ids], [9] * len(ids), reason)


SCRIPT = [([1, 2], "stop"), ([3], "stop"), ([1, 1, 1], "length"), ([2, 3], "stop")]


def decode(ids):
    return "".join(WORDS[token] for token in ids)


def rollout(functions, script=SCRIPT, batches=None, *, between=None, num_generations=2, share=1.0, **options):
    client = ScriptedClient(script, batches, between)
    with RewardRunner(functions, **options) as rewards:
        collector = Collector(client, rewards, decode, seed=11, max_failure_share=share)
        return collector.rollout(ROWS, num_generations, SamplingParams(3), 9, STATE, purpose="test")


def length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


# -------------------------------------------------------------------------------------------------------- requests


def test_requests_carry_prompts_groups_and_a_seed_of_their_own():
    client = ScriptedClient(SCRIPT)
    collector = Collector(client, None, decode, seed=11, max_failure_share=0)
    params = SamplingParams(3, temperature=0.5, stop_token_ids=(7,), seed=2)
    for _ in range(2):
        collector.rollout(ROWS, 2, params, 9, STATE, purpose="eval/3")
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


class Sampler:
    def take(self, num_prompts):
        return ROWS[:num_prompts]


def test_the_noise_of_a_training_step_depends_on_the_step():
    client = ScriptedClient(SCRIPT)
    collector = Collector(client, None, decode, seed=11, max_failure_share=0)
    seeds = []
    for step in (1, 2, 1):
        collector.collect(Sampler(), 2, 2, SamplingParams(3), 9, TrainerState(step, 10, 0.0))
        seeds.append([request.params.seed for request in client.calls[-1][0]])
    assert seeds[0] == seeds[2]
    assert not set(seeds[0]) & set(seeds[1])


# ----------------------------------------------------------------------------------------------------------- batch


@pytest.mark.parametrize("batches", [[[0, 1, 2, 3]], [[3], [1, 0], [2]]], ids=["at once", "out of order"])
def test_columns_are_those_of_their_samples_in_the_order_of_the_requests(batches):
    batch = rollout([length, lambda completions, **_: [0.5] * len(completions)], batches=batches, weights=[1, 2]).batch
    assert batch.num_samples == 4
    assert [row.tolist() for row in batch["prompt_ids"]] == [[4, 5], [4, 5], [6], [6]]
    assert [row.tolist() for row in batch["completion_ids"]] == [[1, 2], [3], [1, 1, 1], [2, 3]]
    assert [row.tolist() for row in batch["rollout_logprobs"]] == [[-0.5, -1], [-1.5], [-0.5] * 3, [-1, -1.5]]
    assert batch["policy_version"].values.tolist() == [9] * 8
    assert batch["completion_mask"].values.tolist() == [True] * 8
    assert batch["finish_reason"] == ["stop", "stop", "length", "stop"]
    assert batch["completion"] == ["ab", "c", "aaa", "bc"]
    assert batch["prompt"] == [ROWS[0].prompt] * 2 + [ROWS[1].prompt] * 2
    assert batch["row"] == [{"answer": "a"}] * 2 + [{"answer": "b"}] * 2
    assert batch["group"].tolist() == [0, 0, 1, 1]
    assert batch["trajectory"].tolist() == [0, 1, 2, 3]
    assert batch["turn"].tolist() == [0] * 4
    assert batch["rewards"].tolist() == [3.0, 2.0, 4.0, 3.0]
    assert batch["function_rewards"] == [[2.0, 0.5], [1.0, 0.5], [3.0, 0.5], [2.0, 0.5]]
    assert set(batch) == {name for name, field in FIELDS.items() if field.writer == "collector"} - {"token_rewards"}


def test_groups_and_trajectories_are_unique_across_calls():
    collector = Collector(ScriptedClient(SCRIPT), None, decode, seed=0, max_failure_share=0)
    batches = [collector.rollout(ROWS, 2, SamplingParams(3), 9, STATE, purpose="x").batch for _ in range(3)]
    for column, count in (("group", 6), ("trajectory", 12)):
        assert len({value for batch in batches for value in batch[column].tolist()}) == count


def test_generations_are_the_samples_one_by_one():
    batch = (
        Collector(ScriptedClient(SCRIPT), None, decode, seed=0, max_failure_share=0)
        .rollout(ROWS, 2, SamplingParams(3), 9, STATE, purpose="x")
        .batch
    )
    third = generations_of(batch)[2]
    assert (third.prompt, third.completion, third.completion_ids) == (ROWS[1].prompt, "aaa", [1, 1, 1])
    assert (third.logprobs, third.finish_reason) == ([-0.5] * 3, "length")


def test_an_aborted_sample_without_tokens_has_a_row_of_its_own():
    batch = rollout(length, [([], "abort"), *SCRIPT[1:]]).batch
    assert batch["completion_ids"].lengths.tolist() == [0, 1, 3, 2]
    assert batch["rewards"].tolist() == [0.0, 1.0, 3.0, 2.0]


# --------------------------------------------------------------------------------------------------------- rewards


def test_samples_are_scored_while_others_are_still_generated():
    order, scored = [], [threading.Event() for _ in range(3)]

    def reward(completion_ids, **_):
        order.append(("scored", len(completion_ids)))
        scored[len([kind for kind, _ in order if kind == "scored"]) - 1].set()
        return [1.0] * len(completion_ids)

    def between(number):
        if number:  # the next samples finish only when the ones before have been scored
            assert scored[number - 1].wait(30), "nothing is scored before generation ends"
        order.append(("generated", number))

    rollout(reward, batches=[[2], [0, 3], [1]], between=between)
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

    rollout(reward, batches=[[3, 0], [2, 1]])
    assert seen == {
        (1, 2): ("first", "ab", "a"),
        (3,): ("first", "c", "a"),
        (1, 1, 1): (ROWS[1].prompt, [{"role": "assistant", "content": "aaa"}], "b"),
        (2, 3): (ROWS[1].prompt, [{"role": "assistant", "content": "bc"}], "b"),
    }


def only_c(completion_ids, **_):
    return [1.0 if ids == [3] else NAN for ids in completion_ids]


def test_failed_samples_are_masked_counted_and_shown(caplog):
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        collected = rollout(only_c, batches=[[0], [1, 2], [3]], share=0.75)
    assert [math.isnan(reward) for reward in collected.batch["rewards"].tolist()] == [True, False, True, True]
    assert collected.batch["rewards"].dtype == torch.float64
    assert collected.metrics["rewards/num_failed"] == 3
    assert collected.metrics["reward"] == 1.0
    assert "test: 3 samples have no reward and are masked" in caplog.text
    assert "returned NaN" in caplog.text


def test_too_many_failures_stop_the_run():
    with pytest.raises(RewardError, match=r"step 3: 3 of 4 samples \(75\.0%\) have no reward"):
        rollout(only_c, batches=[[0], [1, 2], [3]], share=0.74)


# --------------------------------------------------------------------------------------------------------- metrics


def test_metrics_by_hand():
    collected = rollout(
        [length, lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids]], weights=[1, 10]
    )
    # length 2, 1, 3, 2; first token 1, 3, 1, 2; reward 12, 31, 13, 22.
    expected = {
        "completions/mean_length": 2.0,
        "completions/min_length": 1.0,
        "completions/max_length": 3.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 5 / 3,
        "rewards/length/mean": 2.0,
        "rewards/length/std": math.sqrt(2 / 3),
        "rewards/<lambda>/mean": 1.75,
        "rewards/<lambda>/std": math.sqrt(2.75 / 3),
        "reward": 19.5,
        "reward_std": math.sqrt((7.5**2 + 11.5**2 + 6.5**2 + 2.5**2) / 3),
        "frac_reward_zero_std": 0.0,
        "rewards/num_failed": 0.0,
    }
    assert collected.metrics == pytest.approx(expected)
    assert set(collected.timings.seconds) == {"rollout", "reward"}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 1.0, 0.0, 1.0], 0.5),
        ([1.0, 1.0, 0.1, 0.1], 1.0),
        ([1.0, 0.0, 0.0, 1.0], 0.0),
        ([1.0, NAN, 0.0, 1.0], 0.5),  # one scored sample cannot differ from another
        ([NAN, NAN, 0.0, 1.0], 0.5),
    ],
)
def test_groups_without_signal(rewards, expected):
    by_ids = {tuple(ids): reward for (ids, _), reward in zip(SCRIPT, rewards, strict=True)}
    collected = rollout(lambda completion_ids, **_: [by_ids[tuple(ids)] for ids in completion_ids])
    assert collected.metrics["frac_reward_zero_std"] == expected


def test_a_column_that_does_not_apply_is_left_out_of_its_mean():
    collected = rollout(
        [lambda completion_ids, **_: [None if len(ids) == 2 else 4.0 for ids in completion_ids], length]
    )
    assert collected.metrics["rewards/<lambda>/mean"] == 4.0
    assert collected.batch["rewards"].tolist() == [2.0, 5.0, 7.0, 2.0]


def test_what_functions_log_is_joined_over_their_calls():
    def reward(completion_ids, log_extra, log_metric, **_):
        log_extra("first", [ids[0] for ids in completion_ids])
        log_metric("longest", max(len(ids) for ids in completion_ids))
        return [0.0] * len(completion_ids)

    collected = rollout(reward, batches=[[2], [0, 3], [1]])
    assert collected.extras == {"first": {0: 1, 1: 3, 2: 1, 3: 2}}
    assert collected.logged["longest"] == pytest.approx(
        (1 * 3 + 2 * 2 + 1 * 1) / 4
    )  # each call weighs as many samples as it had


def test_without_rewards_there_are_only_samples():
    collector = Collector(ScriptedClient(SCRIPT), None, decode, seed=0, max_failure_share=0)
    collected = collector.rollout(ROWS, 2, SamplingParams(3), 9, STATE, purpose="x")
    assert "rewards" not in collected.batch
    assert all(name.startswith("completions/") for name in collected.metrics)
    assert set(collected.timings.seconds) == {"rollout"}


def test_no_completion_that_ended_has_no_mean_length():
    metrics = rollout(length, [([1], "length")] * 4).metrics
    assert metrics["completions/clipped_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in metrics
