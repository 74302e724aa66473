"""Rollouts of agents on a real engine: what is trained on is what the engine made, whatever agents and tools do."""

import asyncio
import contextlib
import itertools
import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hybrid_rl
from hybrid_rl.agents.client import Limits, TrajectoryEndedError
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.floor import check_rollout_func
from hybrid_rl.agents.trajectory import Sample, Trajectory
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import AgentError, ConfigError, DataError
from hybrid_rl.process.interrupts import clear_interrupt, request_interrupt
from hybrid_rl.rewards import EngineJudge, group_reward
from hybrid_rl.rewards.results import cause_of
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.trajectory_stream import limits_of
from hybrid_rl.rollout.turns import EngineTurns, TrajectoryTokens
from tests.support.inside.rollouts import asks_of, is_idle, refuse_turn_rewards, set_settings, settings_of
from tests.support.tiny import ids_of
from tests.unit.rollout.agents import (
    MAX_TOKENS,
    PROMPTS,
    STATE,
    TASKS,
    Rig,
    own_logprobs,
    random_delays,
    wandering,
)

TOKENS = ("prompt_ids", "completion_ids", "completion_mask", "policy_version", "token_rewards")
NUMBERS = ("trajectory", "turn", "group", "rewards", "policy_length", "prompt_length", "oldest_version")


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(threading.enumerate())
    yield
    clear_interrupt()
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


@pytest.fixture
def clock(monkeypatch):
    """The clock by which trajectories end, which stands until a test moves it: a slow machine ends none."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(EngineTurns, "seconds", lambda turns: clock.seconds)
    return clock


def is_empty(rig):
    return is_idle(rig.client) and not asks_of(rig.rollout)


def rolled(agent, *, num_generations=3, tasks=TASKS, **options):
    with Rig(agent, **options) as rig:
        batch, report = rig.run(num_generations, tasks)
        assert is_empty(rig)
        return batch, report


async def silent(episode):
    """An agent that asks nothing."""


async def once(episode):
    await episode.client.generate(ids_of(episode.prompt), max_tokens=3)


# --------------------------------------------------------------------------------------------------- token exactness


def test_logprobs_are_the_models_own_and_neither_delays_nor_limits_change_a_sample():
    with Rig(wandering()) as rig:
        reference, _ = rig.run()
        mask = reference["completion_mask"].values
        expected = own_logprobs(rig.module, reference)[mask].float()
    torch.testing.assert_close(reference["rollout_logprobs"].values[mask], expected, rtol=0, atol=1e-5)
    assert 0.3 < mask.double().mean() < 0.9
    assert reference["rollout_logprobs"].values[~mask].eq(0).all()
    made = reference["policy_version"].values
    assert made[~mask].eq(-1).all() and made[mask].eq(1).all()
    assert reference["policy_length"].tolist() == [int(row.sum()) for row in reference["completion_mask"]]
    assert set(reference["turn"].tolist()) == {0, 1}  # some fork
    for seed, options in enumerate([{"config": {"max_open_trajectories": 2}}, {"max_num_seqs": 3}]):
        batch, _ = rolled(wandering(random_delays(seed)), **options)
        for name in TOKENS:
            assert torch.equal(batch[name].values, reference[name].values), name
            assert torch.equal(batch[name].offsets, reference[name].offsets), name
        for name in NUMBERS:
            assert torch.equal(batch[name], reference[name]), name
        found, expected = batch["rollout_logprobs"].values, reference["rollout_logprobs"].values
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # A rank that has only some of the prompts makes the same samples of them.
    part, _ = rolled(wandering(), tasks=TASKS[2:])
    rows = (reference["group"] >= 102).nonzero()[:, 0]
    assert torch.equal(part["completion_ids"].values, reference["completion_ids"].select(rows).values)


def test_a_sample_is_what_the_engine_said_and_what_the_agent_put_between():
    told = {}

    async def agent(episode):
        ids, spans = ids_of(episode.prompt), []
        for _ in range(2):
            turn = await episode.client.generate(ids, max_tokens=2)
            ids = [*ids, *turn.token_ids, *ids_of("[5]")]
            spans.append(list(turn.token_ids))
        told[episode.prompt] = spans

    batch, _ = rolled(agent, num_generations=1)
    for index, prompt in enumerate(PROMPTS):
        first, second = told[prompt]
        assert batch["prompt_ids"][index].tolist() == ids_of(prompt)
        assert batch["completion_ids"][index].tolist() == [*first, *ids_of("[5]"), *second]
        assert batch["completion_mask"][index].tolist() == [True] * len(first) + [False] * 3 + [True] * len(second)
    assert batch["trajectory"].tolist() == [100, 101, 102, 103]
    assert batch["row"] == [{"answer": str(place)} for place in range(4)]


def test_agents_within_an_agent_each_have_a_sample():
    async def agent(episode):
        asked = [episode.client.generate(ids_of(text), max_tokens=3) for text in ("1+1=", "2+2=", "1+1=")]
        turns = await asyncio.gather(*asked)
        episode.trajectory.add_reward(1.0, turns[1])
        episode.trajectory.add_reward(0.5)

    batch, _ = rolled(agent, num_generations=1, tasks=TASKS[:1])
    # What asks first is the main agent, whose samples come last.
    assert [row.tolist() for row in batch["prompt_ids"]] == [ids_of(text) for text in ("2+2=", "1+1=", "1+1=")]
    assert batch["turn"].tolist() == [0, 1, 2] and batch["trajectory"].unique().tolist() == [100]
    assert batch["rewards"].tolist() == [1.5] * 3  # a trajectory has one reward
    dense = [row.tolist() for row in batch["token_rewards"]]
    assert dense == [[*[0.0] * (len(dense[0]) - 1), 1.0], *([0.0] * len(row) for row in dense[1:])]
    assert batch["completion_ids"][1].tolist() != batch["completion_ids"][2].tolist()  # noise of its own


# ------------------------------------------------------------------------------------------------------------ limits


def test_a_budget_is_used_to_its_last_token():
    async def agent(episode):
        ids = ids_of(episode.prompt)
        while True:
            turn = await episode.client.generate(ids, max_tokens=7)
            ids = [*ids, *turn.token_ids, *ids_of("[5]")]

    batch, report = rolled(agent)
    lengths, ends = batch["completion_length"].tolist(), batch["finish_reason"]
    assert set(ends) == {"length"}
    # Of turns of seven tokens and answers of three, forty end in the third token of an answer at the latest.
    assert all(MAX_TOKENS - 3 <= length <= MAX_TOKENS for length in lengths)
    assert MAX_TOKENS in lengths
    assert report.metrics.result()["agents/ended_length"] == 1.0


def test_an_agent_past_its_time_keeps_its_turns(clock):
    answered = []

    async def agent(episode):
        await once(episode)
        answered.append(episode)
        if len(answered) == len(TASKS):
            clock.seconds = 1.0
        if episode.prompt == PROMPTS[1]:
            await asyncio.sleep(60)
        if episode.prompt == PROMPTS[2]:  # with the engine at work
            while True:
                await episode.client.generate(ids_of("1+1="), max_tokens=30)

    begun = time.monotonic()
    batch, report = rolled(agent, num_generations=1, config={"trajectory_timeout_seconds": 0.4})
    assert time.monotonic() - begun < 5
    first = batch.select((batch["turn"] == 0).nonzero()[:, 0])
    assert first["finish_reason"] == ["stop", "time", "time", "stop"]
    assert (first["policy_length"] > 0).all()
    assert report.failures == [] or {failure.reason for failure in report.failures} == {"none"}
    assert report.metrics.result()["agents/ended_time"] == 0.5


def test_an_agent_that_refuses_to_end_is_left_alone(monkeypatch, caplog, clock):
    """It goes on until that was said: how long the machine takes does not matter."""
    monkeypatch.setattr("hybrid_rl.rollout.episodes.CANCEL_SECONDS", 0.05)
    asked = []

    async def agent(episode):
        await once(episode)
        clock.seconds = 1.0
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        while "goes on" not in caplog.text:
            with contextlib.suppress(TrajectoryEndedError):
                await once(episode)
                asked.append("was answered")
            await asyncio.sleep(0.01)

    batch, _ = rolled(agent, num_generations=1, tasks=TASKS[:1], config={"trajectory_timeout_seconds": 0.1})
    assert batch["finish_reason"] == ["time"] and not asked
    assert "goes on; what it does is not used" in caplog.text


def test_what_an_agent_raises_after_a_limit_is_no_failure(clock):
    answered = []

    async def agent(episode):
        episode.trajectory.add_reward(1.0)
        try:
            await once(episode)
            answered.append(episode)
            if len(answered) == len(TASKS):
                clock.seconds = 1.0
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError("the connection was closed") from None

    batch, report = rolled(agent, num_generations=1, config={"trajectory_timeout_seconds": 0.3})
    assert batch["finish_reason"] == ["time"] * 4 and batch["rewards"].tolist() == [1.0] * 4
    assert report.failures == []


def test_a_call_may_have_longer_prompts_and_completions_than_training():
    row = PromptRow(0, "", (4,) * 25, {})
    call = RolloutCall(1, SamplingParams(15), 1, STATE, "generate", 0)
    assert limits_of(Limits(10, 30, 3, 20), [RolloutTask(0, row)], call) == Limits(15, 40, 3, 25)
    call = RolloutCall(1, SamplingParams(5), 1, STATE, "generate", 0)
    assert limits_of(Limits(10, 60, None, 50), [RolloutTask(0, row)], call) == Limits(5, 60, None, 50)


def test_trajectories_are_begun_in_order_and_only_so_many_are_open():
    begun, most = [], []

    async def agent(episode):
        begun.append(episode.trajectory)
        await once(episode)
        most.append(sum(trajectory.end_reason is None for trajectory in begun))
        await asyncio.sleep(0.002)

    batch, report = rolled(agent, config={"max_open_trajectories": 5})
    assert [trajectory.row["answer"] for trajectory in begun] == [str(place) for place in range(4) for _ in range(3)]
    assert max(most) == 5
    assert report.metrics.result()["agents/open_max"] == 5
    assert begun[0].row == {"answer": "0", "prompt": PROMPTS[0]}


# ---------------------------------------------------------------------------------------------------------- failures


def test_an_exception_masks_its_trajectory_only():
    async def agent(episode):
        await once(episode)
        if episode.prompt == PROMPTS[1]:
            raise ValueError("the lamp is broken")
        episode.trajectory.add_reward(1.0)

    seen = []

    def watch(prompts, completions, **_):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    batch, report = rolled(agent, functions=[watch])
    assert sorted(seen) == sorted(text for text in PROMPTS if text != PROMPTS[1] for _ in range(3))
    assert batch["finish_reason"] == ["stop"] * 3 + ["error"] * 3 + ["stop"] * 6
    assert batch["rewards"].isnan().tolist() == [False] * 3 + [True] * 3 + [False] * 6
    assert (batch["policy_length"] > 0).all()  # its turns stay
    failed = report.failures
    assert [failure.key.trajectory for failure in failed] == [103, 104, 105]
    assert {(failure.function, failure.reason) for failure in failed} == {("the agent", "agent")}
    assert failed[0].detail.startswith("Traceback") and "the lamp is broken" in failed[0].detail
    assert str(Path(hybrid_rl.__file__).parent) + os.sep not in failed[0].detail  # the user's own frames only
    assert "the lamp is broken" in batch["conversation"][3]["error"]


@pytest.mark.parametrize(("error", "reason"), [(KeyboardInterrupt, "interrupt"), (SystemExit, "ended")])
def test_an_agent_that_asks_the_program_to_end_is_reported(error, reason):
    async def agent(episode):
        if episode.prompt == PROMPTS[0]:
            raise error("enough")
        await once(episode)
        episode.trajectory.add_reward(1.0)

    batch, report = rolled(agent, num_generations=1)
    assert [(failure.function, failure.reason) for failure in report.failures] == [("the agent", reason)]
    assert batch["rewards"].isnan().tolist() == [True, False, False, False]


def test_an_agent_error_ends_the_run():
    async def agent(episode):
        await once(episode)
        if episode.prompt == PROMPTS[2]:
            raise AgentError("no environment can be made")
        await asyncio.sleep(60)

    with Rig(agent) as rig:
        with pytest.raises(AgentError, match="no environment"):
            rig.run()
        assert is_empty(rig)


def test_a_trajectory_without_a_token_is_a_sample_that_teaches_nothing():
    async def agent(episode):
        if episode.prompt == PROMPTS[0]:
            raise RuntimeError("before it began")
        if episode.prompt == PROMPTS[1]:
            episode.trajectory.add_reward(1.0)
            episode.trajectory.end("time")  # a limit is no failure
            return
        if episode.prompt == PROMPTS[2]:
            episode.trajectory.add_reward(1.0)
            return
        await once(episode)
        episode.trajectory.add_reward(0.0)

    batch, _ = rolled(agent, num_generations=1)
    assert batch["completion_length"][:3].tolist() == [1] * 3 and batch["policy_length"][:3].tolist() == [0] * 3
    assert batch["oldest_version"].tolist() == [1] * 4
    assert batch["prompt_ids"][0].tolist() == ids_of(PROMPTS[0])
    assert batch["rewards"].isnan().tolist() == [True, False, True, False]
    assert (batch["rewards"][1], batch["rewards"][3]) == (1.0, 0.0)


def test_nothing_more_is_generated_for_a_trajectory_that_has_ended(caplog):
    late, tasks = [], []

    async def agent(episode):
        async def stray():
            while episode.trajectory.end_reason is None:
                await asyncio.sleep(0.001)
            try:
                await once(episode)
            except TrajectoryEndedError as error:
                late.append(error.reason)
            await asyncio.sleep(60)

        tasks.append(asyncio.ensure_future(stray()))
        await once(episode)
        async with asyncio.timeout(10):
            while episode.prompt == PROMPTS[0] and len(late) < 3:
                await asyncio.sleep(0.001)

    _, report = rolled(agent, num_generations=1)
    assert late[:3] == ["stop"] * 3 and report.metrics.result()["agents/turns_mean"] == 1.0
    assert all(task.done() for task in tasks)  # cancelled with the rollout
    assert "left behind" not in caplog.text


@pytest.mark.parametrize("busy", [True, False])
def test_an_interrupt_is_seen_at_once_and_leaves_nothing(busy):
    cancelled = []

    async def agent(episode):
        try:
            while True:
                await once(episode)
                await asyncio.sleep(0 if busy else 60)
        except asyncio.CancelledError:
            cancelled.append(time.monotonic())
            raise

    with Rig(agent) as rig:
        requested = []
        timer = threading.Timer(0.3, lambda: (requested.append(time.monotonic()), request_interrupt()))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            rig.run()
        ended = time.monotonic()
        timer.join()
        assert ended - requested[0] < 0.5
        assert len(cancelled) >= 1 and is_empty(rig)
        clear_interrupt()
        set_settings(rig.rollout, replace(settings_of(rig.rollout), agent=once))  # the next rollout is undisturbed
        batch, _ = rig.run()
        assert batch["finish_reason"] == ["stop"] * 12


# ----------------------------------------------------------------------------------------------------------- rewards


def test_functions_see_each_trajectory_once_and_add_to_its_own_rewards():
    seen = []

    def length(completions, completion_ids, answer, prompts, trainer_state, **_):
        seen.extend(zip(prompts, completions, completion_ids, answer, strict=True))
        assert trainer_state == STATE
        return [float(len(ids)) for ids in completion_ids]

    batch, report = rolled(wandering(), functions=[length])
    last = [
        index for index in range(batch.num_samples) if index + 1 == batch.num_samples or batch["turn"][index + 1] == 0
    ]
    ids = sorted(batch["completion_ids"][index].tolist() for index in last)
    assert sorted(found for *_, found, _ in seen) == ids and len(seen) == 12
    assert sorted(text for _, text, *_ in seen) == sorted(batch["completion"][index] for index in last)
    for index in range(batch.num_samples):
        functions, own = batch["function_rewards"][index]
        assert batch["rewards"][index] == functions + own
    # Turn rewards lie at the last token of their turn, and add up to what the agent gave.
    sums = torch.zeros(112).index_add_(
        0, batch["trajectory"], torch.stack([row.sum() for row in batch["token_rewards"]])
    )
    own = {int(t): row[1] for t, row in zip(batch["trajectory"], batch["function_rewards"], strict=True)}
    assert {trajectory: float(sums[trajectory]) for trajectory in own} == own
    spans = [span for shown in batch["conversation"] for span in shown["tokens"]]
    assert {span["origin"] for span in spans} == {"policy", "environment"}
    assert sum(span.get("reward", 0) for span in spans) == sum(own.values())
    assert sum(span["num_tokens"] for span in spans) == int(batch["completion_length"].sum())
    assert report.failures == []


def test_groups_are_scored_whole():
    sizes = []

    def best(completions, **_):
        sizes.append(len(completions))
        return [1.0] * len(completions)

    async def agent(episode):
        await once(episode)
        if episode.prompt == PROMPTS[0] and not sizes:
            raise RuntimeError("one of them fails")

    batch, _ = rolled(agent, functions=[best], score_by="group")
    assert sizes == [3] * 3  # nobody is left of the first group
    assert batch["rewards"].isnan().sum() == 3


def test_a_failed_trajectory_is_not_compared_with_others():
    """Its sample is one token that nobody wrote: it would be the shortest of its group."""
    seen, number = [], itertools.count()

    @group_reward
    def shortest(completion_ids, **_):
        seen.append([len(ids) for ids in completion_ids])
        return [float(len(ids) == min(seen[-1])) for ids in completion_ids]

    async def agent(episode):
        if next(number) == 1:
            raise RuntimeError("its environment is gone")
        await episode.client.generate(ids_of(episode.prompt), max_tokens=3)

    task = TASKS[:1]
    batch, report = rolled(agent, functions=[shortest], score_by="group", tasks=task, num_generations=4)
    assert seen == [[3, 3, 3]]
    torch.testing.assert_close(batch["rewards"].tolist(), [1.0, math.nan, 1.0, 1.0], equal_nan=True)
    assert [failure.key.trajectory for failure in report.failures] == [101]


def test_a_failed_trajectory_is_not_judged():
    """Neither by a judge, in whose pairs it would count for the others, nor by a model that comes later."""
    number = itertools.count()

    async def agent(episode):
        if next(number) == 1:
            raise RuntimeError("its environment is gone")
        await episode.client.generate(ids_of(episode.prompt), max_tokens=3)

    judge = EngineJudge(lambda **_: "1", lambda text: 1.0, mode="pairwise", max_tokens=1)
    batch, report = rolled(agent, functions=[judge], tasks=TASKS[:1])
    values = [row[0] for row in batch["function_rewards"]]
    assert values[0] == values[2] == 0.5 and math.isnan(values[1]) and math.isnan(float(batch["rewards"][1]))
    assert [failure.key.trajectory for failure in report.failures] == [101]


def test_rewards_that_nobody_counts_are_refused():
    async def agent(episode):
        await once(episode)
        episode.trajectory.add_reward(1.0)

    with Rig(agent, functions=[lambda completions, **_: [0.0] * len(completions)]) as rig:
        rig.rewards.entries.given.clear()
        with pytest.raises(ConfigError, match="GivenReward"):
            rig.run()


def test_ends_and_scores_are_told_to_the_trajectory():
    told = []

    async def agent(episode):
        trajectory = episode.trajectory

        async def ended():
            told.append(("end", trajectory.end_reason))
            trajectory.given["late"] = 1.0

        trajectory.on_end.append(ended)
        trajectory.on_left.append(lambda: told.append(("scored", trajectory.end_reason)))
        await once(episode)
        if episode.prompt == PROMPTS[0]:
            raise RuntimeError("on purpose")
        trajectory.add_reward(1.0)
        async with asyncio.timeout(10):
            while episode.prompt == PROMPTS[3] and ("scored", "stop") not in told:
                await asyncio.sleep(0.001)  # environments of others are given back meanwhile

    rolled(agent, num_generations=1)
    assert sorted(told) == sorted([(kind, end) for kind in ("end", "scored") for end in ("error", *["stop"] * 3)])
    assert told[0][0] == "end" and told[-1][0] == "scored"


@pytest.mark.parametrize("rollout_func", [None, silent])
def test_a_rank_without_prompts_has_an_empty_share(rollout_func):
    batch, report = rolled(None if rollout_func else once, tasks=[], rollout_func=rollout_func)
    whole, _ = rolled(once, num_generations=1)
    assert batch.num_samples == 0 and set(batch) == set(whole)
    assert type(batch).concat([batch, whole]).num_samples == 4
    assert report.metrics.result().get("agents/turns_mean") is None


# ------------------------------------------------------------------------------------------------------ rollout_func


def test_a_rollout_func_makes_the_trajectories_of_its_rows():
    async def rollout(rows, client, trainer_state, num_generations):
        assert (trainer_state, num_generations) == (STATE, 2)

        async def one(row):
            trajectory = client.trajectory(row)
            ids = ids_of(row["prompt"])
            turn = await client.generate(ids, trajectory, max_tokens=3)
            await client.generate(ids_of("1+1="), max_tokens=2)  # nothing records it
            await client.generate([*ids, *turn.token_ids, 3], trajectory, max_tokens=3)
            trajectory.add_reward(float(row["answer"]))
            return trajectory

        return await asyncio.gather(*map(one, rows))

    batch, report = rolled(None, rollout_func=rollout, num_generations=2)
    assert batch["rewards"].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert [row.tolist() for row in batch["prompt_ids"]] == [ids_of(text) for text in PROMPTS for _ in range(2)]
    assert report.metrics.result()["agents/turns_mean"] == 2.0
    assert batch["completion_ids"][0].tolist() != batch["completion_ids"][1].tolist()

    async def agent(episode):
        ids = ids_of(episode.prompt)
        turn = await episode.client.generate(ids, max_tokens=3)
        await episode.client.generate([*ids, *turn.token_ids, 3], max_tokens=3)

    same, _ = rolled(agent, num_generations=2)
    assert torch.equal(same["completion_ids"].values, batch["completion_ids"].values)


def made(tokens=(5, 6), **changes):
    sample = Sample((4,))
    sample.add_policy(Completion(list(tokens), [-1.0] * len(tokens), [1] * len(tokens), "stop"))
    for name, value in changes.items():
        setattr(sample, name, value)
    trajectory = Trajectory()
    trajectory.samples.append(sample)
    return trajectory


def test_trajectories_may_be_put_together_by_hand():
    async def rollout(rows, client, **_):
        return [made((5, index)) for index, _ in enumerate(rows)]

    batch, _ = rolled(None, rollout_func=rollout, num_generations=1)
    assert [row.tolist() for row in batch["completion_ids"]] == [[5, 0], [5, 1], [5, 2], [5, 3]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda rows: None, "returned None"),
        (lambda rows: [made()], "a list of 1 for 4 rows"),
        (lambda rows: [made()] * 4, "same trajectory"),
        (lambda rows: [Trajectory() for _ in rows], "without a token of the policy"),
        (lambda rows: [made(logprobs=[-1.0]) for _ in rows], "'logprobs': 1"),
        (lambda rows: [made(prompt_ids=()) for _ in rows], "no prompt_ids"),
        (lambda rows: [made(turn_rewards=[]) for _ in rows], "0 turn_rewards"),
    ],
)
def test_what_a_rollout_func_returns_is_checked(answer, words):
    async def rollout(rows, client):
        return answer(rows)

    batch, report = rolled(None, rollout_func=rollout, num_generations=1)
    assert words in report.failures[0].detail and "DataError" in report.failures[0].detail
    assert batch["rewards"].isnan().all() and batch["finish_reason"] == ["error"] * 4


def test_a_rollout_func_must_catch_the_end_of_a_trajectory():
    async def rollout(rows, client):
        for row in rows:
            trajectory = client.trajectory(row)
            while True:
                turn = await client.generate(ids_of("1+1="), trajectory)
                await client.generate([*turn.prompt_ids, *turn.token_ids], trajectory)

    _, report = rolled(None, rollout_func=rollout, num_generations=1)
    cause = cause_of(report.failures[0].detail)  # what the headline tells
    assert f"max_completion_length={MAX_TOKENS}" in cause and "client.each(rows, one)" in cause


def test_each_row_ends_by_itself():
    async def rollout(rows, client):
        async def one(row, trajectory):
            ids = ids_of(row["prompt"])
            turn = await client.generate(ids, trajectory, max_tokens=2)
            trajectory.add_reward(1.0)
            while row["answer"] == "1":
                turn = await client.generate([*turn.prompt_ids, *turn.token_ids, 3], trajectory)
            if row["answer"] == "2":
                raise KeyError("lamp")

        return await client.each(rows, one)

    batch, report = rolled(None, rollout_func=rollout, num_generations=1)
    assert batch["finish_reason"] == ["stop", "length", "error", "stop"]
    assert [reward == 1.0 for reward in batch["rewards"].tolist()] == [True, True, False, True]
    (failure,) = report.failures
    assert failure.reason == "agent" and cause_of(failure.detail) == "KeyError: 'lamp'"
    assert "floor.py" not in failure.detail


def test_a_row_past_its_time_ends_alone(clock, monkeypatch):
    ready, ended, others = asyncio.Event(), asyncio.Event(), []
    close = TrajectoryTokens.close

    def noted(tokens, reason):
        close(tokens, reason)
        if reason == "time":
            ended.set()

    monkeypatch.setattr(TrajectoryTokens, "close", noted)

    async def rollout(rows, client):
        async def one(row):
            trajectory = client.trajectory(row)
            turn = await client.generate(ids_of(row["prompt"]), trajectory, max_tokens=2)
            if row["answer"] == "1":
                await ready.wait()
                clock.seconds = 1.0
                await ended.wait()
            with contextlib.suppress(TrajectoryEndedError):
                await client.generate([*turn.prompt_ids, *turn.token_ids, 3], trajectory, max_tokens=2)
            others.append(row)
            if len(others) == len(rows) - 1:
                ready.set()
            return trajectory

        return await asyncio.gather(*map(one, rows))

    batch, _ = rolled(None, rollout_func=rollout, num_generations=1, config={"trajectory_timeout_seconds": 0.2})
    assert batch["finish_reason"] == ["stop", "time", "stop", "stop"]
    assert (batch["policy_length"][1], batch["completion_mask"][1].all()) == (2, True)


def test_arguments_of_the_client_and_of_add_reward():
    """Text is encoded as a dataset's is; what cannot be used is refused with what can."""

    async def rollout(rows, client):
        async def one(row, trajectory):
            await client.generate(row["prompt"], trajectory, max_tokens=2)
            for words, prompt, keys in (
                ("a list of messages such as", ["1"], {}),
                ("a list of messages such as", [], {}),
                (r"tool_schema\(look\)", [3], {"tools": [look]}),
                ("got temperature, but takes tools", [3], {"temperature": 0.2}),
            ):
                with pytest.raises(DataError, match=words):
                    await client.generate(prompt, trajectory, **keys)
            with pytest.raises(DataError, match=r"add_reward\('good'\) got a str; give a number"):
                trajectory.add_reward("good")
            with pytest.raises(DataError, match="not a copy"):
                client.trajectory(dict(row))
            with pytest.raises(DataError, match="leave it out"):
                await client.generate(row["prompt"], Trajectory())
            trajectory.add_reward(1.0)

        return await client.each(rows, one)

    def look():
        """Look."""

    batch, report = rolled(None, rollout_func=rollout, num_generations=1)
    assert not report.failures, report.failures[0].detail
    assert [ids.tolist() for ids in batch["prompt_ids"]] == [ids_of(text) for text in PROMPTS]


def test_a_rollout_func_must_be_a_coroutine_function():
    def plain(rows, client):
        return []

    with pytest.raises(ConfigError, match="async def"):
        check_rollout_func(plain)
    with pytest.raises(ConfigError, match="cannot be called"):
        check_rollout_func(3)
    with pytest.raises(ConfigError, match=r"takes \(prompts, trainer\), as TRL's does; .*f\(rows, client"):
        check_rollout_func(lambda prompts, trainer: {})


@pytest.mark.parametrize("is_of_turn", [False, True])
def test_rewards_of_turns_that_the_loss_cannot_use_are_refused_when_there_are_some(is_of_turn):
    async def agent(episode):
        turn = await episode.client.generate(ids_of(episode.prompt), max_tokens=2)
        episode.trajectory.add_reward(1.0, turn if is_of_turn else None)

    refused = pytest.raises(ConfigError, match="gave a reward to a turn.*which the loss cannot use")
    with Rig(agent) as rig, refused if is_of_turn else contextlib.nullcontext():
        refuse_turn_rewards(rig.rollout, "the loss cannot use")
        rig.run(1, TASKS[:1])


def test_a_reward_that_is_not_finite_is_told_as_such():
    async def agent(episode):
        await episode.client.generate(ids_of(episode.prompt), max_tokens=2)
        episode.trajectory.reward = float("nan")

    _, report = rolled(agent, num_generations=1, tasks=TASKS[:1])
    assert [(one.function, one.reason) for one in report.failures] == [("agent", "nan")]
    assert "add_reward come to nan" in report.failures[0].detail
